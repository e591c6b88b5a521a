"""Figures of one run: windows, denominators, buckets, warnings."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
from bench_mock import record

from edgeserve.bench import figures, kinds
from edgeserve.bench.figures import Bucket, Run
from edgeserve.bench.runner import Outcome, Record
from edgeserve.bench.steadiness import steadiness
from edgeserve.metrics import SLO

FOREVER = (0.0, math.inf)


def run(*records: Record, **more: Any) -> Run:
    fields: dict[str, Any] = {
        "case": "case",
        "kind": "load",
        "mode": "open loop",
        "target": "A",
        "repeat": 0,
        "window_s": (0.0, 10.0),
    }
    return Run(records=tuple(records), **(fields | more))


def test_failures_stay_in_the_denominator() -> None:
    good = record(0, scheduled_s=0.0, stamps_s=[1.0, 1.1])
    slow = record(1, scheduled_s=0.0, stamps_s=[5.0, 5.1])
    rejected = record(2, scheduled_s=0.0, outcome=Outcome.REJECTED)
    timeout = record(3, scheduled_s=0.0, outcome=Outcome.TIMEOUT)
    found = figures.run_figures(run(good, slow, rejected, timeout), SLO(ttft_s=2.0)).figures
    assert (found["offered"], found["ok"], found["rejected"], found["failed"]) == (4, 2, 1, 1)
    assert found["attainment"] == 0.25
    assert found["goodput_per_s"] == pytest.approx(0.1)


def test_a_failed_request_is_slower_than_any_that_ended() -> None:
    answered = [record(index, scheduled_s=0.0, stamps_s=[1.0 + index]) for index in range(3)]
    failed = [record(index, scheduled_s=0.0, outcome=Outcome.ERROR) for index in (3, 4)]
    found = figures.run_figures(run(*answered, *failed), SLO()).figures
    assert found["ttft_p50_s"] == pytest.approx(2.0)
    assert found["ttft_all_p50_s"] == pytest.approx(3.0)
    assert found["ttft_all_p95_s"] is None


def test_latency_counts_from_the_schedule_and_the_lag_is_reported() -> None:
    late = record(0, scheduled_s=1.0, sent_s=1.4, stamps_s=[2.0, 2.1])
    found = figures.run_figures(run(late), SLO())
    assert found.figures["ttft_p50_s"] == pytest.approx(1.0)
    assert found.figures["send_lag_p99_s"] == pytest.approx(0.4)
    assert any("sent late" in warning for warning in found.warnings)
    punctual = record(0, scheduled_s=1.0, sent_s=1.0005, stamps_s=[2.0, 2.1])
    assert not any("sent late" in warning for warning in figures.run_figures(run(punctual), SLO()).warnings)


def test_only_arrivals_inside_the_window_are_measured_but_all_tokens_in_it_count() -> None:
    before = record(0, scheduled_s=1.0, stamps_s=[2.5, 3.5])
    inside = record(1, scheduled_s=3.0, stamps_s=[3.2, 3.4])
    after = record(2, scheduled_s=5.0, stamps_s=[5.5])
    found = figures.run_figures(run(before, inside, after, window_s=(3.0, 4.0)), SLO()).figures
    assert found["offered"] == 1
    assert found["ttft_p50_s"] == pytest.approx(0.2)
    assert found["output_tok_s"] == pytest.approx(3.0)


def test_what_the_benchmark_itself_cut_off_is_nobodys_failure() -> None:
    cut = record(0, scheduled_s=0.0, outcome=Outcome.CANCELLED)
    found = figures.run_figures(run(record(1, scheduled_s=0.0, stamps_s=[1.0]), cut), SLO()).figures
    assert (found["offered"], found["failed"]) == (1, 0)


@pytest.mark.parametrize(
    ("prompt", "cached", "expected"),
    [
        (500, 3, Bucket(512, "cold")),
        (40, 5, Bucket(32, "cold")),
        (520, 200, Bucket(512, "partial")),
        (700, 690, Bucket(512, "warm")),
        (800, 0, Bucket(1024, "cold")),
        (500, None, Bucket(512, "unknown")),
    ],
)
def test_buckets_follow_what_was_observed(prompt: int, cached: int | None, expected: Bucket) -> None:
    assert figures.bucket_of(record(prompt_tokens=prompt, cached_tokens=cached, stamps_s=[1])) == expected


def test_cold_and_warm_are_never_averaged() -> None:
    cold = [record(i, scheduled_s=0.0, stamps_s=[4.0], prompt_tokens=500) for i in range(3)]
    warm = [
        record(i, scheduled_s=0.0, stamps_s=[0.1], prompt_tokens=500, cached_tokens=490) for i in range(3, 5)
    ]
    found = figures.run_figures(run(*cold, *warm, is_cold_meant=False), SLO())
    first, second = found.buckets
    assert (first.bucket.cache, first.ttft_s.n, first.ttft_s.mean) == ("cold", 3, 4.0)
    assert (second.bucket.cache, second.ttft_s.n, second.ttft_s.mean) == ("warm", 2, pytest.approx(0.1))
    assert found.figures["ttft_p50_s"] == 4.0
    assert found.figures["ttft_all_p50_s"] is None
    assert any("largest bucket: about 512 tokens, cold, 3 of 5" in warning for warning in found.warnings)


def test_a_cold_run_that_hit_the_cache_is_reported() -> None:
    hit = record(0, scheduled_s=0.0, stamps_s=[1.0], prompt_tokens=500, cached_tokens=300)
    found = figures.run_figures(run(hit), SLO())
    assert found.figures["cached_share"] == pytest.approx(0.6)
    assert any("cached although cold" in warning for warning in found.warnings)
    template_only = replace(run(record(0, scheduled_s=0.0, stamps_s=[1.0], cached_tokens=4)))
    assert not any("cached" in warning for warning in figures.run_figures(template_only, SLO()).warnings)


def test_the_servers_own_count_is_a_check() -> None:
    answered = record(0, scheduled_s=0.0, stamps_s=[1.0, 1.1, 1.2])
    fine = figures.run_figures(run(answered, server_tokens=3.0), SLO())
    assert not any("counted" in warning for warning in fine.warnings)
    other = figures.run_figures(run(answered, server_tokens=40.0), SLO())
    assert any("counted 40" in warning for warning in other.warnings)


def steady_records(rate: float, growth: float) -> list[Record]:
    """Arrivals for 20 s; each waits 0.5 s and, with `growth`, a bit longer than the one before."""
    rng = random.Random(2)
    made = []
    for index in range(round(20 * rate)):
        at_s = index / rate
        first_s = at_s + 0.5 + rng.uniform(0, 0.2) + growth * at_s
        made.append(record(index, scheduled_s=at_s, sent_s=at_s, stamps_s=[first_s, first_s + 0.5]))
    return made


def test_a_growing_queue_is_told_from_a_steady_one() -> None:
    assert not steadiness(steady_records(5, 0.0), (0.0, 20.0)).is_saturated
    saturated = steadiness(steady_records(5, 1.0), (0.0, 20.0))
    assert saturated.is_saturated
    assert "ttft" in saturated.reason


def test_too_few_requests_say_nothing_of_steadiness() -> None:
    short = steadiness(steady_records(5, 1.0)[:5], (0.0, 20.0))
    assert not short.is_saturated
    assert short.reason == "too few requests to tell"


def test_a_saturated_run_is_warned_of_and_little_disagrees() -> None:
    found = figures.run_figures(run(*steady_records(5, 1.0), window_s=(0.0, 20.0)), SLO())
    assert any("Not steady" in warning for warning in found.warnings)
    assert any("In flight differs" in warning for warning in found.warnings)
    steady = figures.run_figures(run(*steady_records(5, 0.0), window_s=(2.0, 18.0)), SLO())
    assert steady.warnings == ()


def test_throughput_of_streams_is_that_of_all_of_them_together() -> None:
    """The first token of the second stream comes at 2.0, the last of the first at 3.0."""
    one = record(0, stamps_s=[1.0, 1.5, 2.0, 2.5, 3.0])
    two = record(1, stamps_s=[2.0, 2.5, 3.0, 3.5, 4.0])
    found = kinds.figures_of(run(one, two, kind="decode", mode="closed loop", window_s=FOREVER), SLO())
    assert found.figures["output_tok_s"] == pytest.approx(4.0)
    apart = record(1, stamps_s=[7.0, 7.5])
    found = kinds.figures_of(run(one, apart, kind="decode", mode="closed loop", window_s=FOREVER), SLO())
    assert found.figures["output_tok_s"] is None
    assert found.warnings


def stall_run(*extra: Record) -> Run:
    """A has a token every 0.1 s, and none while B waits from 1.05 to 2.0."""
    stamps = [index / 10 for index in range(1, 11)] + [2.0 + index / 10 for index in range(5)]
    a = record(0, label="A", sent_s=0.0, stamps_s=stamps)
    alone = record(2, label="B alone", sent_s=-5.0, stamps_s=[-4.2])
    return run(a, alone, *extra, kind="stall", mode="script", window_s=FOREVER)


def test_a_stall_is_the_gap_of_the_running_stream() -> None:
    b = record(1, label="B", sent_s=1.05, stamps_s=[2.0, 2.1])
    found = kinds.figures_of(stall_run(b), SLO()).figures
    assert found["a_gap_before_max_s"] == pytest.approx(0.1)
    assert found["a_gap_max_s"] == pytest.approx(1.0)
    assert found["a_gaps"] == 1
    assert found["b_ttft_s"] == pytest.approx(0.95)
    assert found["b_alone_ttft_s"] == pytest.approx(0.8)
    assert "ttft_p50_s" not in found


def test_a_stall_that_could_not_be_seen_is_not_a_small_one() -> None:
    late = record(1, label="B", sent_s=1.05, stamps_s=[9.0])
    found = kinds.figures_of(stall_run(late), SLO())
    assert any("A ended before B" in warning for warning in found.warnings)
    failed = record(1, label="B", sent_s=1.05, outcome=Outcome.REJECTED)
    found = kinds.figures_of(stall_run(failed), SLO())
    assert found.figures.get("a_gap_max_s") is None
    assert any("no first token" in warning for warning in found.warnings)


def test_turns_show_what_is_evaluated_again() -> None:
    turns = [
        record(0, label="turn 1", sent_s=0, stamps_s=[1.0, 1.1], prompt_tokens=100, cached_tokens=0),
        record(1, label="turn 2", sent_s=2, stamps_s=[2.3, 2.4], prompt_tokens=200, cached_tokens=150),
        record(2, label="turn 3", sent_s=3, stamps_s=[3.5, 3.6], prompt_tokens=300, cached_tokens=250),
    ]
    found = kinds.figures_of(run(*turns, kind="turns", mode="script", is_cold_meant=False), SLO()).figures
    assert found["first_ttft_s"] == pytest.approx(1.0)
    assert found["later_ttft_p50_s"] == pytest.approx(0.4)
    assert found["last_ttft_s"] == pytest.approx(0.5)
    assert found["later_evaluated_tokens"] == 50
    assert found["later_evaluated_share"] == pytest.approx(0.2)


def test_a_server_that_says_nothing_of_its_cache_has_no_evaluated_count() -> None:
    turns = [
        record(index, label=f"turn {index + 1}", sent_s=index, stamps_s=[index + 0.5], cached_tokens=None)
        for index in range(3)
    ]
    found = kinds.figures_of(run(*turns, kind="turns", mode="script", is_cold_meant=False), SLO()).figures
    assert found["later_evaluated_tokens"] is None
    assert found["later_evaluated_share"] is None


def test_few_requests_are_said_to_be_few() -> None:
    few = [record(index, scheduled_s=0.5 * index, stamps_s=[0.5 * index + 0.1]) for index in range(9)]
    many = [*few, record(9, scheduled_s=4.5, stamps_s=[4.6])]
    assert any("Only 9 requests" in warning for warning in figures.run_figures(run(*few), SLO()).warnings)
    assert not any("Only" in warning for warning in figures.run_figures(run(*many), SLO()).warnings)


def test_a_run_without_any_answer_has_counts_and_no_times() -> None:
    found = figures.run_figures(run(record(0, scheduled_s=0.0, outcome=Outcome.ERROR)), SLO())
    assert found.figures["offered"] == 1
    assert found.figures["attainment"] == 0
    assert found.figures.get("ttft_p50_s") is None
    assert found.outcomes == {"error": 1}
