"""What a history makes of snapshots: speeds, gaps, first tokens, progress, polls."""

from __future__ import annotations

import pytest

from edgeserve.metrics import MIN_SAMPLES_P99
from tui.history import BUCKET_S, NUM_STEPS, History
from tui.snapshot import SequenceView, Snapshot, Status, Step, Totals


def step(number, end_s, ms, decode=0, prefill=0):
    return Step(number, ms / 1e3, decode, prefill, end_s)


def of_steps(at_s, *steps, running=(), waiting=()):
    return Snapshot(at_s, running=running, waiting=waiting, num_waiting=len(waiting), steps=steps)


@pytest.fixture
def history():
    """One that has seen an idle server, so that what comes next is known to be new."""
    history = History()
    history.take(of_steps(100.0))
    return history


def test_speeds_are_tokens_over_the_time_of_the_steps_that_carried_them(history):
    history.take(of_steps(100.3, step(1, 100.2, 200, prefill=64), step(2, 100.3, 100, decode=2, prefill=16)))
    history.take(of_steps(100.4, step(3, 100.4, 50, decode=2)))
    now = history.now(100.45)
    assert now.prefill_tokens_per_s == pytest.approx(80 / 0.3)
    assert now.decode_tokens_per_s == pytest.approx(4 / 0.15)
    assert now.ms_per_token == pytest.approx((2 * 100 + 2 * 50) / 4)


def test_an_idle_stretch_has_no_speed(history):
    history.take(of_steps(100.3, step(1, 100.2, 100, decode=1)))
    later = history.column(103.0, 104.0)
    assert (later.ms_per_token, later.prefill_tokens_per_s, later.decode_tokens_per_s) == (None, None, None)
    assert history.now(120.0).decode_tokens == 0


def test_a_long_step_is_spread_over_the_buckets_that_it_filled(history):
    history.take(of_steps(102.0, step(1, 102.0, 2000, prefill=512)))
    halves = [history.column(start, start + BUCKET_S) for start in (100.0, 100.5, 101.0, 101.5)]
    assert [half.prefill_tokens for half in halves] == pytest.approx([128] * 4)
    assert [half.prefill_tokens_per_s for half in halves] == pytest.approx([256] * 4)


def test_old_steps_of_the_first_snapshot_are_shown_but_belong_to_no_time():
    history = History()
    history.take(of_steps(100.0, step(1, 99.9, 100, decode=1), step(2, 100.0, 100, decode=1)))
    assert [shown.number for shown in history.steps] == [1, 2]
    assert history.now(100.0).decode_tokens == 0
    assert history.gaps(100.0).n == 0


def test_every_stream_of_a_step_met_its_gap(history):
    history.take(of_steps(101.0, step(1, 100.5, 10, decode=3), step(2, 101.0, 90, decode=1, prefill=32)))
    gaps = history.gaps(101.0)
    assert (gaps.n, gaps.p50, gaps.max) == (4, 0.010, 0.090)
    assert gaps.p99 is None, "too few for a 99th percentile"
    assert history.gaps(101.0 + 61).n == 0


def test_a_p99_needs_samples_enough(history):
    steps = [step(n, 100 + n / 100, 10, decode=1) for n in range(MIN_SAMPLES_P99)]
    history.take(of_steps(102.0, *steps))
    assert history.gaps(102.0).p99 == pytest.approx(0.010)


def test_memory_is_bounded_whatever_a_server_sends(history):
    for second in range(3000):
        at_s = 200.0 + second
        history.take(of_steps(at_s, *(step(n, at_s, 5, decode=1) for n in range(3))))
    assert len(history.steps) == NUM_STEPS
    assert len(history._buckets) <= 2400
    assert history.gaps(at_s).n <= 3 * 61


