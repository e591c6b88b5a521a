"""Whole benchmarks against mock servers: every scenario, two servers, the cache, Ctrl-C."""

from __future__ import annotations

import io
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import mock_openai as mock
import pytest
from bench_mock import caching_script, options
from mock_openai import MockServer, Step

from edgeserve.bench.options import Scenario
from edgeserve.bench.results import BenchResult, CaseResult
from edgeserve.bench.session import ProgressLine, run_bench
from edgeserve.bench.sweep import find_capacity
from edgeserve.bench.workload import Arrivals, Lengths
from edgeserve.errors import RequestError, ServerUnreachableError
from edgeserve.metrics import SLO


@pytest.fixture
def server() -> Iterator[MockServer]:
    with MockServer(caching_script(ttft_s=0.02, gap_s=0.005)).running() as running:
        yield running


def only(result: BenchResult) -> CaseResult:
    (case,) = result.cases
    return case


def test_decode_sends_as_many_streams_as_asked_and_repeats(server: MockServer) -> None:
    result = run_bench(options(server.url, Scenario.DECODE, streams=(1, 3), repeats=2))
    assert [case.label for case in result.cases] == ["decode, 1 stream", "decode, 3 streams"]
    assert [len(run.records) for run in result.runs] == [1, 1, 3, 3]
    assert all(len(case.spreads["tpot_p50_s"].values) == 2 for case in result.cases)
    assert not result.is_partial


def test_prompts_have_the_length_that_was_asked_for(server: MockServer) -> None:
    result = run_bench(options(server.url, Scenario.DEPTH, depths=(60, 300)))
    lengths = [record.num_prompt_tokens for run in result.runs for record in run.records]
    assert lengths == [60, 300]


def test_requests_are_greedy_of_fixed_length_and_say_so(server: MockServer) -> None:
    run_bench(options(server.url, Scenario.DECODE, streams=(1,), extra_params={"top_k": 1}))
    body = server.sent[-1].body
    assert (body["temperature"], body["ignore_eos"], body["max_tokens"], body["top_k"]) == (0, True, 4, 1)
    run_bench(options(server.url, Scenario.DECODE, streams=(1,), ignore_eos=False))
    assert "ignore_eos" not in server.sent[-1].body


def test_a_second_benchmark_does_not_find_the_first_ones_prompts_cached(server: MockServer) -> None:
    wanted = options(
        server.url, Scenario.CLOSED, concurrency=(2,), num_requests=8, prompt=Lengths.parse("200")
    )
    for _ in range(2):
        result = run_bench(wanted)
        (bucket,) = only(result).repeats[0].buckets
        assert bucket.bucket.cache == "cold"
        assert not any("cached" in warning for warning in only(result).warnings)


def test_a_shared_prefix_is_primed_and_warm(server: MockServer) -> None:
    wanted = options(server.url, Scenario.CLOSED, concurrency=(1,), num_requests=4, shared_prefix_tokens=400)
    result = run_bench(wanted)
    (bucket,) = only(result).repeats[0].buckets
    assert bucket.bucket.cache == "warm"
    assert (only(result).median("cached_share") or 0) > 0.9
    assert not any("cached" in warning for warning in only(result).warnings)


def test_a_chat_grows_and_only_its_new_part_is_evaluated(server: MockServer) -> None:
    result = run_bench(options(server.url, Scenario.TURNS, num_turns=4))
    records = result.runs[0].records
    assert [record.label for record in records] == ["turn 1", "turn 2", "turn 3", "turn 4"]
    prompts = [record.num_prompt_tokens or 0 for record in records]
    assert prompts == sorted(prompts)
    assert prompts[3] > 3 * prompts[0]
    evaluated = only(result).median("later_evaluated_tokens")
    assert evaluated is not None
    assert evaluated < prompts[1]
    bodies = [sent.body["messages"] for sent in server.sent[-4:]]
    assert bodies[3][: len(bodies[2])] == bodies[2]


def test_chats_take_turns_and_begin_alike(server: MockServer) -> None:
    result = run_bench(options(server.url, Scenario.TURNS, num_turns=3, num_chats=2, shared_prefix_tokens=40))
    records = result.runs[0].records
    assert [record.label for record in records] == [f"turn {turn}" for turn in (1, 1, 2, 2, 3, 3)]
    bodies = [sent.body["messages"] for sent in server.sent[-6:]]
    assert bodies[0][0] == bodies[1][0], "the system prompt"
    assert bodies[0][1] != bodies[1][1]
    assert all(bodies[index + 2][: len(bodies[index])] == bodies[index] for index in range(4))
    assert only(result).median("turns") == 6


def stall_script(server: MockServer) -> Any:
    """A (long answers) pauses as soon as another prompt is there, until it has its first token."""

    def script(body: dict[str, Any]) -> list[Step]:
        if body["max_tokens"] != 60:
            ttft_s = 0.3 if body["max_tokens"] == 8 else 0.0
            return mock.answer(2, ttft_s=ttft_s, prompt_tokens=200, until=lambda: is_silent(server))
        begun = len(server.sent)
        steps = mock.answer(60, gap_s=0.005, prompt_tokens=30)
        # Token 30 waits for B's first one, which is the third piece of B's answer.
        is_over = Step(steps[32].data, 0.0, lambda: is_answered(server, begun))
        return [*steps[:32], is_over, *steps[33:]]

    return script


