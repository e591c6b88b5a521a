"""The context alone, without scheduler, sampling or HTTP: prompts of several sequences, then their decodes.

Owns the measured loop, which is that of llama.cpp's llama-batched-bench, so that the two can be compared line
by line: random tokens, one row of logits a sequence, nothing drawn from them. Knows nothing of tables.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from edgeserve.errors import EngineError
from edgeserve.llama_context import Batch, Context

_WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Point:
    """`pl` sequences with prompts of `pp` tokens and `tg` decode steps each; `is_shared`: one prompt for
    all."""

    pp: int
    tg: int
    pl: int
    is_shared: bool = False

    @property
    def num_prefill(self) -> int:
        return self.pp if self.is_shared else self.pp * self.pl

    def fits(self, n_ctx: int, n_ctx_seq: int, n_seq_max: int) -> bool:
        """Whether a context has room for it: the pool for all, a sequence's part for each."""
        needed = self.num_prefill + self.pl * self.tg
        return self.pl <= n_seq_max and needed <= n_ctx and self.pp + self.tg <= n_ctx_seq


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds for all prompts, and for all decode steps, of one run of a point."""

    point: Point
    t_pp_s: float
    t_tg_s: float


class BatchedBench:
    """Runs points on one context. `n_batch` bounds a step, as it does for the engine."""

    def __init__(self, context: Context, n_batch: int, seed: int = 0) -> None:
        self._context = context
        self._batch = Batch(n_batch)
        self._rng = random.Random(seed)

    def warm_up(self) -> None:
        """A few decodes: the weights come off the disk, and clocks rise."""
        self._context.clear()
        for position in range(_WARM_UP_TOKENS):
            self._run([(0, position)])
        self._context.clear()

    def rows(self, points: Sequence[Point], repeats: int) -> Iterator[Timing]:
        """Every point `repeats` times, the whole list in turns: a machine that warms up slows all alike."""
        for _ in range(repeats):
            for point in points:
                yield self.measure(point)

    def measure(self, point: Point) -> Timing:
        self._context.clear()
        start_s = time.perf_counter()
        for seq_id in range(1 if point.is_shared else point.pl):
            self._prompt(seq_id, point.pp)
        self._flush()
        prompt_s = time.perf_counter()
        if point.is_shared:
            for seq_id in range(1, point.pl):
                self._context.share_prefix(0, seq_id)
        decode_start_s = time.perf_counter()
        for step in range(point.tg):
            self._run([(seq_id, point.pp + step) for seq_id in range(point.pl)])
        return Timing(point, prompt_s - start_s, time.perf_counter() - decode_start_s)

    def _prompt(self, seq_id: int, num_tokens: int) -> None:
        """Into the batch, which runs whenever it is full: sequences share steps, as in the original."""
        position = 0
        while position < num_tokens:
            size = min(num_tokens - position, self._batch.capacity - self._batch.num_tokens)
            if not size:
                self._flush()
                continue
            is_last = position + size == num_tokens
            self._batch.add(self._tokens(size), position, seq_id, last_logits=is_last)
            position += size

    def _run(self, places: Sequence[tuple[int, int]]) -> None:
        """One token for each (sequence, position)."""
        self._batch.clear()
        for seq_id, position in places:
            self._batch.add(self._tokens(1), position, seq_id, last_logits=True)
        self._flush()

    def _flush(self) -> None:
        if not self._batch.num_tokens:
            return
        code = self._context.decode(self._batch)
        if code != 0:
            raise EngineError(f"A step of the benchmark failed with code {code}.")
        self._context.synchronize()
        self._batch.clear()

    def _tokens(self, count: int) -> list[int]:
        return self._rng.choices(range(self._context.model.n_vocab), k=count)
