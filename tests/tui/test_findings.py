"""From what is seen to the sentence on why."""

from __future__ import annotations

import pytest

from tui.findings import findings
from tui.history import History
from tui.snapshot import Cells, SequenceView, ServerFacts, ServerKind, Snapshot, Status, Step

FACTS = ServerFacts("http://127.0.0.1:8080", ServerKind.EDGESERVE, itl_target_ms=0)


def seen(steps=(), running=(), waiting=(), cells=None, target_ms=None):
    history = History()
    history.take(Snapshot(99.0, steps=()))
    history.take(
        Snapshot(
            100.0,
            running=tuple(running),
            waiting=tuple(waiting),
            num_waiting=len(waiting),
            num_slots=4,
            cells=cells,
            steps=tuple(steps),
            itl_target_ms=target_ms,
        )
    )
    return history


def mixed_and_pure(mixed_ms):
    pure = [Step(n, 0.013, 1, 0, 99.5) for n in range(20)]
    return [*pure, *(Step(20 + n, mixed_ms / 1e3, 1, 32, 99.9) for n in range(10))]


def test_nothing_stands_out_of_a_quiet_server():
    assert findings(FACTS, seen(), 100.0) == []
    assert findings(None, History(), 100.0) == []


def test_stalls_name_the_prompt_that_causes_them_and_both_times():
    prompt = SequenceView("chatcmpl-77c0", Status.PREFILL)
    (found,) = findings(FACTS, seen(mixed_and_pure(44), running=[prompt]), 100.0)
    assert "77c0's prefill" in found.text
    assert "44.0 ms" in found.text and "13.0 ms" in found.text
    assert "--itl-target-ms" in found.remedy
    assert ("target", "automatic (--itl-target-ms sets it)") in found.evidence


def test_stalls_within_the_target_are_no_problem():
    (found,) = findings(FACTS, seen(mixed_and_pure(44), target_ms=50.0), 100.0)
    assert not found.is_problem
    assert "keeps the target of 50.0 ms" in found.remedy


@pytest.mark.parametrize("mixed_ms", [14, 18])
def test_steps_that_are_hardly_longer_are_no_stalls(mixed_ms):
    assert findings(FACTS, seen(mixed_and_pure(mixed_ms)), 100.0) == []


def test_who_waits_and_for_what_comes_with_the_remedy_for_that():
    waiting = [SequenceView("chatcmpl-9be2", Status.WAITING, waits_for="812 KV cells", num_prompt=812)]
    (found,) = findings(FACTS, seen(waiting=[*waiting, waiting[0]], cells=Cells(4096, 3500, 200)), 100.0)
    assert "9be2 waits for 812 KV cells, and 1 behind it." in found.text
    assert "-c" in found.remedy
    assert ("KV cells", "3,500 of 4,096 used, 200 of them reusable") in found.evidence
    (found,) = findings(
        FACTS, seen(waiting=[SequenceView("x-1a2b", Status.WAITING, waits_for="a free sequence")]), 100.0
    )
    assert "-np" in found.remedy


def test_cells_held_by_idle_prefixes_are_not_full():
    assert findings(FACTS, seen(cells=Cells(1000, 1000, 900)), 100.0) == []
    (found,) = findings(FACTS, seen(cells=Cells(1000, 1000, 20)), 100.0)
    assert "KV cells" in found.text


def test_prompts_that_begin_alike_are_asked_for_when_none_does():
    running = [
        SequenceView(f"r-{n}", Status.DECODE, num_prompt=400, num_cached=0, ttft_ms=300.0) for n in range(3)
    ]
    (found,) = findings(FACTS, seen(running=running), 100.0)
    assert "1,200 tokens" in found.text
    assert not found.is_problem
    warm = [SequenceView("r-9", Status.DECODE, num_prompt=400, num_cached=380, ttft_ms=30.0)]
    assert findings(FACTS, seen(running=[*running, *warm]), 100.0) == []


def test_queueing_before_the_first_token_is_told_from_prefill():
    running = [
        SequenceView(f"r-{n}", Status.DECODE, num_prompt=9, ttft_ms=1000.0, queue_ms=900.0) for n in range(3)
    ]
    (found,) = findings(FACTS, seen(running=running), 100.0)
    assert "queueing: 900 ms" in found.text
