"""Who runs this step, and for how many tokens.

Owns the waiting queue, admission and the split of a step's token budget. Deciding is pure: it sees no
runtime, no clock and no text, so that the same class drives a real model, a simulation and the property
tests.

There is no prefill phase and no decode phase: every sequence has tokens that are not computed yet, and a step
computes some of them. Decodes (one such token) go first; prompts share what the step's budget leaves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from edgeserve.engine.kv_cache import KVCache, Placement
from edgeserve.engine.request import FinishReason, Sequence, SequenceStatus


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next `num_tokens` uncomputed tokens of one sequence; `samples` when its last token is among
    them."""

    sequence: Sequence
    num_tokens: int

    @property
    def first_pos(self) -> int:
        return self.sequence.num_computed_tokens

    @property
    def samples(self) -> bool:
        return self.num_tokens == self.sequence.num_uncomputed_tokens

    @property
    def token_ids(self) -> list[int]:
        return self.sequence.token_ids[self.first_pos : self.first_pos + self.num_tokens]


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step: what each sequence computes in it."""

    chunks: tuple[Chunk, ...]

    @property
    def decodes(self) -> tuple[Chunk, ...]:
        return tuple(chunk for chunk in self.chunks if chunk.sequence.is_decoding)

    @property
    def num_decode_tokens(self) -> int:
        return len(self.decodes)

    @property
    def num_prefill_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks) - self.num_decode_tokens


class Scheduler:
    """Decodes first, then prompts by chunks, then newcomers while a slot and cells are free."""

    def __init__(self, kv_cache: KVCache, token_budget: int, prefill_chunk: int) -> None:
        """`token_budget` bounds a step with nobody decoding, `prefill_chunk` the prompt tokens of a step that
        also carries decodes."""
        self.kv_cache = kv_cache
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._token_budget = token_budget
        self._prefill_chunk = prefill_chunk

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that fits: its prompt and cap are within `n_ctx_seq` (checked at the front)."""
        assert sequence.max_num_tokens <= self.kv_cache.n_ctx_seq, "the front end refuses what can never run"
        self.waiting.append(sequence)

    def admit(self) -> list[tuple[Sequence, Placement]]:
        """Move waiting sequences into free slots, first come first served."""
        admitted: list[tuple[Sequence, Placement]] = []
        while self.waiting:
            sequence = self.waiting[0]
            placement = self.kv_cache.place(sequence)
            if placement is None:
                break
            self.waiting.popleft()
            self.kv_cache.acquire(placement, sequence)
            sequence.status = SequenceStatus.PREFILL
            sequence.num_cached_tokens = sequence.num_computed_tokens = placement.num_cached_tokens
            self.running.append(sequence)
            admitted.append((sequence, placement))
        return admitted

    def waits_for(self, sequence: Sequence) -> str:
        """Why a waiting sequence waits, for whoever looks."""
        if missing := self.kv_cache.num_missing_cells(sequence):
            return f"{missing} KV cells"
        return "a free sequence"

    def schedule(self) -> SchedulerOutput:
        """Decide one step. Empty only when nothing is running."""
        decodes = [Chunk(sequence, 1) for sequence in self.running if sequence.is_decoding]
        budget = (
            min(self._prefill_chunk, self._token_budget - len(decodes)) if decodes else self._token_budget
        )
        return SchedulerOutput((*decodes, *self._prefills(budget)))

    def _prefills(self, budget: int) -> Iterable[Chunk]:
        # The shortest remaining prompt goes first, so that a short newcomer does not wait for a long one; a
        # prompt that has waited gets older, and goes before any that came later, so nobody waits for ever.
        prefilling = [sequence for sequence in self.running if sequence.is_prefilling]
        for sequence in sorted(prefilling, key=self._prefill_order):
            num_tokens = min(sequence.num_uncomputed_tokens, budget)
            if num_tokens <= 0:
                return
            budget -= num_tokens
            yield Chunk(sequence, num_tokens)

    def _prefill_order(self, sequence: Sequence) -> int:
        return sequence.num_uncomputed_tokens + self._prefill_chunk * self.running.index(sequence)

    def computed(self, chunk: Chunk) -> None:
        """Record that a chunk has run."""
        self.kv_cache.advance(chunk.sequence, chunk.num_tokens)
        chunk.sequence.num_computed_tokens += chunk.num_tokens

    def append_token(self, sequence: Sequence, token_id: int) -> None:
        """Record a sampled token: it is the one uncomputed token of a decoding sequence."""
        sequence.token_ids.append(token_id)
        sequence.status = SequenceStatus.DECODE

    def rewind(self, sequence: Sequence, num_tokens: int) -> None:
        """Record that only the first `num_tokens` tokens of a sequence are resident: the rest is computed
        again."""
        self.kv_cache.truncate(sequence, num_tokens)
        sequence.num_computed_tokens = num_tokens
        sequence.num_cached_tokens = min(sequence.num_cached_tokens, num_tokens)
        if sequence.num_uncomputed_tokens > 1:
            sequence.status = SequenceStatus.PREFILL

    def remove(self, sequence: Sequence) -> None:
        """Take a finished or aborted sequence out, wherever it is; its tokens stay resident for reuse."""
        if sequence.status is SequenceStatus.WAITING:
            self.waiting.remove(sequence)
        elif sequence in self.running:
            self.running.remove(sequence)
            self.kv_cache.release(sequence)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        self.remove(sequence)
        sequence.finish(reason)
