"""Under load: a bounded queue, health at once, signs of life on silent streams."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import ExitStack

import pytest
from conftest import ServeApart
from live_server import MAX_WAITING, NUM_SLOTS, Live, post_bytes, sse_documents, streaming

from edgeserve.config import ServerConfig
from edgeserve.server.sse import PING

HI = [{"role": "user", "content": "Hi"}]


def test_a_full_queue_says_when_to_come_back(live: Live) -> None:
    live.wait_until_idle()
    answers: list[int] = []
    retry_after: list[str] = []

    def ask() -> None:
        response = live.http.post("/v1/chat/completions", json={"messages": HI, "max_tokens": 2})
        answers.append(response.status_code)
        if response.status_code == 429:
            assert response.json()["error"]["type"] == "rate_limit_error"
            retry_after.append(response.headers["retry-after"])

    with ExitStack() as stack:
        for _ in range(NUM_SLOTS):
            next(stack.enter_context(streaming(live)))
        threads = [threading.Thread(target=ask) for _ in range(MAX_WAITING + 6)]
        for thread in threads:
            thread.start()
        live.wait_until(lambda: len(answers) == 6, "for the refusals")
    for thread in threads:
        thread.join()
    assert sorted(answers) == [200] * MAX_WAITING + [429] * 6
    assert all(int(seconds) >= 1 for seconds in retry_after)


def test_a_full_queue_refuses_streams_with_a_status_too(live: Live) -> None:
    live.wait_until_idle()
    with ExitStack() as stack:
        for _ in range(NUM_SLOTS):
            next(stack.enter_context(streaming(live)))
        for _ in range(MAX_WAITING):
            stack.enter_context(streaming(live))
        live.wait_until(lambda: len(live.stats.waiting) == MAX_WAITING, "for a full queue")
        error = live.error("/v1/chat/completions", 429, messages=HI, stream=True)
        assert error["code"] == "queue_full"
    live.wait_until_idle()


def test_silence_is_filled_with_comments(live: Live) -> None:
    live.wait_until_idle()
    received: list[bytes] = []
    with ExitStack() as others:
        for _ in range(NUM_SLOTS):
            next(others.enter_context(streaming(live)))
        with streaming(live, keeps_pings=True, max_tokens=3) as waiting:
            received.append(next(waiting))
            others.close()
            received += waiting
    body = b"".join(received).decode()
    assert body.startswith(":\n\n")
    *chunks, done = sse_documents(body)
    assert done == "[DONE]"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_progress_while_others_decode(live: Live) -> None:
    live.wait_until_idle()
    long = [{"role": "user", "content": "word " * 160}]
    with streaming(live) as other:
        next(other)
        with streaming(
            live, messages=long, max_tokens=1, return_progress=True, cache_prompt=False
        ) as waiting:
            documents = sse_documents(b"".join(waiting).decode())
    progress = [chunk["prompt_progress"] for chunk in documents[:-1] if "prompt_progress" in chunk]
    assert len(progress) > 3
    processed = [item["processed"] for item in progress]
    assert processed == sorted(processed)
    assert all(0 < item["processed"] < item["total"] and item["cache"] == 0 for item in progress)
    assert all(item["time_ms"] > 0 for item in progress)


def test_parts_of_the_first_token_time_add_up_under_load(live: Live) -> None:
    """More at once than there are slots: the queue is in the time to first token, and said to be."""
    live.wait_until_idle()
    timings = []

    def ask() -> None:
        started = time.perf_counter()
        answer = live.post("/v1/chat/completions", messages=HI, max_tokens=4, ignore_eos=True)
        timings.append((answer["timings"], time.perf_counter() - started))

    threads = [threading.Thread(target=ask) for _ in range(MAX_WAITING)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(timings) == MAX_WAITING > NUM_SLOTS
    for parts, seen_s in timings:
        before = ("front_end_ms", "queue_ms", "restore_ms", "prompt_ms")
        assert sum(parts[name] for name in before) == pytest.approx(parts["ttft_ms"], abs=0.01)
        assert parts["ttft_ms"] + parts["predicted_ms"] <= parts["e2e_ms"] <= seen_s * 1e3


def test_health_answers_beside_64_streams_and_a_prefill(serve_apart: ServeApart) -> None:
    live = serve_apart(n_ctx=2048, n_seq_max=2, max_waiting=80, prefill_chunk=16)
    body = {"messages": [{"role": "user", "content": "word " * 700}], "max_tokens": 200, "stream": True}
    with ExitStack() as stack:
        for _ in range(64):
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", live.port)))
            sock.sendall(post_bytes(body))
        live.wait_until(lambda: live.state.num_active == 64, "for all streams")
        live.wait_until(lambda: any(s.status == "prefill" for s in live.stats.running), "for a prefill")
        live.wait_until(lambda: len(live.stats.running) + len(live.stats.waiting) == 64, "for the queue")
        within_one_step = 0
        for _ in range(20):
            step = live.stats.num_steps
            document = live.http.get("/health").json()
            within_one_step += live.stats.num_steps == step
            assert document["status"] == "ok"
            assert document["running"] + document["waiting"] == 64
        assert within_one_step
        assert len(live.http.get("/slots").json()) == 2
        assert live.http.get("/metrics").status_code == 200
        # Alive is another question than ready: the age of the engine's last sign of life.
        assert document["heartbeat_age_s"] >= 0
    live.wait_until(lambda: live.state.num_active == 0, "for all to be forgotten")
    live.wait_until_idle()
    assert live.stats.num_used_cells == live.stats.num_cached_cells


def test_health_says_what_really_runs_where(live: Live) -> None:
    document = live.http.get("/health").json()
    assert document["layers"] == 31
    assert document["gpu_layers"] == 0


def test_a_silent_prefill_is_filled_with_comments(serve_apart: ServeApart) -> None:
    live = serve_apart(ServerConfig(sse_ping_s=0.02), prefill_chunk=8, n_seq_max=1)
    messages = [{"role": "user", "content": "word " * 120}]
    with streaming(live, keeps_pings=True, messages=messages, max_tokens=1) as stream:
        body = b"".join(stream)
    before, _, _ = body.partition(b"data:")
    assert before.count(PING) > 1
    assert before.replace(PING, b"") == b""


def test_a_wait_that_is_too_long_ends_with_a_status(serve_apart: ServeApart) -> None:
    live = serve_apart(n_seq_max=1, max_queue_s=0.2)
    with streaming(live, max_tokens=900) as running:
        next(running)
        for stream in (False, True):
            error = live.error("/v1/chat/completions", 429, messages=HI, stream=stream)
            assert (error["type"], error["code"]) == ("rate_limit_error", "queue_timeout")
            assert error["cause"] == "sequences"
    assert 'outcome="timeout"} 2.0' in live.http.get("/metrics").text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/completion"])
def test_a_request_says_how_long_it_will_wait(live: Live, path: str) -> None:
    """On every endpoint: at once or not at all, and a deadline that passes in the queue."""
    live.wait_until_idle()
    body = {"messages": HI} if "chat" in path else {"prompt": "Hi"}
    with ExitStack() as stack:
        for _ in range(NUM_SLOTS):
            next(stack.enter_context(streaming(live)))
        response = live.http.post(path, json={**body, "max_queue_ms": 0})
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["cause"]) == (429, "queue_timeout", "sequences")
        assert int(response.headers["retry-after"]) >= error["retry_after_s"]
        error = live.error(path, 504, **body, deadline_ms=50)
        assert (error["code"], "in the queue" in error["message"]) == ("deadline_exceeded", True)
    live.wait_until_idle()
    assert live.post(path, **body, max_queue_ms=0, deadline_ms=80_000_000, max_tokens=1, priority="batch")


def test_a_deadline_ends_a_stream_with_an_error(live: Live) -> None:
    live.wait_until_idle()
    with streaming(live, deadline_ms=2000, max_tokens=2000) as stream:
        documents = sse_documents(b"".join(stream).decode())
    assert documents[-1]["error"]["code"] == "deadline_exceeded"
    live.wait_until_idle()
    assert live.stats.num_used_cells == live.stats.num_cached_cells


def test_a_batch_request_lets_others_go_first(live: Live) -> None:
    live.wait_until_idle()
    long = [{"role": "user", "content": "word " * 30}]
    asks = [{"messages": long, "priority": "batch"}, {"messages": HI}, {"messages": HI}]
    with ExitStack() as stack:
        for _ in range(NUM_SLOTS):
            next(stack.enter_context(streaming(live)))
        for number, ask in enumerate(asks, start=1):
            stack.enter_context(streaming(live, max_tokens=1, **ask))
            live.wait_until(lambda number=number: len(live.stats.waiting) == number, "for it to wait")
        sizes = [item.timings.num_prompt_tokens for item in live.stats.waiting]
    assert sizes[0] == sizes[1] < sizes[2]
    live.wait_until_idle()


def test_a_request_that_left_the_queue_is_counted_as_such(serve_apart: ServeApart) -> None:
    live = serve_apart(n_seq_max=1)
    with streaming(live, max_tokens=900) as running:
        next(running)
        with socket.create_connection(("127.0.0.1", live.port)) as sock:
            sock.sendall(post_bytes({"messages": HI, "max_tokens": 2}))
            live.wait_until(lambda: len(live.stats.waiting) == 1, "for it to wait")
        live.wait_until(lambda: not live.stats.waiting, "for it to be gone")
        prompts = live.stats.num_prompt_tokens_total
    live.wait_until(lambda: live.state.num_active == 0, "for both to be gone")
    assert live.stats.num_prompt_tokens_total == prompts
    assert "edgeserve_requests_cancelled_in_queue_total 1.0" in live.http.get("/metrics").text


def test_no_queue_at_all(serve_apart: ServeApart) -> None:
    """What finds a free slot is served; the rest is told to come back when one is likely to be free."""
    live = serve_apart(n_ctx=4096, n_seq_max=1, max_waiting=0)
    with streaming(live, max_tokens=4000) as running:
        next(running)
        response = live.http.post("/v1/chat/completions", json={"messages": HI})
        assert response.status_code == 429
        # Thousands of tokens are not made in a second.
        assert int(response.headers["retry-after"]) > 1
    live.wait_until_idle()
    assert live.post("/v1/chat/completions", messages=HI, max_tokens=1)
