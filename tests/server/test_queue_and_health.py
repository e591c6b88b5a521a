"""Under load: a bounded queue, health at once, signs of life on silent streams."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack

import pytest
from live_server import MAX_WAITING, NUM_SLOTS, Live, sse_documents, streaming

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


def test_health_does_not_wait_for_the_engine(live: Live) -> None:
    live.wait_until_idle()
    with ExitStack() as stack:
        for _ in range(NUM_SLOTS + MAX_WAITING - 1):
            stack.enter_context(streaming(live, messages=[{"role": "user", "content": "word " * 1200}]))
        within_one_step = 0
        for _ in range(20):
            step = live.stats.num_steps
            assert live.http.get("/health").json()["status"] == "ok"
            within_one_step += live.stats.num_steps == step
        assert within_one_step
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
    long = [{"role": "user", "content": "word " * 300}]
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
        assert parts["queue_ms"] + parts["prompt_ms"] == pytest.approx(parts["ttft_ms"], abs=0.01)
        assert parts["ttft_ms"] + parts["predicted_ms"] <= seen_s * 1e3
