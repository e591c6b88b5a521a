"""The client against servers that are odd, wrong or hostile, byte by byte on a real socket."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import mock_openai as mock
import pytest

from edgeserve.client import Client, server_root
from edgeserve.errors import ServerUnreachableError, UsageError
from edgeserve.stream_events import EventKind, RemoteError, StreamBrokenError, StreamEvent

MESSAGES = [{"role": "user", "content": "hello"}]
ANSWER = mock.chunk({"content": "né"}) + mock.chunk({}, "stop") + mock.sse("[DONE]")
CHUNKED = "Transfer-Encoding: chunked"
# Valid for localhost and 127.0.0.1, with its key; nothing but these tests trusts it.
CERTIFICATE = Path(__file__).parent / "data" / "loopback.pem"


def head(status: str = "200 OK", *headers: str) -> bytes:
    return "".join(f"{line}\r\n" for line in (f"HTTP/1.1 {status}", *headers, "")).encode()


def chunks(data: bytes, size: int = 5) -> bytes:
    pieces = [data[at : at + size] for at in range(0, len(data), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)


@dataclass
class OddServer:
    """Sends these pieces whatever is asked, and hangs up; `requests` are the heads of what came."""

    pieces: Sequence[bytes]
    host: str = "127.0.0.1"
    address: str = ""
    requests: list[str] = field(default_factory=list)

    @asynccontextmanager
    async def running(self, tls: ssl.SSLContext | None = None) -> AsyncIterator[OddServer]:
        async with await asyncio.start_server(self._answer, self.host, 0, ssl=tls) as server:
            port = server.sockets[0].getsockname()[1]
            self.address = f"[{self.host}]:{port}" if ":" in self.host else f"{self.host}:{port}"
            yield self

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        self.requests.append(request.decode())
        for piece in self.pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.001)  # so that they mostly come one by one; they may come together
        writer.close()


def odd(*pieces: bytes, host: str = "127.0.0.1") -> OddServer:
    return OddServer(pieces, host)


async def streamed(client: Client) -> list[StreamEvent]:
    async with aclosing(client.chat_stream(MESSAGES)) as events:
        return [event async for event in events]


async def got(client: Client) -> object:
    return await client.get_json("/props")


Ask = Callable[[Client], Awaitable[object]]
BOTH = pytest.mark.parametrize("ask", [streamed, got])


async def failure_of(ask: Ask, server: OddServer) -> Exception:
    async with server.running(), Client(f"http://{server.address}", model="m", read_timeout_s=30) as client:
        with pytest.raises((RemoteError, StreamBrokenError)) as caught:
            await ask(client)
    return caught.value


@pytest.mark.parametrize(
    "pieces",
    [
        (b"HTTP/1.0 200 OK\r\n\r\n", ANSWER),
        (head(), *(ANSWER[at : at + 1] for at in range(len(ANSWER)))),
        (head(), ANSWER.replace(b"\n", b"\r\n")),
        (head(), b"\xef\xbb\xbf" + ANSWER),
        (head("200 OK", CHUNKED), chunks(ANSWER), b"0\r\nX-Sum: 1\r\n\r\n"),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n", head(), ANSWER),
        (head("200 OK", "Set-Cookie: " + "x" * 40_000)[:-4], b"\r\n\r\n", ANSWER),
        # Over by the server's own word: how it then hangs up does not count.
        (head("200 OK", CHUNKED), chunks(ANSWER)),
        (head("200 OK", CHUNKED), chunks(ANSWER) + b"what\r\n"),
        (head("200 OK", "Content-Length: 9999"), ANSWER),
    ],
)
async def test_odd_ways_to_send_an_answer_as_a_whole(pieces: Sequence[bytes]) -> None:
    async with odd(*pieces).running() as server, Client(f"http://{server.address}", model="m") as client:
        events = await streamed(client)
    assert [event.kind for event in events] == [EventKind.TEXT, EventKind.FINISH, EventKind.DONE]
    assert events[0].text == "né"


async def test_done_ends_an_answer_without_a_finish_reason() -> None:
    server = odd(head(), mock.chunk({"content": "all"}) + mock.sse("[DONE]"))
    async with server.running(), Client(f"http://{server.address}", model="m") as client:
        events = await streamed(client)
    assert [event.kind for event in events] == [EventKind.TEXT, EventKind.DONE]


async def test_what_came_with_a_fault_comes_before_it() -> None:
    server = odd(head("200 OK", CHUNKED) + chunks(mock.chunk({"content": "half"}), 999) + b"what\r\n")
    seen: list[str] = []
    async with server.running(), Client(f"http://{server.address}", model="m") as client:
        with pytest.raises(StreamBrokenError):
            async with aclosing(client.chat_stream(MESSAGES)) as events:
                async for event in events:
                    seen.append(event.text)
    assert seen == ["half"]


@BOTH
@pytest.mark.parametrize(
    ("headers", "body", "message"),
    [
        (["Content-Length: 19"], b'{"error":"bad key"}', "bad key"),
        (["Content-Length: 999"], b'{"error":"bad key"}', "bad key"),
        ([CHUNKED], chunks(b'{"error":"bad key"}'), "bad key"),
        ([CHUNKED], b"what\r\n", "HTTP 401"),
        (["Content-Encoding: gzip"], b"no gzip", "no gzip"),
        ([], b"[" * 100_000, "[" * 500),
        ([], b"x" * (3 << 20), "x" * 500),
    ],
)
async def test_a_refusal_keeps_its_status_whatever_its_body_is(
    ask: Ask, headers: list[str], body: bytes, message: str
) -> None:
    error = await failure_of(ask, odd(head("401 Unauthorized", *headers), body))
    assert isinstance(error, RemoteError)
    assert (error.status, error.message) == (401, message)


@pytest.mark.parametrize("wait", ["nan", "inf", "-1", "Wed, 21 Oct 2015 07:28:00 GMT"])
async def test_a_time_to_wait_that_is_none(wait: str) -> None:
    error = await failure_of(streamed, odd(head("429 Too Many Requests", f"Retry-After: {wait}")))
    assert isinstance(error, RemoteError)
    assert error.retry_after_s is None


@BOTH
@pytest.mark.parametrize(
    "status", ["301 Moved Permanently", "307 Temporary Redirect", "308 Permanent Redirect"]
)
async def test_a_redirect_is_named_and_not_followed(ask: Ask, status: str) -> None:
    server = odd(head(status, "Location: https://elsewhere.example/v1", "Content-Length: 0"))
    error = await failure_of(ask, server)
    assert isinstance(error, RemoteError)
    assert str(error.status) in status
    assert "https://elsewhere.example/v1" in error.message
    assert len(server.requests) == 1


@BOTH
@pytest.mark.parametrize("pieces", [(), (b"HTTP/1.1 200 OK\r\nConte",)])
async def test_hanging_up_before_the_answer_is_said_in_plain_words(ask: Ask, pieces: Sequence[bytes]) -> None:
    error = await failure_of(ask, odd(*pieces))
    assert isinstance(error, StreamBrokenError)
    assert "closed the connection without an answer" in error.message


async def test_a_body_that_is_not_what_its_header_says_is_no_json() -> None:
    error = await failure_of(got, odd(head("200 OK", "Content-Encoding: gzip"), b"abc"))
    assert isinstance(error, RemoteError)
    assert "did not answer with JSON" in error.message


@BOTH
@pytest.mark.parametrize("key", [None, "key"])
async def test_the_user_in_an_address_goes_into_every_request_and_into_no_message(
    ask: Ask, key: str | None
) -> None:
    server = odd(head("403 Forbidden"))
    async with (
        server.running(),
        Client(f"http://us%40er:p%20w@{server.address}/v1", key, model="m") as client,
    ):
        with pytest.raises(RemoteError):
            await ask(client)
    # Base64 of "us@er:p w".
    assert "Authorization: Basic dXNAZXI6cCB3\r\n" in server.requests[0]
    assert f"Host: {server.address}\r\n" in server.requests[0]
    assert client.root == f"http://{server.address}"


@pytest.mark.parametrize("key", ["two\nlines", "end\n", "ключ", "\x00", " "])
def test_a_key_that_no_header_can_carry(key: str) -> None:
    with pytest.raises(UsageError):
        Client("http://127.0.0.1:1", key)


@BOTH
@pytest.mark.parametrize("host", ["a..b", "a" * 70 + ".example", "127.0.0.1:0", "[::1]:1"])
async def test_names_and_ports_that_cannot_be(ask: Ask, host: str) -> None:
    async with Client(f"http://{host}", model="m") as client:
        with pytest.raises(ServerUnreachableError):
            await ask(client)


@pytest.mark.parametrize("address", ["http://h?x=1", "http://h/#part", "h:1?", "unix:///run/s", "http://::1"])
def test_what_is_no_server_address(address: str) -> None:
    with pytest.raises(UsageError):
        server_root(address)


def trusting(monkeypatch: pytest.MonkeyPatch, certificate: Path) -> None:
    monkeypatch.delenv("SSL_CERT_DIR", raising=False)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))


@pytest.fixture
def tls() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE)
    return context


@pytest.mark.parametrize("scheme", ["https", "HTTPS"])
async def test_tls_with_a_certificate_of_ones_own(
    tls: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    """However https is written: a key must never leave in the open."""
    trusting(monkeypatch, CERTIFICATE)
    server = odd(head(), ANSWER)
    async with server.running(tls), Client(f"{scheme}://{server.address}", "key", model="m") as client:
        events = await streamed(client)
        with pytest.raises(RemoteError):
            await got(client)
    assert events[-1].kind is EventKind.DONE
    assert len(server.requests) == 2


@BOTH
async def test_a_certificate_that_is_not_trusted_is_named(
    ask: Ask, tls: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    monkeypatch.delenv("SSL_CERT_DIR", raising=False)
    server = odd(head(), ANSWER)
    async with server.running(tls), Client(f"https://{server.address}", model="m") as client:
        with pytest.raises(ServerUnreachableError) as caught:
            await ask(client)
    assert "certificate" in caught.value.message
    assert "SSL_CERT_FILE" in caught.value.hint
    assert not server.requests


@BOTH
async def test_a_server_without_tls_where_https_was_asked_for(ask: Ask) -> None:
    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(head("400 Bad Request"))
        await reader.read()
        writer.close()

    async with await asyncio.start_server(babble, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with Client(f"https://127.0.0.1:{port}", model="m") as client:
            with pytest.raises(ServerUnreachableError) as caught:
                await ask(client)
    assert "TLS" in caught.value.message


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_certificates_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None
) -> None:
    path = tmp_path / "trusted.pem"
    if content is not None:
        path.write_text(content)
    trusting(monkeypatch, path)
    with pytest.raises(UsageError):
        Client("https://127.0.0.1:1")


@BOTH
async def test_proxies_of_the_environment_are_not_asked(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    error = await failure_of(ask, odd(head("403 Forbidden")))
    assert isinstance(error, RemoteError)
    assert error.status == 403


async def test_leaving_while_a_connection_is_being_made() -> None:
    """A server that accepts and says nothing holds up the greeting of TLS."""
    came, left = asyncio.Event(), asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        came.set()
        with suppress(ConnectionResetError):
            await reader.read()
        left.set()
        writer.close()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with Client(f"https://127.0.0.1:{port}", model="m") as client:
            task = asyncio.create_task(streamed(client))
            await asyncio.wait_for(came.wait(), 30)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.wait_for(left.wait(), 30)
