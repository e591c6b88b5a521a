"""Who may talk to this server: Host, Origin, API key. Runs before any route.

A server on localhost is within reach of every web page the user opens: by plain requests (Origin) and by
names that an attacker lets resolve to 127.0.0.1 (Host). So both must be local, the server's own, or on a
list; nothing is ever allowed to everybody. Owns those rules, the CORS headers that follow from them, and
X-Request-ID.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import uuid
from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgeserve.config import ServerConfig
from edgeserve.errors import AuthenticationError, ForbiddenError, RequestError, UsageError
from edgeserve.server.http_errors import error_response

PUBLIC_PATHS = frozenset({"/health", "/v1/health"})
NAMESPACE_KEY = "edgeserve.cache_namespace"
REQUEST_ID_KEY = "edgeserve.request_id"

# A browser must not take an answer for a script or a page, whatever it finds in it.
_HEADERS = {"X-Content-Type-Options": "nosniff"}
_METHODS = "GET, HEAD, POST, OPTIONS"
_SAFE_ID = re.compile(r"[\x21-\x7e]{1,128}")
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+(?:%[\w.]+)?\]|[^:\[\]/@\s]+)(?::\d{1,5})?")


class Guard:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._keys = tuple(key.encode() for key in config.api_keys)
        self._hosts = frozenset(host_name(host) or host for host in config.allowed_hosts)
        self._origins = frozenset(origin.rstrip("/").lower() for origin in config.allowed_origins)
        self._bound = config.host.strip("[]").lower()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        scope[REQUEST_ID_KEY] = request_id(headers)
        origin = headers.get("origin")
        try:
            self._check_host(headers, scope)
            self._check_origin(origin, headers)
            _check_fetch(origin, headers)
        except RequestError as error:
            # No CORS headers: the page that asked must not even learn why.
            send = _with_headers(send, {"X-Request-ID": scope[REQUEST_ID_KEY], **_HEADERS})
            await error_response(error)(scope, receive, send)
            return
        send = _with_headers(send, {"X-Request-ID": scope[REQUEST_ID_KEY], **_HEADERS, **_cors(origin)})
        if scope["method"] == "OPTIONS":
            await _preflight(headers)(scope, receive, send)
            return
        try:
            scope[NAMESPACE_KEY] = self._check_key(headers, scope["path"])
        except RequestError as error:
            await error_response(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check_host(self, headers: Headers, scope: Scope) -> None:
        values = headers.getlist("host")
        name = host_name(values[0]) if len(values) == 1 else None
        if name is None or not self._answers_to(name, scope):
            raise ForbiddenError(
                "This server does not answer to that Host.",
                "Name it with --allow-host if it is meant to.",
                code="host_not_allowed",
            )

    def _answers_to(self, name: str, scope: Scope) -> bool:
        if "*" in self._hosts or name in self._hosts or is_loopback(name) or name == self._bound:
            return True
        address = _address(name)
        if address is None:
            return False
        # An address cannot be rebound, so on a wildcard bind any of this machine's is as good as another.
        server = scope.get("server")
        return _is_wildcard(self._bound) or (server is not None and _address(str(server[0])) == address)

    def _check_origin(self, origin: str | None, headers: Headers) -> None:
        if origin is None:
            return
        if len(headers.getlist("origin")) > 1 or not self._allows_origin(origin, headers.get("host", "")):
            raise _foreign_page()

    def _allows_origin(self, origin: str, host: str) -> bool:
        origin = origin.lower()
        if origin in self._origins:
            return True
        scheme, _, authority = origin.partition("://")
        if scheme not in ("http", "https"):
            return False
        name = host_name(authority)
        return name is not None and (is_loopback(name) or authority == host.lower())

    def _check_key(self, headers: Headers, path: str) -> str:
        """The cache namespace of the key: what one key's holder sent must not be felt by another's."""
        if not self._keys or path in PUBLIC_PATHS:
            return ""
        given = _given_key(headers)
        # Every key is compared in full, so that the time says nothing about how much was right.
        matches = [hmac.compare_digest(given, key) for key in self._keys]
        if not any(matches):
            message = "The API key is wrong." if given else "This server needs an API key."
            raise AuthenticationError(message, "Send it as Authorization: Bearer KEY or as X-Api-Key: KEY.")
        return hashlib.sha256(given).hexdigest()[:16]


def _check_fetch(origin: str | None, headers: Headers) -> None:
    """Pictures and scripts of a foreign page come without an Origin; browsers tell by another header.

    A link that somebody follows is no fetch: its answer is shown to that person and to no page.
    """
    is_link = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
    if origin is None and headers.get("sec-fetch-site") == "cross-site" and not is_link:
        raise _foreign_page()


def _foreign_page() -> ForbiddenError:
    return ForbiddenError(
        "Pages of that origin may not use this server.",
        "Name it with --allow-origin if they are meant to.",
        code="origin_not_allowed",
    )


def _given_key(headers: Headers) -> bytes:
    """The bytes as they were sent (header values are Latin-1 here, whatever the client meant)."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip().encode("latin-1")
    return headers.get("x-api-key", "").strip().encode("latin-1")


def request_id(headers: Headers) -> str:
    """The client's own, when it is short and printable; otherwise a fresh one."""
    given = headers.get("x-request-id", "")
    return given if _SAFE_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"


def host_name(value: str) -> str | None:
    """The name or address in a Host value, without port, brackets and trailing dot; None if it is none."""
    found = _HOST.fullmatch(value.strip())
    if found is None:
        return None
    return found[1].strip("[]").rstrip(".").lower() or None


def is_loopback(name: str) -> bool:
    if name == "localhost" or name.endswith(".localhost"):
        return True
    address = _address(name)
    return address is not None and address.is_loopback


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def _is_wildcard(bound: str) -> bool:
    address = _address(bound)
    return bound == "" or (address is not None and address.is_unspecified)


def is_exposed(host: str) -> bool:
    """Whether a server bound to `host` can be reached from other machines."""
    return not is_loopback(host.strip("[]").lower())


def _cors(origin: str | None) -> dict[str, str]:
    if origin is None:
        return {}
    return {
        "Access-Control-Allow-Origin": origin,
        "Access-Control-Expose-Headers": "X-Request-ID, Retry-After",
        "Vary": "Origin",
    }


def _preflight(headers: Headers) -> Response:
    """The answer to OPTIONS, which never needs a key: browsers do not send one."""
    answer = {"Allow": _METHODS}
    if "origin" in headers:
        asked = headers.get("access-control-request-headers", "authorization, content-type")
        answer |= {
            "Access-Control-Allow-Methods": _METHODS,
            "Access-Control-Allow-Headers": asked[:512],
            "Access-Control-Max-Age": "600",
        }
        if headers.get("access-control-request-private-network") == "true":
            answer["Access-Control-Allow-Private-Network"] = "true"
    return Response(status_code=204, headers=answer)


def _with_headers(send: Send, extra: dict[str, str]) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in extra.items():
                headers[name] = value
        await send(message)

    return send_with_headers


def check_exposure(config: ServerConfig, *, is_insecure: bool = False) -> Collection[str]:
    """Warnings to show about who can reach the server. Raises UsageError when that is anybody at all."""
    if not is_exposed(config.host):
        return ()
    if not config.api_keys and not is_insecure:
        raise UsageError(
            f"On {config.host} other machines can reach this server, and it has no API key.",
            "Set one with --api-key or --api-key-file, or say --insecure.",
        )
    reach = "anybody on the network" if not config.api_keys else "anybody on the network who has a key"
    return (f"This server can be used by {reach} ({config.host}:{config.port}).",)
