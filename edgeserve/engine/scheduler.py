"""Who runs this step, and for how many tokens.

Owns the waiting queue, admission and the split of a step's token budget. Deciding is pure: it sees no
runtime, no clock and no text, so that the same class drives a real model, a simulation and the property
tests.

There is no prefill phase and no decode phase: every sequence has tokens that are not computed yet, and a step
computes some of them. Decodes (one such token) go first; prompts share what the step's budget leaves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from edgeserve.engine.drafter import Drafter
from edgeserve.engine.kv_cache import KVCache, Placement
from edgeserve.engine.request import FinishReason, Priority, Sequence, SequenceStatus
from edgeserve.engine.waiting_queue import WaitingQueue

OLDEST_TURN = 4
"""In one of so many steps that carry prompts, the oldest unfinished prompt is served first."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one sequence for one step, as decided: it does not follow the sequence's
    changes."""

    sequence: Sequence
    first_pos: int
    num_tokens: int
    is_decode: bool
    samples: bool
    """Whether the sequence's last token is among them, so that the next one can be drawn."""
    draft_token_ids: tuple[int, ...] = ()
    """Guesses of what follows that last token, computed with it and kept as far as they turn out right."""

    @classmethod
    def of(cls, sequence: Sequence, num_tokens: int) -> Chunk:
        """The next `num_tokens` uncomputed tokens of a sequence."""
        return cls(
            sequence,
            first_pos=sequence.num_computed_tokens,
            num_tokens=num_tokens,
            is_decode=sequence.is_decoding,
            samples=num_tokens == sequence.num_uncomputed_tokens,
        )

    @property
    def token_ids(self) -> list[int]:
        return self.sequence.token_ids[self.first_pos : self.first_pos + self.num_tokens]

    @property
    def num_logits(self) -> int:
        """Rows of logits that it asks for."""
        return self.samples + len(self.draft_token_ids)

    @property
    def end_pos(self) -> int:
        """The position behind its tokens, where its drafts begin."""
        return self.first_pos + self.num_tokens


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step: what each sequence computes in it."""

    chunks: tuple[Chunk, ...]

    @property
    def decodes(self) -> tuple[Chunk, ...]:
        return tuple(chunk for chunk in self.chunks if chunk.is_decode)

    @property
    def num_decode_tokens(self) -> int:
        return sum(chunk.is_decode for chunk in self.chunks)

    @property
    def num_prefill_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks if not chunk.is_decode)

    @property
    def num_draft_tokens(self) -> int:
        return sum(len(chunk.draft_token_ids) for chunk in self.chunks)


class ChunkPolicy(Protocol):
    """Says how many prompt tokens a step beside so many decodes may carry, between 1 and `limit`.
    `is_crowded`: others wait for their place meanwhile."""

    def prefill_tokens(self, num_decodes: int, limit: int, *, is_crowded: bool = False) -> int: ...


@dataclass(frozen=True, slots=True)
class FixedChunk:
    """The same number of prompt tokens in every step, whatever it costs."""

    num_tokens: int

    def prefill_tokens(self, num_decodes: int, limit: int, *, is_crowded: bool = False) -> int:
        return min(self.num_tokens, limit)


class Scheduler:
    """Decodes first, then prompts by chunks, then newcomers while a slot and cells are free."""

    def __init__(
        self,
        kv_cache: KVCache,
        token_budget: int,
        chunk_policy: ChunkPolicy,
        drafter: Drafter | None = None,
    ) -> None:
        """`token_budget` is the most tokens of any step; `chunk_policy` says how many may be prompt.
        `drafter` adds drafts to steps that only decode."""
        self.kv_cache = kv_cache
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []
        self._token_budget = token_budget
        self._chunk_policy = chunk_policy
        self._drafter = drafter
        self._num_prompt_steps = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def queued(self, newest: Sequence) -> list[Sequence]:
        """The sequences that would wait if `newest` were added, without those that free slots will take at
        the next step."""
        num_free = len(self.kv_cache.slots) - len(self.running)
        if num_free and self.kv_cache.num_missing_cells(self.waiting.head if self.waiting else newest):
            num_free = 0
        return [*(self.waiting if num_free else self.waiting.by_arrival()), newest][num_free:]

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that fits: its prompt and cap are within `n_ctx_seq` (checked at the front)."""
        assert sequence.max_num_tokens <= self.kv_cache.n_ctx_seq, "the front end refuses what can never run"
        self.waiting.append(sequence, self.kv_cache.num_resident_tokens(sequence))

    def admit(self) -> list[tuple[Sequence, Placement]]:
        """Move waiting sequences into free slots, in the queue's order: who comes next is never passed by
        one that needs less, or it might wait for ever."""
        admitted: list[tuple[Sequence, Placement]] = []
        while self.waiting:
            sequence = self.waiting.head
            placement = self.kv_cache.place(sequence)
            if placement is None:
                break
            self.waiting.pop()
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
        decodes = [Chunk.of(sequence, 1) for sequence in self.running if sequence.is_decoding]
        left = self._token_budget - len(decodes)
        prefilling = [sequence for sequence in self.running if sequence.is_prefilling]
        if not prefilling:
            return SchedulerOutput(self._with_drafts(decodes, left))
        if left < 1:
            return SchedulerOutput(tuple(decodes))
        is_crowded = bool(self.waiting)
        budget = self._chunk_policy.prefill_tokens(len(decodes), left, is_crowded=is_crowded)
        self._num_prompt_steps += 1
        is_oldest_first = self._num_prompt_steps % OLDEST_TURN == 0
        return SchedulerOutput((*decodes, *_share(prefilling, budget, is_oldest_first=is_oldest_first)))

    def _with_drafts(self, decodes: list[Chunk], room: int) -> tuple[Chunk, ...]:
        """Only where no prompt waits for the step's end: it would wait for the drafts as well."""
        if self._drafter is None:
            return tuple(decodes)
        drafts = self._drafter.propose([chunk.sequence for chunk in decodes], room)
        return tuple(
            replace(chunk, draft_token_ids=drafts.get(chunk.sequence.request_id, ())) for chunk in decodes
        )

    def computed(self, chunk: Chunk) -> None:
        """Record that a chunk has run."""
        self.kv_cache.advance(chunk.sequence, chunk.num_tokens)
        chunk.sequence.num_computed_tokens += chunk.num_tokens

    def append_token(self, sequence: Sequence, token_id: int) -> None:
        """Record a sampled token: it is the one uncomputed token of a decoding sequence."""
        sequence.token_ids.append(token_id)
        sequence.status = SequenceStatus.DECODE

    def accept_draft(self, sequence: Sequence) -> None:
        """Record that a sequence's newest token was drafted rightly: it has been computed already."""
        self.kv_cache.advance(sequence, 1)
        sequence.num_computed_tokens += 1

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
        if self._drafter:
            self._drafter.forget(sequence)
        if sequence.status is SequenceStatus.WAITING:
            self.waiting.remove(sequence)
        elif sequence in self.running:
            self.running.remove(sequence)
            self.kv_cache.release(sequence)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        self.remove(sequence)
        sequence.finish(reason)


def _share(prefilling: list[Sequence], budget: int, *, is_oldest_first: bool) -> Iterable[Chunk]:
    """Divide a step's prompt tokens among prompts one after the other, as few of them as take it all: with
    split cells each further prompt of another length costs llama.cpp a further pass over the weights.

    Interactive requests come before batch ones, and among them the shortest, so that a short newcomer does
    not wait behind a long prompt; the oldest comes first when it is its turn, so that it is never starved."""
    oldest, *_ = prefilling

    def order(sequence: Sequence) -> tuple[bool, bool, int]:
        return (is_oldest_first and sequence is not oldest, *_turn(sequence))

    for sequence in sorted(prefilling, key=order):
        if budget < 1:
            return
        chunk = Chunk.of(sequence, min(budget, sequence.num_tokens_to_stop))
        budget -= chunk.num_tokens
        yield chunk


def _turn(sequence: Sequence) -> tuple[bool, int]:
    return sequence.request.urgency.priority is Priority.BATCH, sequence.num_uncomputed_tokens
