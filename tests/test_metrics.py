"""The definitions of edgeserve/metrics.py, by worked examples."""

from __future__ import annotations

import math

import pytest

from edgeserve import metrics
from edgeserve.errors import UsageError
from edgeserve.metrics import SLO, OutputEvent, Timeline, TimelineError


def test_e1_ttft_e2e_and_tpot() -> None:
    timeline = Timeline.of_tokens(0, [0.8, 0.9, 1.0, 1.1, 1.2])
    assert timeline.ttft_s == pytest.approx(0.8)
    assert timeline.e2e_s == pytest.approx(1.2)
    assert timeline.tpot_s == pytest.approx(0.1)


def test_e1_the_same_mean_can_hide_a_stall() -> None:
    timeline = Timeline.of_tokens(0, [0.8, 0.81, 0.82, 0.83, 1.2])
    assert timeline.tpot_s == pytest.approx(0.1)
    assert timeline.max_gap_s == pytest.approx(0.37)
    assert timeline.itl_s == pytest.approx((0.01, 0.01, 0.01, 0.37))


def e2_requests() -> list[Timeline]:
    a = Timeline.of_tokens(0, [0.8, 0.9, 1.0, 1.1, 1.2])
    b = Timeline.of_tokens(0.2, [1.0, 1.25, 1.5])
    return [a, b]


def test_e2_mean_of_requests_and_pooled_mean_differ() -> None:
    requests = e2_requests()
    assert [request.ttft_s for request in requests] == pytest.approx([0.8, 0.8])
    assert metrics.mean_tpot_s(requests) == pytest.approx(0.175)
    assert metrics.pooled_tpot_s(requests) == pytest.approx(0.15)


def test_e2_throughput_over_the_window() -> None:
    requests = e2_requests()
    assert metrics.output_tokens_per_s(requests, 0, 1.5) == pytest.approx(8 / 1.5)
    ends = [request.arrival_s + request.e2e_s for request in requests]
    assert metrics.requests_per_s(ends, 0, 1.5) == pytest.approx(2 / 1.5)


def test_e3_work() -> None:
    prefill, decode = metrics.prefill_pairs(4), metrics.decode_pairs(4, 2)
    assert (prefill, decode) == (10, 11)
    assert metrics.attention_flops(2, 8, prefill + decode) == 1344


def test_pairs_equal_a_count_by_hand() -> None:
    n, k = 7, 5
    assert metrics.prefill_pairs(n) == sum(range(1, n + 1))
    assert metrics.decode_pairs(n, k) == sum(n + step for step in range(1, k + 1))


def test_a_single_token_has_no_tpot() -> None:
    timeline = Timeline.of_tokens(0, [0.5])
    assert timeline.tpot_s is None
    assert timeline.max_gap_s is None
    assert timeline.e2e_s == timeline.ttft_s
    assert metrics.mean_tpot_s([timeline]) is None
    assert metrics.mean_tpot_s([timeline, Timeline.of_tokens(0, [1, 2])]) == pytest.approx(1.0)
    assert metrics.pooled_tpot_s([timeline]) is None


def test_e2e_is_ttft_plus_decode() -> None:
    timeline = Timeline.of_tokens(3.0, [4.0, 4.5, 7.0, 7.1])
    assert timeline.tpot_s is not None
    assert timeline.e2e_s == pytest.approx(timeline.ttft_s + 3 * timeline.tpot_s)


@pytest.mark.parametrize(
    ("arrival", "stamps"),
    [
        (0.0, []),
        (0.0, [0.1, math.nan]),
        (0.0, [math.inf]),
        (math.nan, [1.0]),
        (1.0, [0.5, 1.5]),
        (0.0, [0.2, 0.1]),
    ],
)
def test_impossible_times_are_an_error(arrival: float, stamps: list[float]) -> None:
    with pytest.raises(TimelineError) as caught:
        Timeline.of_tokens(arrival, stamps)
    assert isinstance(caught.value, UsageError)


def test_an_event_without_a_token_is_an_error() -> None:
    with pytest.raises(TimelineError):
        Timeline(0, (OutputEvent(1.0, 0),))


def test_a_chunk_is_not_a_token() -> None:
    timeline = Timeline(0, (OutputEvent(1.0, 3), OutputEvent(1.6, 3), OutputEvent(2.0, 1)))
    assert timeline.num_tokens == 7
    assert timeline.tpot_s == pytest.approx(1.0 / 6)
    assert timeline.gaps_s == pytest.approx((0.6, 0.4))
    assert timeline.itl_s is None


def test_chunks_take_their_token_count_from_usage() -> None:
    timeline = Timeline.of_chunks(0, [1.0, 2.0, 3.0], num_tokens=8)
    assert timeline.num_tokens == 8
    assert sorted(event.num_tokens for event in timeline.events) == [2, 3, 3]
    assert timeline.tpot_s == pytest.approx(2.0 / 7)
    assert Timeline.of_chunks(0, [1.0, 2.0], num_tokens=2).itl_s == pytest.approx((1.0,))


