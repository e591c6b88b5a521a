"""What a monitor has seen, as diagnosis's figures; what they mean is tested with diagnosis."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from edgeserve.doctor.diagnosis import diagnose
from edgeserve.metrics import MIN_SAMPLES_P99
from tui.findings import findings, observe
from tui.history import History
from tui.snapshot import Cells, SequenceView, ServerFacts, ServerKind, Snapshot, Status, Step, Totals

FACTS = ServerFacts("http://127.0.0.1:8080", ServerKind.EDGESERVE, itl_target_ms=0)
START_S, NOW_S = 90.0, 100.0


def snapshot(at_s, *, steps=(), running=(), waiting=(), **others):
    others = {"num_waiting": len(waiting), "num_slots": 4, "steps": tuple(steps), **others}
    return Snapshot(at_s, running=tuple(running), waiting=tuple(waiting), **others)


def of(*snapshots):
    history = History()
    for one in snapshots:
        history.take(one)
    return history


def seen(*snapshots):
    """A server that was idle at first."""
    return of(snapshot(START_S), *snapshots)


def first_tokens(*cached, prompt=400, ttft_ms=300.0, queue_ms=0.0):
    return [
        SequenceView(
            f"r-{number}",
            Status.DECODE,
            num_prompt=prompt,
            num_cached=num,
            ttft_ms=ttft_ms,
            queue_ms=queue_ms,
        )
        for number, num in enumerate(cached)
    ]


def test_nothing_stands_out_of_a_quiet_server():
    assert findings(FACTS, seen(snapshot(NOW_S)), NOW_S) == []
    assert findings(None, History(), NOW_S) == []


def test_findings_are_what_doctor_says_of_the_same_figures():
    steps = [Step(n, 0.3 if n % 20 == 0 else 0.013, 1, 32 if n % 20 == 0 else 0, 99.0) for n in range(400)]
    before = SequenceView("chatcmpl-1", Status.DECODE, decode_ms=1000.0, stalled_ms=0.0)
    after = SequenceView("chatcmpl-1", Status.DECODE, decode_ms=9000.0, stalled_ms=3000.0)
    prompt = SequenceView("chatcmpl-77c0", Status.PREFILL)
    history = seen(snapshot(91.0, running=[before]), snapshot(NOW_S, steps=steps, running=[after, prompt]))
    observed = observe(FACTS, history, NOW_S)
    assert observed.stalled_share == pytest.approx(3 / 8)
    assert (observed.num_gaps, observed.gap_p50_s) == (400, 0.013)
    found = findings(FACTS, history, NOW_S)
    assert {item.rule for item in found} == {item.rule for item in diagnose(observed)} >= {"stalls"}
    assert "77c0" in next(item.sentence for item in found if item.rule == "stalls")


def test_problems_come_before_notes():
    waiting = SequenceView("chatcmpl-19be2", Status.WAITING, waits_for="812 KV cells")
    history = seen(snapshot(NOW_S, waiting=[waiting], cells=Cells(1000, 1000, 20)))
    assert [item.level for item in findings(FACTS, history, NOW_S)] == ["problem", "note"]


def test_who_waits_is_told_with_how_long_that_was_seen():
    waiting = SequenceView("chatcmpl-19be2", Status.WAITING, waits_for="812 KV cells", num_prompt=812)
    history = seen(snapshot(97.0, waiting=[waiting]), snapshot(NOW_S, waiting=[waiting, waiting]))
    queue = observe(FACTS, history, NOW_S).queue
    assert (queue.num_waiting, queue.first_id, queue.waits_for) == (2, "19be2", "812 KV cells")
    assert queue.waited_s == pytest.approx(3.0)
    assert queue.num_prompt_tokens == 812


def test_a_server_that_only_counts_its_queue_gives_the_count():
    history = seen(Snapshot(NOW_S, waiting=None, num_waiting=3))
    assert observe(FACTS, history, NOW_S).queue.num_waiting == 3
    (found,) = findings(FACTS, history, NOW_S)
    assert "3 requests wait" in found.sentence


def test_idle_prefixes_are_no_cells_in_use():
    observed = observe(FACTS, seen(snapshot(NOW_S, cells=Cells(1000, 1000, 900))), NOW_S)
    assert (observed.cells_total, observed.cells_used, observed.cells_cached) == (1000, 100, 900)


def test_first_tokens_are_told_apart_by_what_was_cached():
    history = seen(snapshot(NOW_S, running=first_tokens(0, 10, 200, 390, queue_ms=150.0)))
    observed = observe(FACTS, history, NOW_S)
    assert (observed.num_requests, observed.num_misses, observed.num_hits) == (4, 2, 1)
    assert (observed.ttft_s, observed.queue_share) == (pytest.approx(0.3), pytest.approx(0.5))
    assert (observed.hit_prompt_tokens, observed.hit_cached_tokens) == (400, 390)


def test_sums_are_those_of_the_window():
    def totals(prompt, cached, output, prefill_ms):
        return Totals(prompt, cached, output, prefill_ms, 0.0, {"rejected": output // 100})

    stays = SequenceView("r-1", Status.DECODE)
    history = of(
        snapshot(92.0, running=[stays], totals=totals(5000, 1000, 100, 9000.0)),
        snapshot(
            96.0, running=[stays], totals=totals(6000, 1500, 300, 11000.0), steps=[Step(1, 1.0, 1, 0, 96.0)]
        ),
    )
    observed = observe(FACTS, history, NOW_S)
    assert observed.window_s == pytest.approx(8.0)
    assert observed.prefill_tok_s == pytest.approx(500 / 2)
    assert observed.output_tok_s == pytest.approx(200 / 8)
    assert observed.busy_share == pytest.approx(1 / 8)
    assert (observed.num_running, observed.num_rejected) == (1.0, 2)


def test_a_server_that_tells_no_steps_is_not_called_idle():
    running = (SequenceView("1", Status.DECODE, num_output=9),)
    history = of(*(Snapshot(at_s, running=running, waiting=None) for at_s in (START_S, NOW_S)))
    observed = observe(FACTS, history, NOW_S)
    assert (observed.busy_share, observed.stalled_share, observed.gap_p99_s) == (None, None, None)
    assert findings(FACTS, history, NOW_S) == []


def test_what_is_past_is_not_found_any_more():
    def totals(rejected):
        return Totals(0, 0, 0, 0.0, 0.0, {"rejected": rejected})

    many = [Step(n, 0.02, 1, 0, 95.0) for n in range(MIN_SAMPLES_P99)]
    history = of(snapshot(91.0, totals=totals(1)), snapshot(95.0, steps=many, totals=totals(4)))
    assert observe(FACTS, history, 96.0).num_rejected == 3
    later = observe(FACTS, history, 95.0 + 61)
    known = {name for name, value in asdict(later).items() if value}
    assert known == {"window_s", "num_slots"}
