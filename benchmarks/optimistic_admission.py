"""Admission for a whole life against optimistic admission with preemption, simulated.

    python benchmarks/optimistic_admission.py [-c 4096] [-np 8] [--cap 512] [--prompt 300] [--requests 400]
        [--decode-ms 13] [--each-ms 4] [--prefill-tok-s 250] [--load 0.9]

Whole life is what the engine does: cells for a prompt and its output cap are set aside, or the request
waits. Optimistic: a request is admitted when its prompt fits beside the tokens that are there now; when the
next step would not fit, the newest sequence is taken out, waits at the head of the queue and is computed
again, its prompt and its answer so far. Both run the real scheduler, queue and step costs over a step model,
with unified cells, no prefix cache, and the same Poisson arrivals, at a share of the rate that whole-life
admission serves when everybody is there at once. One row for each share of their cap that answers use on
average.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass, field
from itertools import pairwise

from edgeserve.bench.step_model import StepModel, from_figures
from edgeserve.engine.kv_cache import KVCache
from edgeserve.engine.request import FinishReason, Request, Sequence, SequenceStatus
from edgeserve.engine.sampling_params import SamplingParams
from edgeserve.engine.scheduler import Scheduler
from edgeserve.engine.step_cost import StepCost
from edgeserve.engine.waiting_queue import WaitingQueue
from edgeserve.metrics import percentile


class WholeLife(KVCache):
    """The engine's own rule; cells of ended sequences are free at once, since nobody shares a prefix here."""

    def release(self, sequence: Sequence) -> None:
        self.slots[sequence.seq_id].token_ids = []
        super().release(sequence)


class Optimistic(WholeLife):
    """A newcomer needs room for its prompt, and one more token for everybody."""

    def num_missing_cells(self, sequence: Sequence) -> int:
        there = sum(slot.sequence.num_tokens + 1 for slot in self.slots if slot.sequence)
        return max(0, there + sequence.num_tokens + 1 - self.n_ctx)


class Queue(WaitingQueue):
    def put_back(self, sequence: Sequence) -> None:
        self._interactive.appendleft((-1, sequence))


@dataclass(frozen=True)
class Job:
    at_s: float
    num_output: int


@dataclass(eq=False)
class Run:
    """One simulated run of one policy."""

    cache: KVCache
    model: StepModel
    cap: int
    num_prompt: int
    now_s: float = 0.0
    num_preempted: int = 0
    num_recomputed: int = 0
    ttft_s: list[float] = field(default_factory=list)
    longest_gap_s: list[float] = field(default_factory=list)
    stamps_s: dict[str, list[float]] = field(default_factory=dict)

    def play(self, jobs: list[Job]) -> None:
        self.cost = StepCost()
        self.scheduler = Scheduler(self.cache, 2048, self.cost)
        self.scheduler.waiting = Queue()
        self.jobs = {str(index): job for index, job in enumerate(jobs)}
        upcoming = list(reversed(self.jobs.items()))
        while upcoming or self.scheduler.has_work:
            if not self.scheduler.has_work:
                self.now_s = max(self.now_s, upcoming[-1][1].at_s)
            while upcoming and upcoming[-1][1].at_s <= self.now_s:
                self._arrive(*upcoming.pop())
            self._step()

    def _arrive(self, name: str, job: Job) -> None:
        request = Request(name, (1,) * self.num_prompt, SamplingParams(), job.at_s, cache_prompt=False)
        self.stamps_s[name] = []
        self.scheduler.add(Sequence(request, self.cap))

    def _step(self) -> None:
        while sum(item.num_tokens for item in self.scheduler.running) > self.cache.n_ctx:
            self._preempt(self.scheduler.running[-1])
        self.scheduler.admit()
        decision = self.scheduler.schedule()
        depths = [chunk.first_pos for chunk in decision.decodes]
        prompts = [(chunk.num_tokens, chunk.first_pos) for chunk in decision.chunks if not chunk.is_decode]
        seconds = self.model.step_s(depths, prompts)
        self.now_s += seconds
        self.cost.observe(decision.num_decode_tokens, decision.num_prefill_tokens, seconds)
        for chunk in decision.chunks:
            self.scheduler.computed(chunk)
            if chunk.samples:
                self.scheduler.append_token(chunk.sequence, 2)
                self._token(chunk.sequence)

    def _token(self, sequence: Sequence) -> None:
        stamps, job = self.stamps_s[sequence.request_id], self.jobs[sequence.request_id]
        stamps.append(self.now_s)
        if sequence.num_output_tokens >= job.num_output:
            self.scheduler.finish(sequence, FinishReason.STOP)
            self.ttft_s.append(stamps[0] - job.at_s)
            self.longest_gap_s.append(max((b - a for a, b in pairwise(stamps)), default=0.0))

    def _preempt(self, sequence: Sequence) -> None:
        self.num_preempted += 1
        self.num_recomputed += sequence.num_computed_tokens
        self.scheduler.running.remove(sequence)
        self.cache.release(sequence)
        sequence.num_computed_tokens = 0
        sequence.status = SequenceStatus.WAITING
        self.scheduler.waiting.put_back(sequence)


def jobs_of(arguments: argparse.Namespace, share: float, rate_per_s: float | None) -> list[Job]:
    """Lengths around the share, up to the cap; without a rate all are there at the start."""
    rng = random.Random(arguments.seed)
    at_s, jobs = 0.0, []
    for _ in range(arguments.requests):
        at_s += rng.expovariate(rate_per_s) if rate_per_s else 0.0
        length = round(arguments.cap * share * (1 if share == 1 else rng.uniform(0.2, 1.8)))
        jobs.append(Job(at_s, max(1, min(arguments.cap, length))))
    return jobs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("-c", "--pool", type=int, default=4096)
    parser.add_argument("-np", "--parallel", type=int, default=8)
    parser.add_argument("--cap", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=300)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--decode-ms", type=float, default=13)
    parser.add_argument("--each-ms", type=float, default=4)
    parser.add_argument("--prefill-tok-s", type=float, default=250)
    parser.add_argument("--load", type=float, default=0.9)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    model = from_figures(arguments.decode_ms, arguments.prefill_tok_s, arguments.each_ms, 0.0)

    def run(kind: type[KVCache], jobs: list[Job]) -> Run:
        cache = kind(arguments.parallel, arguments.pool, arguments.pool, unified=True)
        made = Run(cache, model, arguments.cap, arguments.prompt)
        made.play(jobs)
        return made

    print(
        f"{'cap used':>8} {'admission':>11} {'out tok/s':>9} {'TTFT p50':>9} {'p95':>7} {'gap p95':>8}"
        f" {'longest':>8} {'preempted':>9} {'recomputed':>10}"
    )
    for share in (1.0, 0.5, 0.25, 0.1):
        all_at_once = run(WholeLife, jobs_of(arguments, share, None))
        rate_per_s = arguments.load * arguments.requests / all_at_once.now_s
        for kind in (WholeLife, Optimistic):
            jobs = jobs_of(arguments, share, rate_per_s)
            made = run(kind, jobs)
            speed = sum(job.num_output for job in jobs) / made.now_s
            print(
                f"{share:>8.0%} {kind.__name__:>11} {speed:>9.1f}"
                f" {percentile(made.ttft_s, 50):>8.2f}s {percentile(made.ttft_s, 95):>6.1f}s"
                f" {percentile(made.longest_gap_s, 95):>7.2f}s {max(made.longest_gap_s):>7.2f}s"
                f" {made.num_preempted:>9} {made.num_recomputed:>10}"
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