def is_silent(server: MockServer) -> bool:
    """Whether A, if it runs, has paused for far longer than any of its gaps, on a slow machine too."""
    running = [sent.stamps_s for sent in server.sent if sent.body["max_tokens"] == 60]
    if not running:
        return True
    stamps_s = list(running[-1])
    longest_s = max(b - a for a, b in pairwise(stamps_s))
    return len(stamps_s) == 32 and time.perf_counter() - stamps_s[-1] > max(0.1, 10 * longest_s)


def is_answered(server: MockServer, begun: int) -> bool:
    return len(server.sent) > begun and len(server.sent[begun].stamps_s) >= 3


def test_a_stall_is_seen_in_the_running_stream(server: MockServer) -> None:
    server.script = stall_script(server)
    lengths = {"stall_prompt_tokens": 200, "output": Lengths.parse("60")}
    wanted = options(server.url, Scenario.STALL, streams=(1,), timeout_s=120.0, **lengths)
    case = only(run_bench(wanted))
    gap, usual, ttft = (case.median(f"{name}_s") for name in ("a_gap_max", "a_gap_before_p50", "b_ttft"))
    assert gap is not None
    assert usual is not None
    assert ttft is not None
    # By construction A is silent from before B's prefill ends until B's first token.
    assert gap > 3 * usual
    assert ttft >= 0.3


def test_load_measures_a_window_and_meets_its_objective(server: MockServer) -> None:
    wanted = options(
        server.url,
        Scenario.LOAD,
        rates_per_s=(20.0,),
        arrivals=Arrivals.CONSTANT,
        warmup_s=0.2,
        # Nine requests: with more, a machine that gets busy meanwhile could look like a growing queue.
        duration_s=0.44,
        slo=SLO(ttft_s=10.0),
    )
    result = run_bench(wanted)
    case = only(result)
    assert case.mode == "open loop"
    assert case.median("offered") == 9
    assert case.median("attainment") == 1
    assert result.capacity_per_s() == 20


def test_rejects_count_against_the_objective(server: MockServer) -> None:
    answers = caching_script()
    refusal = mock.error_response(429, "full", "queue_full")

    def script(body: dict[str, Any]) -> Any:
        is_load = body["max_tokens"] == 4
        return refusal if is_load and len(server.sent) % 2 else answers(body)

    server.script = script
    wanted = options(
        server.url, Scenario.LOAD, rates_per_s=(20.0,), arrivals=Arrivals.CONSTANT, warmup_s=0, duration_s=0.5
    )
    result = run_bench(wanted)
    case = only(result)
    ok, rejected = case.median("ok") or 0, case.median("rejected") or 0
    assert case.median("offered") == ok + rejected == 10
    # Every other request in the order of their arrival, which need not be that of their sending.
    assert rejected >= 3
    assert case.median("attainment") == ok / 10
    assert result.capacity_per_s() is None