def test_chunks_that_came_in_one_piece_are_one_event() -> None:
    timeline = Timeline.of_chunks(0, [1.0, 2.0, 2.0, 3.0], num_tokens=None)
    assert [event.num_tokens for event in timeline.events] == [1, 2, 1]
    assert timeline.gaps_s == pytest.approx((1.0, 1.0))
    assert timeline.itl_s is None
    with pytest.raises(TimelineError):
        Timeline.of_chunks(0, [], num_tokens=None)


def test_neighbouring_windows_count_each_token_once() -> None:
    timeline = Timeline.of_tokens(0, [1.0, 2.0, 3.0])
    assert timeline.tokens_between(0, 2) + timeline.tokens_between(2, 4) == 3
    assert metrics.output_tokens_per_s([timeline], 2, 2) is None


def test_percentiles_carry_their_count_and_p99_needs_samples() -> None:
    few = metrics.summarize([float(value) for value in range(1, 101)])
    assert (few.n, few.p50, few.max) == (100, 50.5, 100)
    assert few.p99 is None
    many = metrics.summarize([float(value) for value in range(201)])
    assert many.n == 201
    assert many.p99 == pytest.approx(198.0)


def test_an_empty_sample_has_no_figures() -> None:
    empty = metrics.summarize([None, None])
    assert empty == metrics.Summary(n=0)


def test_failed_requests_rank_as_the_slowest() -> None:
    values = [1.0, 2.0, 3.0, 4.0]
    assert metrics.percentile(values, 50) == pytest.approx(2.5)
    assert metrics.percentile(values, 50, num_failed=1) == pytest.approx(3.0)
    assert metrics.percentile(values, 95, num_failed=1) is None
    assert metrics.summarize(values, num_failed=5).p50 is None
    assert metrics.summarize([], num_failed=3).n == 3


def test_slo_bounds_are_optional_and_each_binds() -> None:
    timeline = Timeline.of_tokens(0, [0.8, 0.81, 0.82, 0.83, 1.2])
    assert SLO().is_met_by(timeline)
    assert SLO(ttft_s=1, tpot_s=0.15, itl_s=0.4, e2e_s=1.3).is_met_by(timeline)
    assert not SLO(ttft_s=0.7).is_met_by(timeline)
    assert not SLO(tpot_s=0.05).is_met_by(timeline)
    assert not SLO(itl_s=0.3).is_met_by(timeline)
    assert not SLO(e2e_s=1.1).is_met_by(timeline)
    assert SLO(tpot_s=0.001).is_met_by(Timeline.of_tokens(0, [5.0]))


def test_the_bound_on_ttft_may_grow_with_the_prompt() -> None:
    late = Timeline.of_tokens(0, [5.0])
    slo = SLO(ttft_s=2.0, ttft_token_s=0.015)
    assert slo.ttft_bound_s(100) == pytest.approx(3.5)
    assert not slo.is_met_by(late, 100)
    assert slo.is_met_by(late, 200)
    assert SLO(ttft_token_s=0.03).is_met_by(late, 200)
    assert not SLO(ttft_token_s=0.02).is_met_by(late, 200)


def test_attainment_is_over_all_that_were_offered() -> None:
    assert metrics.attainment(3, 4) == 0.75
    assert metrics.attainment(0, 0) is None
    assert metrics.goodput_per_s(3, 1.5) == pytest.approx(2.0)
    assert metrics.goodput_per_s(3, 0) is None


def test_no_rate_from_one_token() -> None:
    assert metrics.tokens_per_s(1, 0.015) is None
    assert metrics.tokens_per_s(100, 2.0) == 50
    assert metrics.tokens_per_s(100, 0.0) is None


def test_littles_law_holds_in_a_steady_window_and_not_in_a_growing_queue() -> None:
    steady = [(index * 0.5, index * 0.5 + 2.0) for index in range(-20, 200)]
    law = metrics.littles_law(steady, 0, 50)
    assert law is not None
    assert law.mean_in_flight == pytest.approx(4.0)
    assert law.relative_gap == pytest.approx(0.0, abs=1e-9)

    growing = [(index * 0.5, index * 0.5 + 2.0 + index) for index in range(200)]
    gap = metrics.littles_law(growing, 0, 50)
    assert gap is not None and gap.relative_gap is not None
    assert abs(gap.relative_gap) > 0.2
    assert metrics.littles_law(steady, 1000, 1001) is None


def test_prefill_share() -> None:
    assert metrics.prefill_share(3, 1) == 0.75
    assert metrics.prefill_share(0, 0) is None


def test_parts_of_ttft_add_up() -> None:
    parts = metrics.TtftParts(front_end_s=0.01, queue_s=0.5, prefill_s=1.0, delivery_s=0.02)
    assert parts.total_s == pytest.approx(1.53)
    assert parts.unexplained_s(1.55) == pytest.approx(0.02)


def test_rooflines() -> None:
    assert metrics.step_lower_bound_s(1e12, 1e9, 1e13, 1e10) == pytest.approx(0.1)
    assert metrics.step_lower_bound_s(1e12, 1e9, 1e12, 1e10) == pytest.approx(1.0)
    assert metrics.decode_intensity(8, 0.5) == pytest.approx(32)
    assert metrics.matmul_flops(1000, 3) == 6000
