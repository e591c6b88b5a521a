"""Where a request's time went: parts that add up to the whole on every request, however it ended, and that
agree with what a client stamped on its own clock."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
import time
from contextlib import aclosing
from itertools import pairwise
from typing import Any

import pytest
from live_server import Live, post_bytes, sse_documents, streaming

from edgeserve.client import Client
from edgeserve.engine.request import RequestTimings
from edgeserve.metrics import Timeline
from edgeserve.stream_events import EventKind, StreamEvent

CHAT = "/v1/chat/completions"
PARTS = ("front_end_ms", "queue_ms", "restore_ms", "prompt_ms", "decode_ms", "stalled_ms", "delivery_ms")
SYSTEMS = ["You are brief. " * 4, "Answer as a sailor would. " * 4]
NUM_CLIENTS, NUM_REQUESTS = 5, 5


def body(rng: random.Random) -> dict[str, Any]:
    messages = [
        {"role": "system", "content": rng.choice(SYSTEMS)},
        {"role": "user", "content": "word " * rng.randrange(1, 20)},
    ]
    return {
        "messages": messages,
        "max_tokens": rng.randrange(1, 8),
        "stream": rng.random() < 0.5,
        "cache_prompt": rng.random() < 0.8,
        "ignore_eos": True,
        "temperature": 0,
    }


def leave(live: Live, request: dict[str, Any], until: bytes) -> None:
    """Send it, read until these bytes have come, and hang up."""
    long = {**request, "max_tokens": 600, "stream": True}
    with socket.create_connection(("127.0.0.1", live.port), timeout=60) as sock:
        sock.sendall(post_bytes(long))
        received = b""
        while until not in received:
            piece = sock.recv(4096)
            assert piece, received
            received += piece


def one_client(live: Live, seed: int) -> None:
    rng = random.Random(seed)
    for index in range(NUM_REQUESTS):
        request = body(rng)
        if index % 3 == 2:
            leave(live, request, until=rng.choice((b"", b"200 OK", b'"content":" ')))
        elif index == 4:
            live.http.post(CHAT, json={**request, "messages": [{"role": "user", "content": "w " * 4000}]})
        else:
            live.http.post(CHAT, json=request)


def add_up(line: dict[str, Any]) -> bool:
    parts = [line[part] for part in PARTS]
    return min(parts) >= 0 and sum(parts) == pytest.approx(line["e2e_ms"], abs=1)


def test_the_parts_of_every_request_add_up(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    """Streamed, whole, found in the cache, refused, and left while waiting, prefilling or decoding."""
    live.wait_until_idle()
    with caplog.at_level("INFO", logger="edgeserve.requests"):
        clients = [threading.Thread(target=one_client, args=(live, seed)) for seed in range(NUM_CLIENTS)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        live.wait_until(
            lambda: len(lines(caplog)) == NUM_REQUESTS * NUM_CLIENTS, "for a line for each request"
        )
    found = lines(caplog)
    assert [line for line in found if not add_up(line)] == []
    assert {"length", "cancelled", "rejected"} <= {line["outcome"] for line in found}
    whole = [line for line in found if line["outcome"] == "length"]
    assert any(line["cache_n"] > 16 for line in whole)
    assert any(line["queue_ms"] > 1 for line in whole)
    assert all(line["e2e_ms"] <= line["total_ms"] for line in found)
    live.wait_until_idle()


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [json.loads(record.message) for record in caplog.records if record.name == "edgeserve.requests"]


@pytest.mark.parametrize("stream", [False, True])
def test_the_answer_tells_the_same_parts(live: Live, stream: bool) -> None:
    request = body(random.Random(1)) | {"stream": stream, "max_tokens": 5}
    text = live.http.post(CHAT, json=request).text
    last = text.split("data: ")[-2] if stream else text
    timings = json.loads(last)["timings"]
    assert add_up(timings)
    assert timings["e2e_ms"] > timings["ttft_ms"] > 0
    before = ("front_end_ms", "queue_ms", "restore_ms", "prompt_ms")
    assert sum(timings[part] for part in before) == pytest.approx(timings["ttft_ms"], abs=0.01)


def test_a_request_arrives_with_its_last_byte(live: Live) -> None:
    """What a client takes to send is its own: on a connection that was open before, in two pieces, with the
    next request of a pipeline behind it."""
    live.wait_until_idle()
    request = post_bytes(body(random.Random(2)) | {"stream": False, "max_tokens": 1})
    health = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    with socket.create_connection(("127.0.0.1", live.port), timeout=60) as sock:
        sock.sendall(request[:-10])
        time.sleep(0.3)
        sent_s = time.perf_counter()
        sock.sendall(request[-10:] + health)
        received = b"".join(iter(lambda: sock.recv(65536), b""))
        end_s = time.perf_counter()
    first = received.split(b"\r\n\r\n")[1].split(b"HTTP/1.1")[0]
    timings = json.loads(first)["timings"]
    assert add_up(timings)
    assert 0 < timings["e2e_ms"] <= (end_s - sent_s) * 1e3


def test_a_timeline_that_is_cut_off_ends_in_the_part_that_it_was_in() -> None:
    waiting = RequestTimings(10, 0, 0, 0, front_end_s=0.1)
    assert waiting.cut_off(1.0).queue_s == pytest.approx(0.9)
    prefilling = RequestTimings(10, 0, 4, 0, front_end_s=0.1, queue_s=0.2)
    assert prefilling.cut_off(1.0).prefill_s == pytest.approx(0.7)
    decoding = RequestTimings(
        10, 0, 10, 3, front_end_s=0.1, queue_s=0.2, prefill_s=0.3, decode_s=0.1, stalled_s=0.05
    )
    cut = decoding.cut_off(1.0)
    assert cut.delivery_s == pytest.approx(0.3)
    assert cut.known_s == cut.e2e_s == 1.0


# -- a client's own clock -----------------------------------------------------------------------------------


async def watched(live: Live, seed: int) -> tuple[float, list[StreamEvent]]:
    """One answer with timings for every token, and when it was asked for, all on this client's clock."""
    async with Client(live.url) as client:
        fields = body(random.Random(seed)) | {"max_tokens": 12, "timings_per_token": True, "stream": True}
        messages = fields.pop("messages")
        sent_s = time.perf_counter()
        async with aclosing(client.chat_stream(messages, **fields)) as events:
            return sent_s, [event async for event in events]