def test_a_trace_is_replayed(server: MockServer, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [{"at_s": index / 50, "prompt_tokens": 30 + index, "max_tokens": 2} for index in range(6)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    result = run_bench(options(server.url, Scenario.TRACE, trace=path))
    records = sorted(result.runs[0].records, key=lambda record: record.index)
    assert [record.scheduled_s for record in records] == [index / 50 for index in range(6)]
    assert [record.num_prompt_tokens for record in records] == [30 + index for index in range(6)]
    assert only(result).median("ok") == 6


def test_two_servers_take_turns(server: MockServer) -> None:
    order: list[str] = []

    def noting(name: str) -> Any:
        answers = caching_script()

        def script(body: dict[str, Any]) -> Any:
            if body["max_tokens"] == 4:
                order.append(name)
            return answers(body)

        return script

    with ExitStack() as stack:
        other = stack.enter_context(MockServer(noting("B")).running())
        server.script = noting("A")
        wanted = options(server.url, Scenario.DECODE, streams=(1,), repeats=3, against=other.url)
        result = run_bench(wanted)
    assert order == ["A", "B", "A", "B", "A", "B"]
    assert [case.target for case in result.cases] == ["A", "B"]
    assert list(result.servers) == ["A", "B"]


def test_a_depth_that_does_not_fit_is_left_out_and_said_so(server: MockServer) -> None:
    result = run_bench(options(server.url, Scenario.DEPTH, depths=(60, 9000)))
    assert [case.label for case in result.cases] == ["decode at depth 60"]
    assert any("9,004 tokens of context" in warning for warning in result.warnings)


def test_the_servers_counter_is_read_around_each_run(server: MockServer) -> None:
    def counted() -> int:
        return sum(sent.body["max_tokens"] for sent in server.sent)

    class Counting(dict[str, Any]):
        def get(self, key: str, default: Any = None) -> Any:
            if key == "/metrics":
                return f"# HELP x\nllamacpp:tokens_predicted_total {counted()}\n"
            return super().get(key, default)

    server.pages = Counting(server.pages)
    result = run_bench(options(server.url, Scenario.DECODE, streams=(2,)))
    assert result.runs[0].server_tokens == 8
    assert not any("counted" in warning for warning in only(result).warnings)


def test_nobody_there_is_said_before_anything_is_measured() -> None:
    with pytest.raises(ServerUnreachableError):
        run_bench(options("http://127.0.0.1:1", Scenario.DECODE))


def test_a_server_that_refuses_the_first_request_is_an_error_with_a_hint(server: MockServer) -> None:
    server.script = lambda body: mock.error_response(400, "unknown field ignore_eos", "bad")
    with pytest.raises(RequestError) as caught:
        run_bench(options(server.url, Scenario.DECODE))
    assert "ignore_eos" in caught.value.message


def test_ctrl_c_gives_what_was_measured_and_marks_it(server: MockServer) -> None:
    answers = caching_script()

    def script(body: dict[str, Any]) -> Any:
        is_second = body["max_tokens"] == 4 and sum(sent.body["max_tokens"] == 4 for sent in server.sent) > 1
        return mock.answer(5000, gap_s=0.05) if is_second else answers(body)

    server.script = script

    def interrupt() -> None:
        deadline_s = time.monotonic() + 60
        while time.monotonic() < deadline_s:
            started = [sent for sent in server.sent if sent.body["max_tokens"] == 4]
            if len(started) > 1 and len(started[1].stamps_s) > 5:
                break
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    result = run_bench(options(server.url, Scenario.DECODE, streams=(1,), repeats=5, timeout_s=120.0))
    assert result.is_partial
    assert [len(run.records) for run in result.runs] == [1, 1]
    first, second = result.runs
    assert first.records[0].is_ok
    assert second.records[0].outcome == "cancelled"
    assert second.measured == ()


async def test_a_sweep_closes_in_on_the_capacity() -> None:
    asked: list[float] = []

    async def keeps_up(rate_per_s: float) -> bool:
        asked.append(rate_per_s)
        return rate_per_s <= 5.0

    await find_capacity(1.0, keeps_up)
    assert asked[:4] == [1.0, 2.0, 4.0, 8.0]
    assert max(rate for rate in asked if rate <= 5.0) == pytest.approx(4.76, abs=0.01)

    asked.clear()
    await find_capacity(16.0, keeps_up)
    assert asked[:3] == [16.0, 8.0, 4.0]


async def test_a_sweep_that_finds_no_end_stops() -> None:
    asked: list[float] = []

    async def never(rate_per_s: float) -> bool:
        asked.append(rate_per_s)
        return False

    await find_capacity(1.0, never)
    assert len(asked) == 7


def test_sweep_measures_its_points_as_cases(server: MockServer) -> None:
    # Answers so slow that a machine which gets busy meanwhile does not look like a growing queue.
    answers = caching_script(ttft_s=0.5)

    def script(body: dict[str, Any]) -> Any:
        # Everything fails as soon as the second rate is offered.
        is_late = sum(sent.body["max_tokens"] == 4 for sent in server.sent) > 10
        return mock.error_response(503, "busy", "busy") if is_late else answers(body)

    server.script = script
    wanted = options(
        server.url,
        Scenario.SWEEP,
        rates_per_s=(16.0,),
        arrivals=Arrivals.CONSTANT,
        warmup_s=0,
        duration_s=0.5,
        slo=SLO(e2e_s=10.0),
    )
    result = run_bench(wanted)
    assert [case.rate_per_s for case in result.cases][:2] == [16.0, 32.0]
    assert result.capacity_per_s() == 16.0


def test_a_sweep_does_not_wait_for_a_queue_that_is_lost(server: MockServer) -> None:
    """No request is ever answered: the point ends as soon as too many have waited longer than allowed."""
    answers = caching_script()

    def script(body: dict[str, Any]) -> Any:
        return mock.answer(1, until=lambda: False) if body["max_tokens"] == 4 else answers(body)

    server.script = script
    wanted = options(
        server.url,
        Scenario.SWEEP,
        rates_per_s=(400.0,),
        arrivals=Arrivals.CONSTANT,
        warmup_s=0,
        duration_s=0.1,
        timeout_s=60.0,
        slo=SLO(ttft_s=0.1),
    )
    result = run_bench(wanted)
    assert all(case.is_saturated for case in result.cases)
    assert {case.median("attainment") for case in result.cases} == {0.0}
    assert result.capacity_per_s() is None
    assert any("Ended early" in warning for warning in result.cases[0].warnings)


def test_progress_is_shown_on_a_terminal_only() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal, pipe = Terminal(), io.StringIO()
    for stream in (terminal, pipe):
        line = ProgressLine(stream, {"TERM": "xterm"})
        line("one of two")
        line.clear()
    assert "one of two" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\x1b[2K")
    assert pipe.getvalue() == ""


def test_progress_tells_what_is_going_on(server: MockServer) -> None:
    told: list[str] = []
    run_bench(options(server.url, Scenario.DECODE, streams=(2,)), told.append)
    assert any(text == "decode, 2 streams on A: 0 of 2 done, 2 in flight" for text in told)
