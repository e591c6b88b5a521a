"""Who may wait and for how long, and what a refused request is told."""

from __future__ import annotations

import pytest
from harness import Result, engine_of, request, run, step
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeserve.engine.admission import Admission, Speeds
from edgeserve.engine.kv_cache import KVCache
from edgeserve.engine.request import FinishReason, Priority, Request, Sequence, Urgency
from edgeserve.engine.sampling_params import SamplingParams
from edgeserve.engine.scheduler import OLDEST_TURN, FixedChunk, Scheduler
from edgeserve.engine.waiting_queue import MAX_OVERTAKES, WaitingQueue
from edgeserve.errors import QueueFullError, QueueTimeoutError, RequestTimeoutError
from edgeserve.llama import Model

SPEEDS = Speeds(decode_step_s=0.01, prompt_token_s=0.001)
INTERACTIVE, BATCH = Urgency(), Urgency(Priority.BATCH)


def sequence(
    name: str, num_prompt: int = 10, max_tokens: int = 100, urgency: Urgency = INTERACTIVE
) -> Sequence:
    ids = (1,) * num_prompt
    return Sequence(
        Request(name, ids, SamplingParams(), 0.0, cache_prompt=False, urgency=urgency), max_tokens
    )


def scheduler(num_slots: int = 2, n_ctx_seq: int = 1000, unified: bool = False) -> Scheduler:
    n_ctx = n_ctx_seq if unified else n_ctx_seq * num_slots
    return Scheduler(KVCache(num_slots, n_ctx, n_ctx_seq, unified), 512, FixedChunk(32))


def admission(
    made: Scheduler, max_waiting: int = 2, max_tokens: int = 0, max_queue_s: float = 60
) -> Admission:
    return Admission(made, max_waiting, max_tokens, max_queue_s)


def refusal(limits: Admission, newest: Sequence, speeds: Speeds = SPEEDS) -> QueueFullError:
    with pytest.raises(QueueFullError) as caught:
        limits.check(newest, speeds)
    return caught.value


def names(queue: WaitingQueue) -> list[str]:
    return [item.request_id for item in queue]


# -- limits and causes --------------------------------------------------------------------------------------


def test_a_full_queue_names_sequences_and_when_the_next_one_is_free() -> None:
    made = scheduler()
    for name, max_tokens in (("a", 50), ("b", 100)):
        made.add(sequence(name, max_tokens=max_tokens))
    made.admit()
    for name in "cd":
        made.add(sequence(name))
    error = refusal(admission(made), sequence("e"))
    assert (error.cause, error.code, error.status) == ("sequences", "queue_full", 429)
    assert "2 requests are waiting" in error.message
    assert "a free sequence" in error.message
    # a has 10 prompt tokens and 50 tokens to go.
    assert error.retry_after_s == 1.0
    slow = refusal(admission(made), sequence("e"), Speeds(0.1, 0.01))
    assert slow.retry_after_s == pytest.approx(5.1)
    assert slow.extra == {"cause": "sequences", "retry_after_s": 5.1}


def test_a_full_queue_names_cells_where_it_is_cells_that_lack() -> None:
    made = scheduler(num_slots=4, unified=True)
    made.add(sequence("a", 500, 200))
    made.admit()
    made.add(sequence("b", 300, 300))
    error = refusal(admission(made, max_waiting=1), sequence("c", 1, 1), Speeds(0.1, 0.01))
    assert error.cause == "cells"
    assert "300 KV cells" in error.message
    assert error.retry_after_s == pytest.approx(500 * 0.01 + 200 * 0.1)


def test_waiting_prompt_tokens_have_a_limit_of_their_own() -> None:
    made = scheduler(num_slots=1)
    made.add(sequence("a", 10, 20))
    made.admit()
    limits = admission(made, max_waiting=64, max_tokens=300)
    limits.check(sequence("alone", 900), SPEEDS)
    made.add(sequence("b", 100, 30))
    made.add(sequence("c", 150, 40))
    limits.check(sequence("d", 50), SPEEDS)
    error = refusal(limits, sequence("d", 51), Speeds(0.1, 0.01))
    assert error.cause == "budget"
    assert all(number in error.message for number in ("250", "51", "300"))
    # One must leave the queue: b does when a has ended.
    assert error.retry_after_s == pytest.approx(10 * 0.01 + 20 * 0.1)
    longer = refusal(limits, sequence("d", 200), Speeds(0.1, 0.01))
    assert longer.retry_after_s == pytest.approx(2.1 + 100 * 0.01 + 30 * 0.1)


