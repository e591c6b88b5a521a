"""The client against a real socket: stamps, errors by name, cancellation."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import aclosing

import mock_openai as mock
import pytest
from mock_openai import MockServer, Step

from edgeserve.client import Client, server_root
from edgeserve.errors import RequestTimeoutError, ServerUnreachableError, UsageError
from edgeserve.http_stream import AT_ONCE, Sending
from edgeserve.stream_events import EventKind, RemoteError, StreamBrokenError, StreamEvent

MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture
def server() -> Iterator[MockServer]:
    with MockServer().running() as running:
        yield running


async def collect(client: Client, sending: Sending = AT_ONCE, /, **params: object) -> list[StreamEvent]:
    async with aclosing(client.chat_stream(MESSAGES, sending, **params)) as events:
        return [event async for event in events]


@pytest.mark.parametrize(
    "address",
    ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/", "h:1", "h:1/v1", "  http://h:1/v1 "],
)
def test_addresses_with_and_without_v1(address: str) -> None:
    assert server_root(address) == "http://h:1"


@pytest.mark.parametrize("address", ["", "ftp://h", "http://", "http://h:port"])
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(UsageError):
        server_root(address)


async def test_a_path_below_a_host_is_kept(server: MockServer) -> None:
    assert server_root("https://h/api/v1") == "https://h/api"


async def test_one_stream_from_role_to_done(server: MockServer) -> None:
    async with Client(server.url) as client:
        events = await collect(client, max_tokens=2, seed=None)
    kinds = [event.kind for event in events]
    assert kinds == [
        EventKind.ROLE,
        EventKind.PING,
        EventKind.TEXT,
        EventKind.TEXT,
        EventKind.FINISH,
        EventKind.USAGE,
        EventKind.DONE,
    ]
    body = server.sent[0].body
    assert body["stream"] is True
    assert body["stream_options"] == {"include_usage": True}
    assert body["model"] == "mock"
    assert "seed" not in body


async def test_stamps_lie_between_sending_and_reading(server: MockServer) -> None:
    server.script = lambda body: mock.answer(3, ttft_s=0.05, gap_s=0.02)
    async with Client(server.url) as client:
        reads: list[tuple[StreamEvent, float]] = []
        async with aclosing(client.chat_stream(MESSAGES)) as events:
            async for event in events:
                reads.append((event, time.perf_counter()))
    texts = [(event.at_s, read_s) for event, read_s in reads if event.kind is EventKind.TEXT]
    sent = server.sent[0].stamps_s[2:5]
    assert all(sent_s <= at_s <= read_s for sent_s, (at_s, read_s) in zip(sent, texts, strict=True))


async def test_a_slow_reader_does_not_move_the_stamp_of_what_has_arrived(server: MockServer) -> None:
    """All events of one piece carry the same stamp, taken before any of them was parsed or handled."""
    server.script = lambda body: [Step(mock.chunk({"content": "a"}) + mock.chunk({"content": "b"}, "stop"))]
    async with Client(server.url) as client:
        stamps = []
        async with aclosing(client.chat_stream(MESSAGES)) as events:
            async for event in events:
                stamps.append(event.at_s)
                await asyncio.sleep(0.02)
    assert len(stamps) == 3
    assert len(set(stamps)) == 1


async def test_completions(server: MockServer) -> None:
    chunk = mock.sse({"choices": [{"index": 0, "text": "abc", "finish_reason": "stop"}]})
    server.script = lambda body: [Step(chunk), Step(mock.sse("[DONE]"))]
    async with (
        Client(server.url, model="named") as client,
        aclosing(client.completion_stream([1, 2, 3], max_tokens=1)) as stream,
    ):
        events = [event async for event in stream]
    assert [event.text for event in events if event.is_output] == ["abc"]
    assert server.sent[0].body["prompt"] == [1, 2, 3]
    assert server.sent[0].body["model"] == "named"


async def test_a_refusal_is_an_object_and_is_not_retried(server: MockServer) -> None:
    refusal = mock.error_response(429, "queue is full", "queue_full", {"Retry-After": "7"})
    server.script = lambda body: refusal
    async with Client(server.url) as client:
        with pytest.raises(RemoteError) as caught:
            await collect(client)
    error = caught.value
    assert (error.status, error.code, error.message) == (429, "queue_full", "queue is full")
    assert error.retry_after_s == 7
    assert len(server.sent) == 1


async def test_an_error_page_that_is_no_json(server: MockServer) -> None:
    server.script = lambda body: mock.PlainTextResponse("Bad gateway", status_code=502)
    async with Client(server.url) as client:
        with pytest.raises(RemoteError) as caught:
            await collect(client)
    assert (caught.value.status, caught.value.message) == (502, "Bad gateway")


async def test_an_error_inside_the_stream_comes_after_what_was_said(server: MockServer) -> None:
    error = mock.sse({"error": {"message": "lost", "type": "server_error", "code": 500}})
    server.script = lambda body: [Step(mock.chunk({"content": "half"})), Step(error)]
    async with Client(server.url) as client:
        events = await collect(client)
    assert [event.kind for event in events] == [EventKind.TEXT, EventKind.ERROR]
    assert events[-1].error is not None
    assert events[-1].error.message == "lost"


async def test_a_stream_that_just_ends_is_broken(server: MockServer) -> None:
    server.script = lambda body: [Step(mock.chunk({"content": "half"}))]
    async with Client(server.url) as client:
        with pytest.raises(StreamBrokenError):
            await collect(client)


async def test_a_stream_without_done_is_complete_when_it_was_finished(server: MockServer) -> None:
    server.script = lambda body: [Step(mock.chunk({"content": "x"})), Step(mock.chunk({}, "stop"))]
    async with Client(server.url) as client:
        events = await collect(client)
    assert [event.kind for event in events] == [EventKind.TEXT, EventKind.FINISH]


async def test_silence_for_too_long_has_a_name(server: MockServer) -> None:
    server.script = lambda body: mock.answer(1, until=lambda: False)
    async with Client(server.url, read_timeout_s=0.2) as client:
        with pytest.raises(RequestTimeoutError):
            await collect(client)


async def test_nobody_there() -> None:
    async with Client("http://127.0.0.1:1", model="m") as client:
        with pytest.raises(ServerUnreachableError):
            await client.health()
        with pytest.raises(ServerUnreachableError):
            await collect(client)


async def test_a_server_that_hangs_up_without_an_answer() -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with Client(f"http://127.0.0.1:{port}", model="m") as client:
            with pytest.raises(StreamBrokenError):
                await collect(client)


async def test_what_is_not_http_is_a_broken_stream() -> None:
    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"220 mail.example ESMTP\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(babble, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with Client(f"http://127.0.0.1:{port}", model="m") as client:
            with pytest.raises(StreamBrokenError):
                await collect(client)


async def test_a_slow_reader_gets_all_of_a_large_answer(server: MockServer) -> None:
    """More than is held for a reader at once, so that the server has to wait."""
    word = "x" * 100_000
    server.script = lambda body: [*[Step(mock.chunk({"content": word}))] * 60, Step(mock.chunk({}, "stop"))]
    num_chars = 0
    async with Client(server.url) as client, aclosing(client.chat_stream(MESSAGES)) as events:
        async for event in events:
            num_chars += len(event.text) if event.is_output else 0
            await asyncio.sleep(0.002)
    assert num_chars == 60 * len(word)


async def test_a_request_can_be_held_back_with_its_connection_made(server: MockServer) -> None:
    held, go = asyncio.Event(), asyncio.Event()
    sent: list[float] = []

    async def when() -> None:
        held.set()
        await go.wait()

    async with Client(server.url, model="m") as client:
        sending = Sending(when, sent.append)
        task = asyncio.create_task(collect(client, sending))
        await asyncio.wait_for(held.wait(), 30)
        assert not server.sent and not sent
        let_go_s = time.perf_counter()
        go.set()
        events = await task
    (sent_s,) = sent
    assert let_go_s <= sent_s <= server.sent[0].stamps_s[0]
    assert all(event.at_s >= sent_s for event in events)


async def until_abandoned(server: MockServer) -> None:
    async with asyncio.timeout(30):
        while not server.sent[0].is_abandoned:
            await asyncio.sleep(0.01)


async def test_closing_the_iterator_closes_the_socket(server: MockServer) -> None:
    server.script = lambda body: mock.answer(10_000, gap_s=0.01)
    async with Client(server.url) as client:
        async with aclosing(client.chat_stream(MESSAGES)) as events:
            async for event in events:
                if event.is_output:
                    break
        await until_abandoned(server)
    assert len(server.sent[0].stamps_s) < 10_000


async def test_cancelling_the_task_before_the_first_token_closes_the_socket(server: MockServer) -> None:
    server.script = lambda body: mock.answer(1, until=lambda: False)
    async with Client(server.url) as client:
        task = asyncio.create_task(collect(client))
        async with asyncio.timeout(30):
            while not server.sent or not server.sent[0].stamps_s:
                await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until_abandoned(server)


async def test_pages(server: MockServer) -> None:
    server.pages["/metrics"] = "edgeserve_requests_total 3\n"
    server.pages["/page"] = "no json"
    async with Client(server.url) as client:
        (model,) = await client.models()
        assert (model.id, model.n_ctx) == ("mock", 4096)
        assert (await client.health()).is_ok
        assert await client.get_text("/metrics") == "edgeserve_requests_total 3\n"
        with pytest.raises(RemoteError):
            await client.get_json("/page")
        with pytest.raises(RemoteError) as caught:
            await client.get_json("/nowhere")
    assert caught.value.status == 404


async def test_a_loading_server_is_reachable_and_not_ok(server: MockServer) -> None:
    server.pages["/health"] = mock.error_response(503, "Loading model", "unavailable")
    async with Client(server.url) as client:
        health = await client.health()
    assert (health.is_ok, health.status) == (False, "Loading model")


async def test_the_key_is_sent(server: MockServer) -> None:
    async with Client(server.url, api_key="secret") as client:
        await collect(client)
    assert server.headers[-1]["authorization"] == "Bearer secret"