async def test_a_client_sees_the_same_events_in_the_same_order_and_never_earlier(live: Live) -> None:
    await asyncio.to_thread(live.wait_until_idle)
    for sent_s, events in await asyncio.gather(*(watched(live, seed) for seed in range(5))):
        stamps = [event.at_s for event in events if event.kind is EventKind.TEXT]
        timeline = Timeline.of_chunks(sent_s, stamps, None)
        timings = [event.timings for event in events if event.timings is not None]
        spans = [item.extra["ttft_ms"] + item.predicted_ms for item in timings]
        assert spans == sorted(spans)
        assert len(spans) >= len(stamps)
        seen_ms = [(event.at_s - sent_s) * 1e3 for event in events if event.timings is not None]
        assert all(server <= client for server, client in zip(spans, seen_ms, strict=True))
        whole = timings[-1]
        assert whole.extra["ttft_ms"] / 1e3 <= timeline.ttft_s
        assert whole.extra["e2e_ms"] <= seen_ms[-1]
        assert add_up({**whole.extra, "prompt_ms": whole.prompt_ms})
        assert sum(later - earlier for earlier, later in pairwise(spans)) == pytest.approx(
            whole.predicted_ms, abs=0.05
        )


def test_what_stalls_a_stream_is_told_apart(live: Live) -> None:
    """A stream beside a long prompt: a part of its decode is stalled, and the rest is its own."""
    live.wait_until_idle()
    long = [{"role": "user", "content": "word " * 150}]
    with streaming(live, timings_per_token=True) as stream:
        next(stream)
        live.post(CHAT, messages=long, max_tokens=1, cache_prompt=False)
        for piece in stream:
            timings = sse_documents(piece.decode())[-1]["timings"]
            if timings["stalled_ms"]:
                break
    assert 0 < timings["stalled_ms"] <= timings["predicted_ms"]
    assert timings["decode_ms"] == pytest.approx(timings["predicted_ms"] - timings["stalled_ms"], abs=0.01)
    live.wait_until_idle()
