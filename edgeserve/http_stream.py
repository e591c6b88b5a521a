"""One HTTP exchange on a connection of its own, stamped at the socket.

Owns: connecting, head and body in one write, HTTP/1.1 on the way back, and two stamps: just before the
request's bytes are written, and when a piece came in, before it is parsed. What a general HTTP library does
in between would otherwise be measured as the server's time.
Does not know: what is in the body, or which statuses are errors.

Errors: `ServerUnreachableError` (nothing answers), `RequestTimeoutError` (silence longer than allowed),
`StreamBrokenError` (cut off, or what comes is not HTTP).
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

import h11
import httpx2

from edgeserve.errors import RequestTimeoutError, ServerUnreachableError
from edgeserve.stream_events import StreamBrokenError

CONNECT_TIMEOUT_S = 5.0
# Which of a name's addresses answers is found out in this rhythm (RFC 8305 recommends 250 ms).
_NEXT_ADDRESS_S = 0.25
# A reader that is slower than the server must not make this process hold all of an answer.
_MAX_HELD_BYTES = 1 << 20
# Cookies and policies come to more than the 16 KiB that h11 allows by itself.
_MAX_HEAD_BYTES = 100 << 10


@dataclass(frozen=True)
class Answer:
    """A response whose body is still coming. `pieces` are its bytes, each with the instant of its arrival:
    what came at once is one piece."""

    status: int
    headers: httpx2.Headers
    pieces: AsyncGenerator[tuple[float, bytes], None]


async def _now() -> None:
    """Nothing is waited for."""


@dataclass(frozen=True)
class Sending:
    """`when` is awaited once the connection is there and the bytes are ready; `on_sent` then gets the instant
    just before they are written."""

    when: Callable[[], Awaitable[None]] = _now
    on_sent: Callable[[float], None] = lambda at_s: None


AT_ONCE = Sending()


@asynccontextmanager
async def exchange(
    request: httpx2.Request,
    *,
    clock: Callable[[], float],
    sending: Sending = AT_ONCE,
    read_timeout_s: float | None = None,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[Answer]:
    """Send the request, and give its answer as soon as the headers are there. Leaving closes the socket.

    Stamps are seconds of `clock`. `read_timeout_s` bounds the silence between two pieces (None: no bound).
    `tls` is for https alone; making one takes long, hence it is the caller's to keep.
    """
    wire = await _connect(request.url, clock, read_timeout_s, tls)
    try:
        reader = _Reader(wire)
        data = reader.request_bytes(request)
        await sending.when()
        sending.on_sent(clock())
        wire.write(data)
        head = await reader.head()
        async with aclosing(reader.pieces()) as pieces:
            yield Answer(head.status_code, httpx2.Headers(list(head.headers)), pieces)
    finally:
        wire.close()


async def _connect(
    url: httpx2.URL, clock: Callable[[], float], read_timeout_s: float | None, tls: ssl.SSLContext | None
) -> _Wire:
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _, wire = await asyncio.get_running_loop().create_connection(
                lambda: _Wire(_origin(url), clock, read_timeout_s),
                url.raw_host.decode("ascii"),
                (80 if tls is None else 443) if url.port is None else url.port,
                ssl=tls,
                # asyncio forgets who is cancelled right before the greeting: that ends the connection then.
                ssl_handshake_timeout=None if tls is None else CONNECT_TIMEOUT_S,
                happy_eyeballs_delay=_NEXT_ADDRESS_S,
            )
    except ssl.SSLCertVerificationError as error:
        raise ServerUnreachableError(
            f"The certificate of {_origin(url)} is not trusted: {error.verify_message}.",
            "SSL_CERT_FILE can name a file with the one that is to be trusted.",
        ) from error
    except ssl.SSLError as error:
        raise ServerUnreachableError(
            f"{_origin(url)} does not speak TLS as it is understood here: {error.reason}.",
            "Is it http and not https?",
        ) from error
    except (OSError, UnicodeError) as error:  # the latter for a name that cannot be one
        raise ServerUnreachableError(
            f"No server answers at {_origin(url)}.", "Is it running, and is this its address?"
        ) from error
    return wire


def _origin(url: httpx2.URL) -> str:
    return f"{url.scheme}://{url.netloc.decode('ascii')}"


class _Wire(asyncio.Protocol):
    """The connection: what came, and when. Holds a bounded number of bytes that nobody has read yet."""

    def __init__(self, origin: str, clock: Callable[[], float], read_timeout_s: float | None) -> None:
        self.origin = origin
        self._clock = clock
        self._read_timeout_s = read_timeout_s
        self._transport: asyncio.Transport | None = None
        self._held: deque[tuple[float, bytes]] = deque()
        self._num_held_bytes = 0
        self._is_over = False
        self._error: Exception | None = None
        self._news = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._held.append((self._clock(), data))
        self._num_held_bytes += len(data)
        self._news.set()
        if self._num_held_bytes > _MAX_HELD_BYTES and self._transport is not None:
            self._transport.pause_reading()

    def eof_received(self) -> None:
        self._is_over = True
        self._news.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_over = True
        self._error = exc
        self._news.set()

    def write(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(data)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    async def read(self) -> tuple[float, bytes]:
        """The next bytes with their stamp; none at the end."""
        while not self._held and not self._is_over:
            self._news.clear()
            await self._wait()
        if not self._held:
            if self._error is not None:
                raise StreamBrokenError(f"The connection to {self.origin} broke: {self._error}.")
            return self._clock(), b""
        at_s, data = self._held.popleft()
        self._let_more_come(len(data))
        return at_s, data

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(self._read_timeout_s):
                await self._news.wait()
        except TimeoutError:
            raise RequestTimeoutError(f"{self.origin} stayed silent for longer than allowed.") from None

    def _let_more_come(self, num_bytes: int) -> None:
        was_full = self._num_held_bytes > _MAX_HELD_BYTES
        self._num_held_bytes -= num_bytes
        if was_full and self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()


class _Reader:
    """HTTP/1.1 over a wire: one request's bytes, and its answer's events."""

    def __init__(self, wire: _Wire) -> None:
        self._wire = wire
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MAX_HEAD_BYTES)
        self._at_s = 0.0

    def request_bytes(self, request: httpx2.Request) -> bytes:
        method, target = request.method.encode("ascii"), request.url.raw_path
        head = h11.Request(method=method, target=target, headers=request.headers.raw)
        events = (head, h11.Data(data=request.content), h11.EndOfMessage())
        return b"".join(self._http.send(event) or b"" for event in events)

    async def head(self) -> h11.Response:
        while not isinstance(event := self._next_event(), h11.Response):
            if event is h11.NEED_DATA and not await self._receive():
                raise StreamBrokenError(f"{self._wire.origin} closed the connection without an answer.")
        return event

    async def pieces(self) -> AsyncGenerator[tuple[float, bytes], None]:
        is_over = False
        while not is_over:
            found: list[bytes] = []
            broken: StreamBrokenError | None = None
            try:
                is_over = self._take(found)
            except StreamBrokenError as error:
                broken = error
            # First what came before the fault: it is as good as if the fault had come later.
            if found:
                yield self._at_s, b"".join(found)
            if broken is not None:
                raise broken
            if not is_over:
                await self._receive()

    def _take(self, found: list[bytes]) -> bool:
        """Add what of the body has come; whether that was the end of it."""
        while isinstance(event := self._next_event(), h11.Data):
            found.append(event.data)
        return event is not h11.NEED_DATA

    async def _receive(self) -> bool:
        """Whether anything came; if not, that was the end."""
        self._at_s, data = await self._wire.read()
        self._http.receive_data(data)
        return bool(data)

    def _next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        try:
            return self._http.next_event()
        except h11.RemoteProtocolError as error:
            raise StreamBrokenError(f"The connection to {self._wire.origin} broke: {error}.") from error
