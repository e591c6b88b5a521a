"""Nobody starves: properties of the real scheduler over random workloads, with a runner that computes
nothing."""

from __future__ import annotations

from collections import defaultdict
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeserve.config import EngineConfig
from edgeserve.engine.kv_cache import KVCache
from edgeserve.engine.request import FinishReason, Priority, Request, Sequence, Urgency
from edgeserve.engine.sampling_params import SamplingParams
from edgeserve.engine.scheduler import OLDEST_TURN, FixedChunk, Scheduler, SchedulerOutput
from edgeserve.engine.step_cost import CHUNK_SIZES, StepCost
from edgeserve.engine.waiting_queue import MAX_OVERTAKES
from edgeserve.errors import UsageError

N_CTX_SEQ = 800


class Run:
    """A scheduler, step by step, and who was admitted in which order."""

    def __init__(
        self, num_slots: int, chunk: int = 32, unified: bool = False, n_ctx_seq: int = N_CTX_SEQ
    ) -> None:
        n_ctx = n_ctx_seq + 100 if unified else n_ctx_seq * num_slots
        self.scheduler = Scheduler(KVCache(num_slots, n_ctx, n_ctx_seq, unified), 512, FixedChunk(chunk))
        self.admitted: list[Sequence] = []
        self.num_steps = 0

    def add(self, name: str, num_prompt: int, max_tokens: int, priority: Priority) -> Sequence:
        ids = (len(name),) * num_prompt
        urgency = Urgency(priority)
        request = Request(name, ids, SamplingParams(), 0.0, cache_prompt=False, urgency=urgency)
        made = Sequence(request, max_tokens)
        self.scheduler.add(made)
        return made

    def step(self) -> SchedulerOutput:
        self.num_steps += 1
        self.admitted += [item for item, _ in self.scheduler.admit()]
        decision = self.scheduler.schedule()
        for chunk in decision.chunks:
            self.scheduler.computed(chunk)
            if chunk.samples:
                self.scheduler.append_token(chunk.sequence, 7)
            if chunk.sequence.num_output_tokens >= chunk.sequence.max_tokens:
                self.scheduler.finish(chunk.sequence, FinishReason.LENGTH)
        return decision


priorities = st.sampled_from(Priority)
arrivals = st.tuples(st.integers(1, 400), st.integers(1, 40), priorities, st.integers(0, 60))


@settings(max_examples=80, deadline=None)
@given(st.lists(arrivals, min_size=1, max_size=40), st.integers(1, 4), st.booleans())
def test_who_may_be_admitted_before_whom_is_bounded(
    workload: list[tuple[int, int, Priority, int]], num_slots: int, unified: bool
) -> None:
    run = Run(num_slots, unified=unified)
    by_step = defaultdict(list)
    for num_prompt, max_tokens, priority, at in workload:
        by_step[at].append((num_prompt, max_tokens, priority))
    order: list[Sequence] = []
    for at in range(61):
        for num_prompt, max_tokens, priority in by_step[at]:
            order.append(run.add(str(len(order)), num_prompt, max_tokens, priority))
        run.step()
    while run.scheduler.has_work:
        run.step()
        assert run.num_steps < 50_000
    assert len(run.admitted) == len(order) == len(workload)
    arrived = {item: index for index, item in enumerate(order)}
    for place, item in enumerate(run.admitted):
        later = [other for other in run.admitted[:place] if arrived[other] > arrived[item]]
        same = [other for other in later if _priority(other) is _priority(item)]
        num_ahead = sum(_priority(other) is _priority(item) for other in order[: arrived[item]])
        if _priority(item) is Priority.BATCH:
            assert same == []
            assert len(later) <= MAX_OVERTAKES * (num_ahead + 1)
        else:
            # A batch request whose turn it is may come between.
            assert len(later) <= (MAX_OVERTAKES + 1) * (num_ahead + 1)
            assert all(other.num_prompt_tokens < item.num_prompt_tokens for other in same)


