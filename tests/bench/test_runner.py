"""Sending and recording against a mock server on a real socket."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import mock_openai as mock
import pytest
from mock_openai import MockServer, Step

from edgeserve.bench.runner import Outcome, Record, Request, Runner
from edgeserve.client import Client

MESSAGES = ({"role": "user", "content": "hello"},)


@pytest.fixture
def server() -> Iterator[MockServer]:
    with MockServer().running() as running:
        yield running


def request(index: int = 0, max_tokens: int = 4, at_s: float | None = None) -> Request:
    return Request(index, MESSAGES, max_tokens, at_s)


async def send_one(server: MockServer, timeout_s: float = 10.0) -> Record:
    async with Client(server.url, model="m") as client:
        return await Runner(client, {"temperature": 0}, timeout_s).send(request())


async def test_the_clock_starts_at_the_first_content_and_ends_at_the_last(server: MockServer) -> None:
    """Role chunk, pings, chunks of three tokens, usage long after the last one."""
    taken_s: list[float] = []

    def is_long_after_the_last() -> bool:
        return len(taken_s) == 4 and time.perf_counter() - taken_s[-1] > 0.1

    *others, usage, done = mock.answer(4, tokens_per_chunk=3, ttft_s=0.15, gap_s=0.02)
    steps = [*others, replace(usage, until=is_long_after_the_last), done]
    server.script = lambda body: steps
    async with Client(server.url, model="m") as client:
        runner = Runner(client, {}, 60.0)
        record = await runner.send(request(), lambda count: taken_s.append(time.perf_counter()))
    assert record.is_ok
    timeline = record.timeline
    assert timeline is not None
    assert len(record.stamps_s) == 4
    assert timeline.num_tokens == 12
    assert timeline.itl_s is None
    assert len(timeline.gaps_s) == 3
    sent = server.sent[0].stamps_s
    role_to_content_s, content_s, usage_s = sent[2] - sent[0], sent[5] - sent[2], sent[7] - sent[5]
    # The role chunk left at once and usage came late: neither may be in these figures.
    assert timeline.ttft_s >= role_to_content_s
    assert timeline.decode_s < content_s + usage_s
    assert record.end_s - record.stamps_s[-1] > 0.1
    assert timeline.tpot_s == pytest.approx(timeline.decode_s / 11)


async def test_reasoning_counts_as_output_and_is_not_the_answers_text(server: MockServer) -> None:
    server.script = lambda body: [
        Step(mock.chunk({"role": "assistant", "content": ""})),
        Step(mock.chunk({"reasoning_content": "hm"})),
        Step(mock.chunk({"content": "yes"}), 0.01),
        Step(mock.chunk({}, "stop")),
    ]
    record = await send_one(server)
    assert (len(record.stamps_s), record.text, record.finish_reason) == (2, "yes", "stop")


@pytest.mark.parametrize(
    ("status", "outcome"), [(429, Outcome.REJECTED), (503, Outcome.REJECTED), (500, Outcome.ERROR)]
)
async def test_refusals_and_errors(server: MockServer, status: int, outcome: Outcome) -> None:
    server.script = lambda body: mock.error_response(status, "no", "why")
    record = await send_one(server)
    assert (record.outcome, record.status, record.code, record.message) == (outcome, status, "why", "no")
    assert record.timeline is None
    assert len(server.sent) == 1


async def test_an_error_in_mid_stream_keeps_the_stamps(server: MockServer) -> None:
    error = mock.sse({"error": {"message": "lost", "code": 500}})
    server.script = lambda body: [Step(mock.chunk({"content": "half"})), Step(error)]
    record = await send_one(server)
    assert (record.outcome, record.message, len(record.stamps_s)) == (Outcome.ERROR, "lost", 1)


async def test_a_broken_stream(server: MockServer) -> None:
    server.script = lambda body: [Step(mock.chunk({"content": "half"}))]
    record = await send_one(server)
    assert (record.outcome, record.code) == (Outcome.ERROR, "stream_broken")


async def test_an_answer_without_tokens(server: MockServer) -> None:
    server.script = lambda body: [Step(mock.chunk({"role": "assistant", "content": ""}, "stop"))]
    assert (await send_one(server)).outcome is Outcome.EMPTY


async def test_a_timeout_hangs_up(server: MockServer) -> None:
    server.script = lambda body: mock.answer(2, until=lambda: False)
    timeout_s = 0.1
    # A request that never got as far as an answer says nothing of hanging up.
    while not (server.sent and server.sent[-1].stamps_s):
        timeout_s *= 2
        record = await send_one(server, timeout_s)
        assert record.outcome is Outcome.TIMEOUT
    async with asyncio.timeout(30):
        while not server.sent[-1].is_abandoned:
            await asyncio.sleep(0.01)


async def test_nobody_there_is_an_error_of_the_request() -> None:
    async with Client("http://127.0.0.1:1", model="m") as client:
        record = await Runner(client, {}, 1.0).send(request())
    assert (record.outcome, record.code) == (Outcome.ERROR, "ServerUnreachableError")


async def test_a_refused_connection_fails_when_the_request_was_due() -> None:
    """It is made ahead of time; a request does not end before its arrival."""
    async with Client("http://127.0.0.1:1", model="m") as client:
        record = await Runner(client, {}, 1.0).send(request(0, 1, 0.2))
    assert record.code == "ServerUnreachableError"
    assert record.arrival_s == record.sent_s == 0.2 <= record.end_s


async def test_nothing_is_sent_before_its_instant(server: MockServer) -> None:
    async with Client(server.url, model="m") as client:
        runner = Runner(client, {}, 20.0)
        await runner.open_loop([request(0, 1, 0.05), request(1, 1, 0.25)], 100.0)
    for record in runner.records:
        assert record.scheduled_s is not None
        assert record.scheduled_s <= record.sent_s <= record.stamps_s[0]


async def test_an_open_loop_does_not_wait_for_answers(server: MockServer) -> None:
    """The server answers nobody before all ten have asked; what they wait counts from their schedule."""
    server.script = lambda body: mock.answer(1, until=lambda: len(server.sent) == 10)
    async with Client(server.url, model="m") as client:
        runner = Runner(client, {}, 20.0)
        await runner.open_loop([request(index, 1, index * 0.02) for index in range(10)], 100.0)
    assert sorted(record.index for record in runner.records) == list(range(10))
    for record in runner.records:
        assert record.is_ok
        assert record.send_lag_s is not None
        assert record.send_lag_s >= 0
        assert record.timeline is not None
        assert record.timeline.arrival_s == record.scheduled_s == record.index * 0.02


async def test_load_goes_on_until_the_last_measured_request_has_ended(server: MockServer) -> None:
    # The measured ones are answered once four more have come; those are never answered.
    server.script = lambda body: mock.answer(
        1, until=lambda: len(server.sent) >= 8 and body["max_tokens"] == 1
    )
    plan = [request(index, 1 if index < 4 else 2, index * 0.02) for index in range(1000)]
    async with Client(server.url, model="m") as client:
        runner = Runner(client, {}, 20.0)
        await runner.open_loop(plan, plan[4].at_s or 0.0)
    measured = [record for record in runner.records if record.index < 4]
    others = [record for record in runner.records if record.index >= 4]
    assert [record.outcome for record in measured] == [Outcome.OK] * 4
    assert 4 <= len(others) < 996
    assert {record.outcome for record in others} == {Outcome.CANCELLED}


async def test_a_closed_loop_keeps_exactly_so_many_in_flight(server: MockServer) -> None:
    server.script = lambda body: mock.answer(2, gap_s=0.01)
    seen: list[int] = []
    async with Client(server.url, model="m") as client:
        runner = Runner(client, {}, 20.0, lambda in_flight, ended: seen.append(in_flight))
        await runner.closed_loop([request(index) for index in range(12)], 3)
    assert max(seen) == 3
    assert sorted(record.index for record in runner.records) == list(range(12))
    assert all(record.send_lag_s is None for record in runner.records)


async def test_what_was_recorded_survives_an_interruption(server: MockServer) -> None:
    def script(body: dict[str, Any]) -> list[Step]:
        return mock.answer(1) if body["max_tokens"] == 1 else mock.answer(5000, gap_s=0.02)

    server.script = script
    async with Client(server.url, model="m") as client:
        runner = Runner(client, {}, 60.0)
        task = asyncio.create_task(runner.closed_loop([request(0, 1), request(1, 9)], 1))
        async with asyncio.timeout(30):
            # Until the second one, alone in flight, has had a token.
            while len(server.sent) < 2 or runner.num_waiting(lambda num_prompt_tokens: 0.0, 0.0, math.inf):
                await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert [record.outcome for record in runner.records] == [Outcome.OK, Outcome.CANCELLED]
    assert runner.records[1].stamps_s


async def test_settings_go_into_every_request(server: MockServer) -> None:
    await send_one(server)
    body = server.sent[0].body
    assert (body["temperature"], body["max_tokens"]) == (0, 4)
