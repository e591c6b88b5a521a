"""Who runs a step: golden examples, and properties over random workloads with a runner that computes
nothing."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeserve.engine.kv_cache import KVCache
from edgeserve.engine.request import FinishReason, Request, Sequence
from edgeserve.engine.sampling_params import SamplingParams
from edgeserve.engine.scheduler import OLDEST_TURN, FixedChunk, Scheduler, SchedulerOutput
from edgeserve.engine.step_cost import StepCost


def sequence(name: str, num_prompt: int, max_tokens: int = 4, first_token: int = 1) -> Sequence:
    request = Request(name, (first_token,) * num_prompt, SamplingParams(), 0.0, cache_prompt=False)
    return Sequence(request, max_tokens)


def scheduler(
    num_slots: int = 4, n_ctx_seq: int = 1000, budget: int = 512, chunk: int = 32, unified: bool = False
) -> Scheduler:
    n_ctx = n_ctx_seq if unified else n_ctx_seq * num_slots
    return Scheduler(KVCache(num_slots, n_ctx, n_ctx_seq, unified), budget, FixedChunk(chunk))


def run_step(made: Scheduler) -> SchedulerOutput:
    """One step with a runner that samples token 7 and ends a sequence at its cap."""
    made.admit()
    decision = made.schedule()
    for chunk in decision.chunks:
        samples = chunk.samples
        made.computed(chunk)
        if samples:
            made.append_token(chunk.sequence, 7)
        if chunk.sequence.num_output_tokens >= chunk.sequence.max_tokens:
            made.finish(chunk.sequence, FinishReason.LENGTH)
    return decision


def test_e8_decode_first_and_the_prompt_by_chunks() -> None:
    """spec: decode (T 101, C 100) and prompt (12, 0), budget 5, chunk 4 -> 1 and 4; alone 0 -> 4 -> 8 ->
    12."""
    made = scheduler(num_slots=2, budget=128, chunk=128)
    decoding = sequence("decode", 100)
    made.add(decoding)
    run_step(made)
    assert (decoding.num_tokens, decoding.num_computed_tokens) == (101, 100)
    made._token_budget, made._chunk_policy = 5, FixedChunk(4)
    prompt = sequence("prompt", 12)
    made.add(prompt)
    made.admit()
    decision = made.schedule()
    assert [(chunk.sequence.request_id, chunk.num_tokens) for chunk in decision.chunks] == [
        ("decode", 1),
        ("prompt", 4),
    ]
    made.computed(decision.chunks[1])
    assert prompt.num_uncomputed_tokens == 8
    made.remove(decoding)
    steps = [prompt.num_computed_tokens]
    while prompt.is_prefilling:
        run_step(made)
        steps.append(prompt.num_computed_tokens)
    assert steps == [4, 8, 12]


def test_a_short_newcomer_is_not_starved_behind_a_huge_prompt() -> None:
    made = scheduler(n_ctx_seq=20_000)
    huge, short = sequence("huge", 10_000), sequence("short", 40)
    made.add(huge)
    run_step(made)
    made.add(short)
    steps = 0
    while short.num_output_tokens == 0:
        run_step(made)
        steps += 1
    assert steps <= 3


def test_a_stream_of_short_prompts_does_not_starve_a_huge_one() -> None:
    made = scheduler(n_ctx_seq=4000)
    huge = sequence("huge", 800)
    made.add(huge)
    made.admit()
    steps = 0
    while huge.num_output_tokens == 0:
        made.add(sequence(f"s{steps}", 30, max_tokens=1))
        run_step(made)
        steps += 1
    assert steps <= 800 / (32 // 4) + 1


def test_decodes_do_not_starve_a_prompt_however_many_they_are() -> None:
    made = scheduler(num_slots=9, budget=16)
    for index in range(8):
        made.add(sequence(f"d{index}", 1, max_tokens=500))
    for _ in range(3):
        run_step(made)
    late = sequence("late", 60)
    made.add(late)
    for _ in range(10):
        before = late.num_computed_tokens
        decision = run_step(made)
        assert decision.num_decode_tokens >= 8
        if late.num_output_tokens:
            return
        assert late.num_computed_tokens > before
    pytest.fail("the prompt was not computed")


def test_what_a_waiting_sequence_waits_for_is_said() -> None:
    made = scheduler(num_slots=2, n_ctx_seq=100, unified=True)
    made.add(sequence("a", 60, max_tokens=20))
    made.add(sequence("b", 40, max_tokens=10))
    made.admit()
    assert made.waits_for(made.waiting.head) == "30 KV cells"
    made = scheduler(num_slots=1)
    made.add(sequence("a", 5))
    made.add(sequence("b", 5))
    made.admit()
    assert made.waits_for(made.waiting.head) == "a free sequence"


@dataclass
class Machine:
    """A machine whose step costs are known, in milliseconds; slower beside a bigger context, a bit noisy."""

    decode_ms: float
    token_ms: float
    noise: list[float] = field(default_factory=lambda: [1.0])

    def step_s(self, decision: SchedulerOutput, index: int) -> float:
        decodes, prefill = decision.num_decode_tokens, decision.num_prefill_tokens
        cost = (self.decode_ms * (1 + 0.3 * (decodes - 1)) if decodes else 0) + self.token_ms * prefill
        return cost * self.noise[index % len(self.noise)] / 1e3


workloads = st.lists(
    st.tuples(st.integers(1, 600), st.integers(1, 40), st.integers(0, 30)), min_size=1, max_size=25
)


@settings(max_examples=60, deadline=None)
@given(workloads, st.floats(2, 60), st.floats(0.2, 6), st.integers(1, 6), st.booleans())
def test_over_random_workloads_everything_holds(
    workload: list[tuple[int, int, int]], decode_ms: float, token_ms: float, num_slots: int, unified: bool
) -> None:
    """Every request ends with its tokens, steps keep their budget, prompts advance in every step that has
    them and the oldest when it is its turn, cells never overflow, and once costs are learned no step with
    decodes is planned beyond the target."""
    cost = StepCost()
    n_ctx_seq = 700
    n_ctx = n_ctx_seq + 200 if unified else n_ctx_seq * num_slots
    made = Scheduler(KVCache(num_slots, n_ctx, n_ctx_seq, unified), 256, cost)
    machine = Machine(decode_ms, token_ms)
    arrivals = defaultdict(list)
    for index, (num_prompt, max_tokens, at) in enumerate(workload):
        arrivals[at].append(
            sequence(f"r{index}", num_prompt, min(max_tokens, n_ctx_seq - num_prompt), index + 1)
        )
    everyone = [item for items in arrivals.values() for item in items]
    waited: Counter[Sequence] = Counter()
    now = num_steps = 0
    while now <= max(arrivals) or made.has_work:
        for item in arrivals.get(now, ()):
            made.add(item)
        now += 1
        made.admit()
        prefilling = [item for item in made.running if item.is_prefilling]
        decision = run_step(made)
        if not decision.chunks:
            continue
        num_steps += 1
        assert sum(chunk.num_tokens for chunk in decision.chunks) <= 256
        assert all(chunk.num_tokens > 0 for chunk in decision.chunks)
        assert made.kv_cache.num_used_cells <= n_ctx
        if prefilling:
            assert decision.num_prefill_tokens > 0
            waited[prefilling[0]] += 1
            for chunk in decision.chunks:
                waited[chunk.sequence] = 0
            assert waited[prefilling[0]] < OLDEST_TURN
        duration = machine.step_s(decision, num_steps)
        cost.observe(decision.num_decode_tokens, decision.num_prefill_tokens, duration)
        assert num_steps < 20_000
    assert all(item.is_finished and item.num_output_tokens == item.max_tokens for item in everyone)
    assert not made.kv_cache.num_reserved_cells


@settings(max_examples=40, deadline=None)
@given(
    st.floats(2, 30),
    st.floats(0.5, 5),
    st.lists(st.floats(0.8, 1.25), min_size=5, max_size=11),
    st.integers(1, 4),
)
def test_a_steady_machine_keeps_the_gap_target(
    decode_ms: float, token_ms: float, noise: list[float], num_decodes: int
) -> None:
    """Streams decode while long prompts come in, on a machine whose noise is within a quarter: of the steps
    after the first few 95 % are within 1.5 times the target, unless the floor alone is beyond it. Single ones
    may miss by more: a size tried in the fastest moments (0.8) and used in the slowest (1.25), beside decodes
    that were the other way round."""
    cost = StepCost()
    made = Scheduler(KVCache(num_decodes + 1, 10_000 * (num_decodes + 1), 10_000, False), 2048, cost)
    machine = Machine(decode_ms, token_ms, noise)
    for index in range(num_decodes):
        made.add(sequence(f"d{index}", 8, max_tokens=3000))
    steps = []
    for index in range(250):
        if index in (20, 150):
            made.add(sequence(f"p{index}", 1500, max_tokens=1))
        decision = run_step(made)
        duration = machine.step_s(decision, index)
        cost.observe(decision.num_decode_tokens, decision.num_prefill_tokens, duration)
        if index > 30 and decision.num_decode_tokens == num_decodes and decision.num_prefill_tokens > 8:
            steps.append(duration)
    steps.sort()
    assert not steps or steps[int(0.95 * (len(steps) - 1))] <= 1.5 * cost.target_s
    assert all(duration <= 2.2 * cost.target_s for duration in steps)