def test_what_free_slots_will_take_does_not_wait() -> None:
    made = scheduler(num_slots=3)
    limits = admission(made, max_waiting=0)
    for name in "abc":
        limits.check(sequence(name), SPEEDS)
        made.add(sequence(name))
    assert refusal(limits, sequence("d")).cause == "sequences"


def test_answers_are_expected_to_be_as_long_as_they_were() -> None:
    made = scheduler(num_slots=1)
    made.add(sequence("a", 10, 500))
    made.admit()
    speeds = Speeds(0.1, 0.0, mean_output_tokens=30)
    assert refusal(admission(made, max_waiting=0), sequence("b"), speeds).retry_after_s == pytest.approx(3)
    assert refusal(admission(made, max_waiting=0), sequence("b"), Speeds()).retry_after_s == 1


def play(made: Scheduler, speeds: Speeds) -> dict[str, float]:
    """When each waiting sequence is admitted on a machine that is exactly so fast and computes all slots at
    once: what the estimate claims to be."""
    now_s, ends, starts = 0.0, {item: speeds.left_s(item) for item in made.running}, {}
    while made.waiting:
        for item, _ in made.admit():
            starts[item.request_id], ends[item] = now_s, now_s + speeds.left_s(item)
        if made.waiting:
            first = min(ends, key=lambda item: (ends[item], made.running.index(item)))
            now_s = ends.pop(first)
            made.finish(first, FinishReason.LENGTH)
    return starts


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 400), st.integers(1, 300), st.booleans()), min_size=1, max_size=20),
    st.integers(1, 4),
    st.booleans(),
)
def test_the_estimate_is_what_the_scheduler_does(
    workload: list[tuple[int, int, bool]], num_slots: int, unified: bool
) -> None:
    made = scheduler(num_slots, unified=unified)
    for index, (num_prompt, max_tokens, is_batch) in enumerate(workload):
        made.add(sequence(str(index), num_prompt, max_tokens, BATCH if is_batch else INTERACTIVE))
    made.admit()
    waiting = [item.request_id for item in made.waiting]
    expected = dict(zip(waiting, admission(made).starts_s(SPEEDS), strict=True))
    assert play(made, SPEEDS) == pytest.approx(expected)


# -- giving up ----------------------------------------------------------------------------------------------


def test_patience_ends_in_the_queue_only_and_says_for_what_it_waited() -> None:
    made = scheduler(num_slots=1)
    for name in ("runs", "patient"):
        made.add(sequence(name))
    made.add(sequence("hasty", urgency=Urgency(max_queue_s=2)))
    made.admit()
    limits = admission(made, max_queue_s=10)
    assert list(limits.past_patience(1.9, SPEEDS)) == []
    [(late, error)] = limits.past_patience(2.0, Speeds(0.1, 0.0))
    assert (late.request_id, error.code, error.status) == ("hasty", "queue_timeout", 429)
    assert "2000 ms" in error.message
    # One runs, and the patient one goes first: 100 tokens each.
    assert error.retry_after_s == pytest.approx(20)
    late_names = [item.request_id for item, _ in limits.past_patience(10.0, SPEEDS)]
    assert late_names == ["patient", "hasty"]


def test_a_deadline_holds_everywhere() -> None:
    made = scheduler(num_slots=2)
    soon = Urgency(deadline_s=5)
    for name in ("decodes", "prefills"):
        made.add(sequence(name, 40, urgency=soon))
    made.admit()
    made.add(sequence("waits", 40, urgency=soon))
    made.add(sequence("free"))
    decodes = made.running[0]
    decodes.num_computed_tokens = 40
    made.append_token(decodes, 7)
    limits = admission(made)
    assert list(limits.past_deadline(4.9)) == []
    found = {item.request_id: error for item, error in limits.past_deadline(5.0)}
    assert set(found) == {"decodes", "prefills", "waits"}
    assert all(isinstance(error, RequestTimeoutError) for error in found.values())
    assert "after 1 tokens" in found["decodes"].message
    assert "prompt was computed" in found["prefills"].message
    assert "in the queue" in found["waits"].message