def _priority(sequence: Sequence) -> Priority:
    return sequence.request.urgency.priority


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 4), st.integers(1, 200), st.integers(1, 60), st.integers(1, 20))
def test_a_batch_request_is_served_under_endless_interactive_load(
    num_slots: int, num_prompt: int, max_tokens: int, newcomer: int
) -> None:
    """Two interactive requests arrive in every step, for ever: more than can be served."""
    run = Run(num_slots)
    for index in range(2 * num_slots):
        run.add(f"first{index}", newcomer, newcomer, Priority.INTERACTIVE)
    batch = run.add("batch", num_prompt, max_tokens, Priority.BATCH)
    prefill_steps = OLDEST_TURN * ceil(newcomer / 32) * num_slots
    one_after_another = (MAX_OVERTAKES + 2 * num_slots + 1) * (prefill_steps + newcomer)
    own = OLDEST_TURN * ceil(num_prompt / 32) * num_slots + max_tokens
    while not batch.is_finished:
        for index in range(2):
            run.add(f"i{run.num_steps}-{index}", newcomer, newcomer, Priority.INTERACTIVE)
        run.step()
        assert run.num_steps <= one_after_another + own


@settings(max_examples=60, deadline=None)
@given(
    st.integers(600, 20_000),
    st.lists(st.integers(1, 60), min_size=1, max_size=3),
    st.integers(4, 64),
    st.integers(0, 3),
    priorities,
)
def test_short_newcomers_do_not_wait_for_a_huge_prompt(
    huge: int, shorts: list[int], chunk: int, num_decodes: int, priority: Priority
) -> None:
    """Their first tokens come as if the huge prompt took its turn among the steps and nothing else, however
    long it is."""
    run = Run(num_decodes + 4, chunk=chunk, n_ctx_seq=21_000)
    for index in range(num_decodes):
        run.add(f"d{index}", 1, 20_000, Priority.INTERACTIVE)
    run.step()
    giant = run.add("huge", huge, 1, priority)
    run.step()
    newcomers = [run.add(f"s{index}", size, 1, Priority.INTERACTIVE) for index, size in enumerate(shorts)]
    own_steps = ceil(sum(shorts) / chunk)
    before, num_steps = giant.num_computed_tokens, 0
    while not all(item.is_finished for item in newcomers):
        run.step()
        num_steps += 1
        assert num_steps <= own_steps + ceil(own_steps / (OLDEST_TURN - 1)) + 1
    turns = num_steps // OLDEST_TURN
    assert giant.num_computed_tokens >= before + turns * chunk or giant.is_finished


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(1, 80), priorities), min_size=1, max_size=25),
    st.integers(1, 8),
    st.floats(2, 60),
    st.floats(0.2, 20),
)
def test_decodes_run_in_every_step_and_never_starve_a_prompt(
    workload: list[tuple[int, int, Priority]], num_slots: int, decode_ms: float, token_ms: float
) -> None:
    """With learned step costs, on machines where not even the smallest chunk keeps the gap target too."""
    cost = StepCost()
    run = Run(num_slots)
    run.scheduler._chunk_policy = cost
    for index, (num_prompt, max_tokens, priority) in enumerate(workload):
        run.add(str(index), num_prompt, max_tokens, priority)
    while run.scheduler.has_work:
        decoding = [item for item in run.scheduler.running if item.is_decoding]
        decision = run.step()
        chunks = {chunk.sequence: chunk for chunk in decision.chunks}
        assert all(item in chunks for item in decoding)
        prompts = [chunk for chunk in decision.chunks if not chunk.is_decode]
        left = sum(chunk.num_tokens for chunk in prompts)
        if any(not chunk.samples for chunk in prompts):
            assert left >= CHUNK_SIZES[0]
        duration_ms = decode_ms * bool(decoding) + token_ms * left
        cost.observe(len(decoding), left, duration_ms / 1e3)
        assert run.num_steps < 20_000


def test_a_step_has_room_for_every_sequence() -> None:
    """Otherwise decodes alone would fill it for as long as they run."""
    assert EngineConfig("m", n_seq_max=4, n_batch=4)
    with pytest.raises(UsageError, match="-np"):
        EngineConfig("m", n_seq_max=4, n_batch=3)
