"""Streaming client for any OpenAI-compatible server.

    async with Client("http://127.0.0.1:8080") as client:          # with or without /v1
        async with aclosing(client.chat_stream(messages, max_tokens=64)) as events:
            async for event in events:
                if event.kind is EventKind.TEXT: print(event.text, end="")

Owns: addresses, headers, requests and errors by name. Events carry the stamp of the bytes that they came in,
taken at the socket before any parsing (http_stream.py).
Does not know: retries (a refused request is a result, never hidden), benchmarks, terminals.

Leaving the `aclosing` block, or cancelling the task, closes the socket, which is how a server learns that
nobody waits for the answer any more.

Errors: `ServerUnreachableError` (nothing answers), `RemoteError` (an HTTP error, with `status`, `code`,
`message`, `retry_after_s`), `StreamBrokenError` (cut off in mid-answer), `RequestTimeoutError` (silence
longer than `read_timeout_s`). An error that a server sends inside a running stream is not raised: it is the
last event, of kind ERROR, so that what came before it stays usable.
"""

from __future__ import annotations

import asyncio
import math
import re
import ssl
import time
from base64 import b64encode
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx2

from edgeserve.errors import RequestError, UsageError
from edgeserve.http_stream import AT_ONCE, Answer, Sending, exchange
from edgeserve.stream_events import (
    EventKind,
    RemoteError,
    SSEDecoder,
    StreamBrokenError,
    StreamEvent,
    read_error,
    read_event,
)

Message = Mapping[str, Any]
DRAIN_TIMEOUT_S = 0.5
# Once the status is known, so much of an error's body and so long for it: more would tell nobody anything.
ERROR_BODY_TIMEOUT_S = 5.0
MAX_ERROR_BYTES = 1 << 20
# Without a scheme only with a password: `name@revision` is no address.
_USER = re.compile(r"((?:^|=)\w+://)[^\s/@]+@|(^|=)[^\s/@:=]+:[^\s/@]*@")


@dataclass(frozen=True)
class ModelInfo:
    """One entry of /v1/models. `n_ctx` is None when the server does not say; `meta` is its own object."""

    id: str
    n_ctx: int | None
    meta: Mapping[str, Any]


@dataclass(frozen=True)
class Health:
    is_ok: bool
    status: str  # the server's own word: "ok", "Loading model", ...


def server_root(base_url: str) -> str:
    """`localhost:8080`, `http://localhost:8080/v1/` and the like -> `http://localhost:8080`."""
    url = base_url.strip()
    if "://" not in url:
        url = f"http://{url}"
    try:
        parsed = httpx2.URL(url)
    except httpx2.InvalidURL:
        parsed = httpx2.URL("")
    if parsed.scheme not in ("http", "https") or not parsed.host or "?" in url or "#" in url:
        raise UsageError(f"{base_url!r} is not a server address.", "Write http://host:port.")
    return str(parsed).rstrip("/").removesuffix("/v1").rstrip("/")


def hide_user(text: str) -> str:
    """An address, or an option with one, as it may be shown and kept: `http://***@host`."""
    return _USER.sub(lambda found: f"{found[1] or found[2] or ''}***@", text)


def _authorization(url: httpx2.URL, api_key: str | None) -> dict[str, str]:
    """For the user whom the address names, else for the key: the header has room for one of them."""
    if url.userinfo:
        pair = f"{url.username}:{url.password}".encode()
        return {"Authorization": f"Basic {b64encode(pair).decode('ascii')}"}
    if not api_key:
        return {}
    if not api_key.isascii() or not api_key.isprintable() or api_key != api_key.strip():
        raise UsageError("The API key has characters that no header can carry.", "Is it copied as a whole?")
    return {"Authorization": f"Bearer {api_key}"}


def _tls_context() -> ssl.SSLContext:
    try:
        return httpx2.create_ssl_context()
    except OSError as error:
        raise UsageError(
            f"The trusted certificates cannot be read: {error}.", "Look at SSL_CERT_FILE and SSL_CERT_DIR."
        ) from error