def test_a_first_token_is_counted_once_and_by_what_was_cached(history):
    cold = SequenceView("a", Status.DECODE, num_prompt=300, num_cached=0, ttft_ms=800.0, queue_ms=500.0)
    warm = SequenceView("b", Status.DECODE, num_prompt=300, num_cached=290, ttft_ms=90.0, queue_ms=1.0)
    history.take(of_steps(101.0, running=(SequenceView("a", Status.PREFILL),)))
    for at_s in (102.0, 103.0):
        history.take(of_steps(at_s, running=(cold, warm)))
    assert history.ttft(103.0, "miss").p50 == pytest.approx(0.8)
    assert history.ttft(103.0, "miss").n == 1
    assert history.ttft(103.0, "hit").p50 == pytest.approx(0.09)
    assert history.ttft(103.0, "partial").n == 0
    assert history.ttft(170.0, "hit").n == 0


def test_first_tokens_from_before_are_nobodys():
    history = History()
    history.take(of_steps(100.0, running=(SequenceView("a", Status.DECODE, ttft_ms=800.0),)))
    assert history.ttft(100.0, "miss").n == 0


def test_a_prompts_end_is_told_from_its_pace(history):
    for at_s, done in ((101.0, 100), (102.0, 300)):
        view = SequenceView("a", Status.PREFILL, num_prompt=1000, num_cached=100, num_evaluated=done)
        history.take(of_steps(at_s, running=(view,)))
    assert history.eta_s(view) == pytest.approx((1000 - 400) / 200)
    assert view.prompt_share == pytest.approx(0.4)
    fresh = SequenceView("b", Status.PREFILL, num_prompt=10, num_cached=0, num_evaluated=0)
    assert history.eta_s(fresh) is None


def test_own_time_leaves_the_stalls_out():
    view = SequenceView("a", Status.DECODE, num_output=11, decode_ms=300.0, stalled_ms=100.0)
    assert view.own_ms_per_token == pytest.approx(20.0)
    assert (
        SequenceView("a", Status.DECODE, num_output=1, decode_ms=0.0, stalled_ms=0.0).own_ms_per_token is None
    )


def test_who_has_left_is_remembered_for_a_moment(history):
    history.take(of_steps(101.0, running=(SequenceView("a", Status.DECODE, num_output=7),)))
    history.take(of_steps(102.0))
    (gone,) = history.just_done(103.0)
    assert (gone.request_id, gone.status, gone.num_output) == ("a", Status.DONE, 7)
    assert history.just_done(130.0) == []


def polled(at_s, totals=None, *running):
    return Snapshot(at_s, running=running, waiting=None, num_waiting=0, totals=totals)


def test_two_looks_at_a_server_without_steps_give_decode_by_difference():
    history = History()
    for at_s, decoded in ((100.0, 10), (100.5, 35)):
        history.take(polled(at_s, None, SequenceView("1", Status.DECODE, num_output=decoded)))
    now = history.now(100.5)
    assert now.ms_per_token == pytest.approx(500 / 25)
    assert now.decode_tokens_per_s == pytest.approx(50)
    assert history.gaps(100.5).n == 0, "gaps cannot be known from sums"


def test_prompts_of_a_polled_server_come_from_its_counters():
    history = History()
    history.take(polled(100.0, Totals(1000, 400, 0, 5000.0, 0.0)))
    history.take(polled(104.0, Totals(1900, 500, 0, 7000.0, 0.0)))
    assert history.now(104.0).prefill_tokens_per_s == pytest.approx(800 / 2.0)


def test_the_share_of_prefill_is_the_servers_own():
    history = History()
    history.take(Snapshot(101.0, steps=(), totals=Totals(0, 0, 0, 1000.0, 1000.0)))
    assert history.prefill_share(101.0) is None
    history.take(Snapshot(105.0, steps=(), totals=Totals(0, 0, 0, 4000.0, 2000.0)))
    assert history.prefill_share(105.0) == pytest.approx(0.75)
    assert history.prefill_share(170.0) is None, "nothing ran in the last minute"
