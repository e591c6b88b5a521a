"""The real scheduler, cache and step costs over a step model: what a machine would do with N users.

Owns the virtual clock and the loop, which goes through the same steps as engine.py without a runtime. What
comes out are records, as a benchmark has them, so that figures, tables and comparisons are the same. Not in
it: HTTP, tokenizing and sampling, which a step model can only hold as a constant.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from edgeserve.bench.runner import Outcome, Record
from edgeserve.bench.step_model import StepModel
from edgeserve.bench.workload import Planned
from edgeserve.engine.admission import Admission, Speeds
from edgeserve.engine.kv_cache import KVCache
from edgeserve.engine.request import FinishReason, Request, Sequence
from edgeserve.engine.sampling_params import SamplingParams
from edgeserve.engine.scheduler import Chunk, FixedChunk, Scheduler, SchedulerOutput
from edgeserve.engine.step_cost import StepCost
from edgeserve.errors import QueueFullError, UsageError
from edgeserve.stream_events import Usage

# Token ids of different requests must differ, and those of a shared prefix must not.
_IDS_PER_REQUEST = 10_000_000
_ANY_TOKEN = 1
# A run that makes no progress would be a bug of ours; the bound only keeps it from lasting for ever.
_MAX_STEPS = 5_000_000


@dataclass(frozen=True, slots=True)
class Machine:
    """The engine's settings, as EngineConfig names them. `n_ctx` 0 gives each sequence 4,096 tokens."""

    n_seq_max: int = 4
    n_ctx: int = 0
    n_batch: int = 2048
    kv_unified: bool = False
    itl_target_ms: float = 0.0
    prefill_chunk: int = 0
    max_waiting: int = 64
    max_queue_s: float = 600.0
    overhead_s: float = 0.0

    def __post_init__(self) -> None:
        if self.n_seq_max < 1 or self.n_batch < 1 or self.n_ctx < 0 or self.overhead_s < 0:
            raise UsageError("Sequences and batch must be at least 1, context and overhead not negative.")

    @property
    def pool(self) -> int:
        return self.n_ctx or 4096 * self.n_seq_max

    @property
    def n_ctx_seq(self) -> int:
        return self.pool if self.kv_unified else self.pool // self.n_seq_max

    def scheduler(self, step_cost: StepCost) -> Scheduler:
        cache = KVCache(self.n_seq_max, self.pool, self.n_ctx_seq, self.kv_unified)
        policy = FixedChunk(self.prefill_chunk) if self.prefill_chunk else step_cost
        return Scheduler(cache, self.n_batch, policy)


@dataclass(eq=False, slots=True)
class _Flight:
    """A request on its way: its plan and the stamps of its tokens."""

    planned: Planned
    sequence: Sequence
    sent_s: float
    stamps_s: list[float] = field(default_factory=list)


