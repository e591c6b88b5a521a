"""A client that leaves ends its own generation, wherever that stood, and nobody else's."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from live_server import NUM_SLOTS, Live, post_bytes, streaming

LONG_ANSWER = {"messages": [{"role": "user", "content": "Go on."}], "max_tokens": 1500, "ignore_eos": True}
LONG_PROMPT = {
    "messages": [{"role": "user", "content": "word " * 1500}],
    "max_tokens": 4,
    "cache_prompt": False,
}


def send(live: Live, body: dict[str, Any]) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", live.port))
    sock.sendall(post_bytes(body))
    return sock


def cancelled(live: Live) -> int:
    return int(live.stats.finished_total.get("cancelled", 0))


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_while_decoding(live: Live, stream: bool) -> None:
    live.wait_until_idle()
    before = cancelled(live)
    sock = send(live, {**LONG_ANSWER, "stream": stream})
    live.wait_until(
        lambda: any(s.timings.num_output_tokens > 3 for s in live.stats.running), "for a few tokens"
    )
    sock.close()
    live.wait_until_idle()
    assert cancelled(live) == before + 1
    assert live.stats.num_used_cells == live.stats.num_cached_cells
    live.wait_until(lambda: live.state.num_active == 0, "for the request to be forgotten")


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_while_prefilling(live: Live, stream: bool) -> None:
    live.wait_until_idle()
    before = cancelled(live)
    # With somebody decoding, the prompt goes in small chunks.
    with streaming(live) as other:
        next(other)
        sock = send(live, {**LONG_PROMPT, "stream": stream})
        live.wait_until(
            lambda: any(
                s.timings.num_evaluated_tokens > 0 and not s.timings.num_output_tokens
                for s in live.stats.running
            ),
            "for the prefill to begin",
        )
        sock.close()
        live.wait_until(lambda: cancelled(live) == before + 1, "for the prefill to end")
        assert len(live.stats.running) == 1
        assert next(other)
    live.wait_until_idle()


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_while_waiting(live: Live, stream: bool) -> None:
    live.wait_until_idle()
    before = cancelled(live)
    running = [send(live, {**LONG_ANSWER, "stream": True}) for _ in range(NUM_SLOTS)]
    live.wait_until(lambda: len(live.stats.running) == NUM_SLOTS, "for full slots")
    waiting = [send(live, {**LONG_ANSWER, "max_tokens": 3, "stream": stream}) for _ in range(2)]
    live.wait_until(lambda: len(live.stats.waiting) == 2, "for a queue")
    waiting[0].close()
    live.wait_until(lambda: cancelled(live) == before + 1, "for the queued request to go")
    assert len(live.stats.running) == NUM_SLOTS
    assert len(live.stats.waiting) == 1
    running[0].close()
    assert waiting[1].recv(12) == b"HTTP/1.1 200"
    for sock in (*running[1:], waiting[1]):
        sock.close()
    live.wait_until_idle()


def test_leaving_one_choice_of_many_leaves_all(live: Live) -> None:
    live.wait_until_idle()
    before = cancelled(live)
    sock = send(live, {**LONG_ANSWER, "n": NUM_SLOTS, "stream": True})
    live.wait_until(lambda: len(live.stats.running) == NUM_SLOTS, "for all choices")
    sock.close()
    live.wait_until_idle()
    assert cancelled(live) == before + NUM_SLOTS
