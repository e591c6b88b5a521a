"""GET for files from the network, by rules that keep a download from being led elsewhere.

Owns which addresses may be asked: https only (http where the user's own machine or settings say so), and no
name or redirect that leads into a private network. Knows nothing of models, files or progress.
"""

from __future__ import annotations

import ipaddress
import socket
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeAlias
from urllib.parse import urljoin, urlsplit

import httpx2

from edgeserve.errors import DownloadError

USER_AGENT: Final = "edgeserve"
MAX_REDIRECTS: Final = 5
CONNECT_TIMEOUT_S: Final = 10.0
READ_TIMEOUT_S: Final = 30.0
_REDIRECTS: Final = (301, 302, 303, 307, 308)
_PRIVATE: Final = tuple(
    ipaddress.ip_network(network)
    for network in (
        "0.0.0.0/8",
        "10.0.0.0/8",
        "100.64.0.0/10",
        "127.0.0.0/8",
        "169.254.0.0/16",
        "172.16.0.0/12",
        "192.168.0.0/16",
        "224.0.0.0/3",
        "::/127",
        "fc00::/7",
        "fe80::/10",
        "ff00::/8",
    )
)

Resolver: TypeAlias = Callable[[str], list[str]]


def resolve_host(host: str) -> list[str]:
    """Addresses of `host`; none if it cannot be resolved here, as behind a proxy."""
    try:
        return [str(info[4][0]) for info in socket.getaddrinfo(host, None, proto=socket.IPPROTO_TCP)]
    except (OSError, UnicodeError):
        return []


def is_loopback(host: str) -> bool:
    """Whether `host` is this machine by its very name; a name that merely resolves to it is not."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_private(address: str) -> bool:
    parsed = ipaddress.ip_address(address.split("%")[0])
    if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is not None:
        parsed = parsed.ipv4_mapped
    return any(parsed.version == network.version and parsed in network for network in _PRIVATE)


def origin(url: str) -> str:
    """Scheme, host and port: what decides whether a secret may go along."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname}:{parts.port or {'http': 80}.get(parts.scheme, 443)}"


def without_secrets(url: str) -> str:
    """The URL for messages: no user name, password or query (signed links carry their key there)."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    return f"{parts.scheme}://{host}{f':{parts.port}' if parts.port else ''}{parts.path}"


def check_url(url: str, *, first: str | None = None, resolve: Resolver = resolve_host) -> None:
    """DownloadError unless `url` may be asked, coming from `first`, the URL that the user's settings named.

    What has the origin of `first` may be asked like `first`; loopback may lead to loopback; all else must be
    https and public.
    """
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname or "", parts.port
    except ValueError as error:
        raise DownloadError(f"{url!r} is not a usable address: {error}.") from None
    start = url if first is None else first
    if parts.scheme not in ("http", "https") or not host:
        raise DownloadError(f"{without_secrets(url)!r} is not an https address.")
    if is_loopback(host) and is_loopback(urlsplit(start).hostname or ""):
        return
    if first is not None and origin(url) == origin(first):
        return
    if parts.scheme != "https":
        raise DownloadError(f"{without_secrets(url)} is not encrypted.", "Use its https address.")
    for address in _addresses(host, resolve):
        if is_private(address):
            raise DownloadError(
                f"{without_secrets(url)} leads into a private network ({address}).",
                "Downloads only come from public hosts. Fetch the file yourself and give its path.",
            )


def _addresses(host: str, resolve: Resolver) -> list[str]:
    try:
        return [str(ipaddress.ip_address(host))]
    except ValueError:
        pass
    # Behind a proxy names are the proxy's to resolve, and what this machine would find means nothing.
    if urllib.request.getproxies().get("https") and not urllib.request.proxy_bypass(host):
        return []
    return resolve(host)


@contextmanager
def open_url(
    url: str, headers: dict[str, str] | None = None, *, trusted: str | None = None
) -> Iterator[httpx2.Response]:
    """GET `url`; yields the response, body unread, of any status that is not a redirect.

    `trusted` is the URL that the user's own settings named, when `url` came from there. `Authorization` is
    not carried to another origin. DownloadError if the host cannot be reached or a redirect breaks the rules.
    """
    first = trusted or url
    timeout = httpx2.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
    # Identity: a compressed body would not match its size, nor would ranges of it.
    sent = {"User-Agent": USER_AGENT, "Accept-Encoding": "identity"} | (headers or {})
    check_url(url, first=trusted)
    with _named_failures(url), httpx2.Client(timeout=timeout) as client:
        for _ in range(MAX_REDIRECTS + 1):
            with client.stream("GET", url, headers=sent, follow_redirects=False) as response:
                location = response.headers.get("location")
                if response.status_code not in _REDIRECTS or not location:
                    yield response
                    return
            target = _joined(url, location)
            check_url(target, first=first)
            if origin(target) != origin(url):
                sent = {name: value for name, value in sent.items() if name.lower() != "authorization"}
            url = target
    raise DownloadError(f"{without_secrets(url)} redirects more than {MAX_REDIRECTS} times.")


def _joined(url: str, location: str) -> str:
    try:
        return urljoin(url, location)
    except ValueError as error:
        raise DownloadError(f"{without_secrets(url)} redirects to an unusable address: {error}.") from None


@contextmanager
def _named_failures(url: str) -> Iterator[None]:
    host = urlsplit(url).hostname
    try:
        yield
    except httpx2.TimeoutException as error:
        raise DownloadError(
            f"{host} does not answer.", "Check the connection, or work with --offline."
        ) from error
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        reason = str(error) or type(error).__name__
        raise DownloadError(
            f"{host} cannot be reached or broke off: {reason}.",
            "Check the connection, or work with --offline.",
        ) from error