class Simulation:
    """One run. `records` are complete when `open_loop` or `closed_loop` returns."""

    def __init__(self, machine: Machine, model: StepModel) -> None:
        self.records: list[Record] = []
        self.now_s = 0.0
        self.busy_s = 0.0
        self.num_steps = 0
        self._machine = machine
        self._model = model
        self._step_cost = StepCost(machine.itl_target_ms / 1e3)
        self._scheduler = machine.scheduler(self._step_cost)
        self._admission = Admission(self._scheduler, machine.max_waiting, 0, machine.max_queue_s)
        self._flights: dict[str, _Flight] = {}
        self._arrivals: list[tuple[float, int, Planned]] = []
        self._backlog: list[Planned] = []

    def open_loop(self, planned: Seq[Planned]) -> None:
        """Each request at its `at_s`, whatever became of the earlier ones, until all have ended."""
        for plan in planned:
            self._arrive(plan, plan.at_s or 0.0)
        self._run()

    def closed_loop(self, planned: Seq[Planned], num_users: int) -> None:
        """Each user's next request as soon as the last one has ended."""
        self._backlog = list(reversed(planned))
        for _ in range(min(num_users, len(planned))):
            self._arrive(self._backlog.pop(), self.now_s)
        self._run()

    # -- arrivals -------------------------------------------------------------------------------------------

    def _arrive(self, planned: Planned, at_s: float) -> None:
        heapq.heappush(self._arrivals, (at_s, planned.index, planned))

    def _take_arrivals(self) -> None:
        while self._arrivals and self._arrivals[0][0] <= self.now_s:
            at_s, _, planned = heapq.heappop(self._arrivals)
            self._add(planned, at_s)

    def _add(self, planned: Planned, at_s: float) -> None:
        flight = _Flight(planned, _sequence(planned, at_s), at_s)
        if planned.num_prompt_tokens + planned.max_tokens > self._machine.n_ctx_seq:
            return self._end(flight, Outcome.ERROR, code="context_length_exceeded")
        try:
            self._admission.check(flight.sequence, Speeds())
        except QueueFullError as error:
            return self._end(flight, Outcome.REJECTED, code=error.code)
        self._flights[flight.sequence.request_id] = flight
        return self._scheduler.add(flight.sequence)

    # -- steps ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while self.num_steps < _MAX_STEPS:
            self._take_arrivals()
            if self._scheduler.has_work:
                self._step()
            elif self._arrivals:
                self.now_s = self._arrivals[0][0]
            else:
                return
        raise AssertionError("a simulation must come to its end")

    def _step(self) -> None:
        self._scheduler.admit()
        self._expire()
        decision = self._scheduler.schedule()
        if not decision.chunks:
            return
        duration_s = self._duration_s(decision)
        self.now_s += duration_s
        self.busy_s += duration_s
        self.num_steps += 1
        self._step_cost.observe(decision.num_decode_tokens, decision.num_prefill_tokens, duration_s)
        for chunk in decision.chunks:
            self._update(chunk)

    def _duration_s(self, decision: SchedulerOutput) -> float:
        depths = [chunk.first_pos for chunk in decision.decodes]
        prefills = [(chunk.num_tokens, chunk.first_pos) for chunk in decision.chunks if not chunk.is_decode]
        return self._model.step_s(depths, prefills) + self._machine.overhead_s

    def _expire(self) -> None:
        for sequence, error in tuple(self._admission.past_patience(self.now_s, Speeds())):
            self._scheduler.finish(sequence, FinishReason.ERROR)
            self._end(self._flights.pop(sequence.request_id), Outcome.REJECTED, code=error.code)

    def _update(self, chunk: Chunk) -> None:
        sequence = chunk.sequence
        self._scheduler.computed(chunk)
        if not chunk.samples:
            return
        flight = self._flights[sequence.request_id]
        flight.stamps_s.append(self.now_s)
        self._scheduler.append_token(sequence, _ANY_TOKEN)
        if sequence.num_output_tokens >= sequence.max_tokens:
            self._scheduler.finish(sequence, FinishReason.LENGTH)
            self._end(self._flights.pop(sequence.request_id), Outcome.OK)

    def _end(self, flight: _Flight, outcome: Outcome, code: str | None = None) -> None:
        planned, sequence = flight.planned, flight.sequence
        is_ok = outcome is Outcome.OK
        usage = Usage(sequence.num_prompt_tokens, len(flight.stamps_s), sequence.num_cached_tokens)
        self.records.append(
            Record(
                index=planned.index,
                label=planned.label,
                max_tokens=planned.max_tokens,
                num_planned_prompt_tokens=planned.num_prompt_tokens,
                scheduled_s=planned.at_s,
                sent_s=flight.sent_s,
                end_s=self.now_s,
                outcome=outcome,
                stamps_s=tuple(flight.stamps_s),
                finish_reason="length" if is_ok else None,
                usage=usage if is_ok else None,
                code=code,
            )
        )
        if self._backlog:
            self._arrive(self._backlog.pop(), self.now_s)


def _sequence(planned: Planned, at_s: float) -> Sequence:
    """Ids of its own after the shared prefix, so that only that is found in the cache."""
    shared = range(planned.shared_prefix_tokens)
    start = (planned.index + 1) * _IDS_PER_REQUEST
    own = range(start, start + planned.num_prompt_tokens - planned.shared_prefix_tokens)
    sampling = SamplingParams(max_tokens=planned.max_tokens)
    request = Request(str(planned.index), (*shared, *own), sampling, at_s)
    return Sequence(request, planned.max_tokens)