def test_impatience_and_deadlines_end_real_requests(model: Model) -> None:
    ids = model.tokenize("Once upon a time", add_special=True, parse_special=True)
    long = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    with engine_of(model, n_seq_max=1, n_ctx=512) as engine:
        results = {name: Result() for name in ("runs", "at-once", "late", "next")}
        engine.add(request("runs", ids, long, urgency=Urgency(deadline_s=1e4)))
        step(engine, results)
        engine.add(request("at-once", ids, long, urgency=Urgency(max_queue_s=0)))
        engine.add(request("late", ids, long, urgency=Urgency(deadline_s=0)))
        engine.add(request("next", ids, long))
        step(engine, results)
        assert isinstance(results["at-once"].error, QueueTimeoutError)
        assert isinstance(results["late"].error, RequestTimeoutError)
        object.__setattr__(engine.scheduler.running[0].request, "arrival_s", -1e5)
        step(engine, results)
        assert results["runs"].error.code == "deadline_exceeded"
        assert len(results["runs"].token_ids) == 2
        while engine.has_work:
            step(engine, results)
        assert results["next"].finish_reason is FinishReason.LENGTH
        free = run(engine, request("free", ids, long, urgency=Urgency(max_queue_s=0)))["free"]
        assert len(free.token_ids) == 60
        assert engine.stats().num_used_cells == engine.stats().num_cached_cells


# -- priorities ---------------------------------------------------------------------------------------------


def test_batch_waits_behind_interactive_and_ages() -> None:
    queue = WaitingQueue()
    for index in range(2):
        queue.append(sequence(f"early{index}"))
    for index in range(2):
        queue.append(sequence(f"batch{index}", urgency=BATCH))
    for index in range(20):
        queue.append(sequence(f"i{index}"))
    order = names(queue)
    assert order[:2] == ["early0", "early1"]
    assert order[2 + MAX_OVERTAKES] == "batch0"
    assert order[3 + 2 * MAX_OVERTAKES] == "batch1"
    assert [queue.pop().request_id for _ in range(len(queue))] == order
    assert not queue


def test_short_prompts_go_first_and_long_ones_age() -> None:
    queue = WaitingQueue()
    queue.append(sequence("long0", 900))
    queue.append(sequence("long1", 600))
    for index in range(20):
        queue.append(sequence(f"s{index}", 100))
    order = names(queue)
    assert order[:MAX_OVERTAKES] == [f"s{index}" for index in range(MAX_OVERTAKES)]
    assert order[MAX_OVERTAKES] == "long0"
    assert order[2 * MAX_OVERTAKES + 1] == "long1"
    assert [queue.pop().request_id for _ in range(len(queue))] == order


def test_prompts_of_about_the_same_length_keep_their_order() -> None:
    queue = WaitingQueue()
    for name, num_prompt in (("a", 120), ("b", 30), ("c", 900), ("d", 600), ("e", 300)):
        queue.append(sequence(name, num_prompt))
    assert names(queue) == ["a", "b", "e", "c", "d"]


def test_a_prompt_counts_by_what_has_to_be_computed_of_it() -> None:
    queue = WaitingQueue()
    queue.append(sequence("new", 300))
    queue.append(sequence("turn", 900), num_cached_tokens=850)
    assert names(queue) == ["turn", "new"]


def test_who_gave_up_before_its_turn_leaves_nothing_behind() -> None:
    queue = WaitingQueue()
    queue.append(sequence("short", 10))
    for index in range(1000):
        late = sequence(f"long{index}", 900)
        queue.append(late)
        queue.remove(late)
    assert names(queue) == ["short"]
    assert len(queue._interactive.by_length) < 50


def test_whoever_gives_up_changes_nobody_elses_turn() -> None:
    queue = WaitingQueue()
    batch = [sequence(f"b{index}", urgency=BATCH) for index in range(2)]
    interactive = [sequence(f"i{index}") for index in range(30)]
    for item in (*batch, *interactive):
        queue.append(item)
    for _ in range(MAX_OVERTAKES):
        queue.pop()
    assert queue.head is batch[0]
    queue.remove(batch[0])
    assert queue.head is interactive[MAX_OVERTAKES]
    queue.remove(interactive[MAX_OVERTAKES])
    assert names(queue)[MAX_OVERTAKES] == "b1"
    with pytest.raises(ValueError, match="not waiting"):
        queue.remove(batch[0])


def test_prompts_of_interactive_requests_are_computed_first() -> None:
    made = scheduler(num_slots=3)
    made.add(sequence("oldest", 300, urgency=BATCH))
    made.add(sequence("batch", 20, urgency=BATCH))
    made.admit()
    made.add(sequence("interactive", 100))
    made.admit()
    served = [made.schedule().chunks[0].sequence.request_id for _ in range(2 * OLDEST_TURN)]
    assert served == 2 * [*(OLDEST_TURN - 1) * ["interactive"], "oldest"]