class Client:
    """One server. Use it as an async context manager, or call `aclose`.

    `base_url` may name a user (`http://user:password@host`), who then goes into every request instead of the
    key, and nowhere else. For https, SSL_CERT_FILE and SSL_CERT_DIR replace the system's certificates.
    Proxies of the environment are not used. Every request has a connection of its own: some servers close
    kept ones without a word, and what is lost that way would have to be sent again, which this never does.

    `model` goes into requests that name none; without it the first model that the server lists is taken.
    `read_timeout_s` bounds the silence between two pieces of a stream (None: wait for as long as it takes,
    since a long prompt is silent on servers that send no pings). `clock` stamps the arrivals.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        *,
        model: str | None = None,
        read_timeout_s: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        address = httpx2.URL(server_root(base_url))
        self.root = str(address.copy_with(userinfo=b"")).rstrip("/")
        self.model = model
        self._clock = clock
        self._read_timeout_s = read_timeout_s
        self._tls = _tls_context() if address.scheme == "https" else None
        # Identity: compressed bytes would be stamped when a block fills up, not when a token is sent.
        own = {"Accept": "*/*", "Accept-Encoding": "identity", "User-Agent": "edgeserve"}
        self._headers = own | _authorization(address, api_key)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Nothing is kept open between requests."""

    async def chat_stream(
        self, messages: Sequence[Message], sending: Sending = AT_ONCE, /, **params: object
    ) -> AsyncGenerator[StreamEvent, None]:
        """POST /v1/chat/completions, streamed. `params` are the API's own fields; None leaves one out.

        `sending` can hold the request back until an instant, and is told when it left."""
        body = {"messages": list(messages), **params}
        async with aclosing(self._stream("/v1/chat/completions", body, sending)) as events:
            async for event in events:
                yield event

    async def completion_stream(self, prompt: object, **params: object) -> AsyncGenerator[StreamEvent, None]:
        """POST /v1/completions, streamed. `prompt` is a string or a list of token ids."""
        async with aclosing(self._stream("/v1/completions", {"prompt": prompt, **params})) as events:
            async for event in events:
                yield event

    async def get_json(self, path: str) -> Any:
        """GET a path below the server's root (`/props`, `/v1/models`, `/slots`), parsed."""
        return _parse(await self._get(path))

    async def get_text(self, path: str) -> str:
        """GET a path below the server's root as text (`/metrics`)."""
        return (await self._get(path)).text

    async def get_events(self, path: str) -> AsyncGenerator[str, None]:
        """GET a path below the server's root as server-sent events (`/events`): the data of each, comments
        left out, until the server ends the stream."""
        decoder = SSEDecoder()
        async with self._send(self._request("GET", path)) as answer:
            async for _, data in answer.pieces:
                for is_comment, text in decoder.feed(data):
                    if not is_comment:
                        yield text

    async def post_json(self, path: str, body: Mapping[str, object]) -> Any:
        """POST a JSON object to a path below the server's root, and parse the answer."""
        return _parse(await self._whole(self._request("POST", path, body)))

    async def models(self) -> list[ModelInfo]:
        """GET /v1/models."""
        answer = await self.get_json("/v1/models")
        entries = answer.get("data") if isinstance(answer, dict) else None
        found = [entry for entry in entries or [] if isinstance(entry, dict) and "id" in entry]
        return [_read_model(entry) for entry in found]

    async def health(self) -> Health:
        """GET /health. A server that is still loading is reachable and not ok; no server is an error."""
        try:
            answer = await self.get_json("/health")
        except RemoteError as error:
            # 404: an OpenAI-compatible server without this route is up all the same.
            return Health(error.status == 404, "ok" if error.status == 404 else error.message)
        status = answer.get("status") if isinstance(answer, dict) else None
        return Health(True, str(status or "ok"))

    async def default_model(self) -> str:
        """The model used when a request names none; asked of the server once."""
        if self.model is None:
            found = await self.models()
            self.model = found[0].id if found else "default"
        return self.model

    async def _get(self, path: str) -> httpx2.Response:
        return await self._whole(self._request("GET", path))

    async def _whole(self, request: httpx2.Request) -> httpx2.Response:
        async with self._send(request) as answer:
            body = b"".join([data async for _, data in answer.pieces])
            return _response(answer, body, request)

    def _request(self, method: str, path: str, body: Mapping[str, object] | None = None) -> httpx2.Request:
        json_body = None if body is None else dict(body)
        return httpx2.Request(method, self.root + path, headers=self._headers, json=json_body)

    async def _stream(
        self, path: str, body: Mapping[str, object], sending: Sending = AT_ONCE
    ) -> AsyncGenerator[StreamEvent, None]:
        fields = {"stream": True, "stream_options": {"include_usage": True}, **body}
        if fields.get("model") is None:
            fields["model"] = await self.default_model()
        fields = {name: value for name, value in fields.items() if value is not None}
        request = self._request("POST", path, fields)
        async with self._send(request, sending) as answer, aclosing(self._events(answer)) as events:
            async for event in events:
                yield event
                if event.kind is EventKind.ERROR:
                    return
                if event.kind is EventKind.DONE:
                    await _read_to_end(events)
                    return

    async def _events(self, answer: Answer) -> AsyncGenerator[StreamEvent, None]:
        decoder = SSEDecoder()
        is_finished = False
        at_s = self._clock()
        async for at_s, data in answer.pieces:
            for event in _typed(decoder.feed(data), at_s):
                is_finished = is_finished or event.kind in (EventKind.FINISH, EventKind.DONE)
                yield event
        for event in _typed(decoder.flush(), at_s):
            is_finished = is_finished or event.kind in (EventKind.FINISH, EventKind.DONE)
            yield event
        if not is_finished:
            raise StreamBrokenError("The server closed the stream before the answer was finished.")

    @asynccontextmanager
    async def _send(self, request: httpx2.Request, sending: Sending = AT_ONCE) -> AsyncIterator[Answer]:
        exchanging = exchange(
            request,
            clock=self._clock,
            sending=sending,
            read_timeout_s=self._read_timeout_s,
            tls=self._tls,
        )
        async with exchanging as answer:
            if answer.status >= 300:
                _raise_for_status(_response(answer, await _error_body(answer), request))
            yield answer


async def _read_to_end(events: AsyncIterator[StreamEvent]) -> None:
    """Let the server end its answer in its own way: hanging up on the last bytes looks like leaving. It has
    said that it is done, so that nothing can go wrong any more."""
    with suppress(TimeoutError, RequestError):
        async with asyncio.timeout(DRAIN_TIMEOUT_S):
            async for _ in events:
                pass


def _typed(decoded: Iterator[tuple[bool, str]], at_s: float) -> Iterator[StreamEvent]:
    for is_comment, text in decoded:
        if is_comment:
            yield StreamEvent(EventKind.PING, at_s, text=text)
        else:
            yield from read_event(text, at_s)


async def _error_body(answer: Answer) -> bytes:
    """What can be had of it: the status tells more than a body that is cut off, and must not be lost with
    it. Servers that refuse a long request are known to hang up while it is still being sent."""
    body = b""
    with suppress(TimeoutError, RequestError):
        async with asyncio.timeout(ERROR_BODY_TIMEOUT_S):
            async for _, data in answer.pieces:
                body += data
                if len(body) > MAX_ERROR_BYTES:
                    break
    return body


def _response(answer: Answer, body: bytes, request: httpx2.Request) -> httpx2.Response:
    """The answer with its body, uncompressed; as it came where it is not what its header says."""
    try:
        return httpx2.Response(answer.status, headers=answer.headers, content=body, request=request)
    except httpx2.DecodingError:
        return httpx2.Response(answer.status, content=body, request=request)


def _raise_for_status(response: httpx2.Response) -> None:
    status = response.status_code
    if response.has_redirect_location:
        # Not followed: a key must not travel to wherever a server points, nor a measurement.
        message = f"The server redirects to {response.headers['Location']}: give that address instead."
        raise RemoteError(message, status=status)
    try:
        body = response.json()
    except (ValueError, RecursionError):
        body = response.text[:500]
    raise read_error(body, status, _retry_after_s(response.headers.get("Retry-After")))


def _retry_after_s(header: str | None) -> float | None:
    try:
        wait_s = float(header) if header else math.nan
    except ValueError:
        return None  # the HTTP-date form; nobody in this field sends it
    return wait_s if 0 <= wait_s < math.inf else None


def _parse(response: httpx2.Response) -> Any:
    try:
        return response.json()
    except (ValueError, RecursionError) as error:
        raise RemoteError(f"{response.url} did not answer with JSON.", status=502) from error


def _read_model(entry: Mapping[str, Any]) -> ModelInfo:
    meta = entry.get("meta")
    meta = meta if isinstance(meta, dict) else {}
    n_ctx = meta.get("n_ctx") or entry.get("max_model_len")
    return ModelInfo(str(entry["id"]), int(n_ctx) if isinstance(n_ctx, int | float) else None, meta)
