"""Which tokens are resident for which slot; prefix reuse, eviction and reservation.

Owns the bookkeeping only: it decides, and the model runner carries out. Knows nothing of llama.cpp, time or
text.

What to give up is decided as by GreedyDual: a slot is worth its tokens, and the cache's age rises to the
worth of what it last gave up, so that a long prefix outlives a few short ones, but not for ever.

A slot is a `seq_id` of the context. With split cells every slot has `n_ctx_seq` cells of its own; with
unified cells all slots draw on one pool of `n_ctx`, so that idle tokens may have to be evicted for a
newcomer.

There idle tokens also make others slower: each decode looks over all used cells. They stay until that has
cost about as much as computing them again would; whatever comes then, that is at most twice the best that
could have been done.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from edgeserve.engine.request import Sequence
from edgeserve.engine.saved_prefix import (
    MIN_SHARED_TOKENS,
    Checkpoint,
    Found,
    SavedPrefix,
    common_prefix_length,
    usable,
)

APART_TOKENS = 256
"""What a slot away from the running ones costs, in prompt tokens: with split cells llama.cpp takes only
neighbours into one pass over the weights, so that every step of an answer needs a pass more."""


CARRY_TOKENS, CARRY_TOKENS_FLASH = 1_500, 20_000
"""So many decoded tokens beside a cached token in the same pool cost about as much as computing it, without
flash attention and with it. Measured (SmolLM2-135M, two busy AMD Zen 4 cores, 3,500 idle tokens): without,
2.6 to 3.9 us for each token decoded beside one and 3.8 to 7.4 ms for one in a prompt. With flash attention
the difference was within the noise of 0.3 us."""


@dataclass(slots=True, eq=False)
class Slot:
    """One seq_id, the tokens whose KV it holds, and who is using it."""

    seq_id: int
    token_ids: list[int] = field(default_factory=list)
    namespace: str = ""
    checkpoints: list[Checkpoint] = field(default_factory=list)
    """Where its state can be brought back to when it cannot be cut, shortest first."""
    sequence: Sequence | None = None
    priority: float = 0.0
    """What the cache would lose with it: its tokens, on top of the cache's age when it was last used."""
    idle_since: int = 0
    """The tokens that all slots together had decoded when it became idle."""

    @property
    def is_idle(self) -> bool:
        return self.sequence is None


@dataclass(frozen=True, slots=True)
class Resident:
    """What a slot held when it was decided to give it up; it holds it until the decision is carried out."""

    seq_id: int
    namespace: str
    token_ids: list[int]
    checkpoints: tuple[Checkpoint, ...]

    @classmethod
    def of(cls, slot: Slot) -> Resident:
        return cls(slot.seq_id, slot.namespace, slot.token_ids, tuple(slot.checkpoints))


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a waiting sequence can go: the slot, how many leading tokens it will find resident there, the
    slots to empty first, and where to take the prefix from when it is not in the slot: another one, or
    outside the context. `lost` is what the cache loses by it and might want to save before."""

    slot: Slot
    num_cached_tokens: int
    evict: tuple[Slot, ...] = ()
    source: Slot | None = None
    saved: SavedPrefix | None = None
    lost: tuple[Resident, ...] = ()


class PrefixLibrary(Protocol):
    """Prefixes outside the context."""

    def find(self, sequence: Sequence) -> Found | None: ...


class KVCache:
    """The slots of one context and the room in them."""

    def __init__(
        self,
        num_slots: int,
        n_ctx: int,
        n_ctx_seq: int,
        unified: bool,
        can_cut: Callable[[int, int], bool] | None = None,
        library: PrefixLibrary | None = None,
        carry_tokens: int = CARRY_TOKENS,
    ) -> None:
        """`can_cut(seq_id, num_tokens)` says whether a slot can be cut back to so many tokens, as recurrent
        state and moving windows cannot; None where all can. `carry_tokens`: how many decoded tokens idle ones
        may slow down before they are given up."""
        self.slots = tuple(Slot(seq_id) for seq_id in range(num_slots))
        self.n_ctx = n_ctx
        self.n_ctx_seq = n_ctx_seq
        self.unified = unified
        self._can_cut = can_cut
        self._library = library
        self._carry_tokens = carry_tokens
        self._age = 0.0
        self.num_evicted_tokens = 0
        """Cached tokens given up for others so far."""
        self._num_decoded = 0

    @property
    def num_used_cells(self) -> int:
        return sum(len(slot.token_ids) for slot in self.slots)

    @property
    def num_cached_cells(self) -> int:
        """Cells that idle slots keep for reuse."""
        return sum(len(slot.token_ids) for slot in self.slots if slot.is_idle)

    @property
    def num_reserved_cells(self) -> int:
        """Cells that running sequences hold or may still come to need."""
        return sum(slot.sequence.max_num_tokens for slot in self.slots if slot.sequence)

    def num_missing_cells(self, sequence: Sequence) -> int:
        """Cells that a waiting sequence still lacks: 0 when running sequences leave it room for its whole
        life."""
        if not self.unified:
            return 0
        return max(0, self.num_reserved_cells + sequence.max_num_tokens - self.n_ctx)

    def num_resident_tokens(self, sequence: Sequence) -> int:
        """How many leading tokens of a prompt some slot holds now, for an estimate of the work it is."""
        return max(self.reusable_tokens(slot, sequence) for slot in self.slots)

    def place(self, sequence: Sequence) -> Placement | None:
        """The idle slot that costs the cache least, counting what of the prompt is resident there or can be
        taken over from any other slot, idle or running. None when the sequence must wait."""
        idle = [slot for slot in self.slots if slot.is_idle]
        if not idle or self.num_missing_cells(sequence):
            return None
        cached = {slot.seq_id: self.reusable_tokens(slot, sequence) for slot in self.slots}
        source = max(self.slots, key=lambda slot: cached[slot.seq_id])
        shared = cached[source.seq_id]
        found = self._library.find(sequence) if self._library else None
        if found and found.num_tokens < shared + MIN_SHARED_TOKENS:
            found = None
        best = found.num_tokens if found else shared
        slot = min(idle, key=lambda slot: self._cost(slot, cached[slot.seq_id], best))
        own = cached[slot.seq_id]
        if best < own + MIN_SHARED_TOKENS:
            return self._placed(sequence, slot, own)
        if found:
            return self._placed(sequence, slot, best, saved=found.prefix)
        return self._placed(sequence, slot, best, source=source)

    def _placed(
        self,
        sequence: Sequence,
        slot: Slot,
        num_cached: int,
        source: Slot | None = None,
        saved: SavedPrefix | None = None,
    ) -> Placement:
        evict = self._evictions(sequence, slot, source)
        num_kept = 0 if source or saved else num_cached
        lost = [Resident.of(victim) for victim in evict]
        if _is_much(len(slot.token_ids) - num_kept, len(slot.token_ids)):
            lost.append(Resident.of(slot))
        return Placement(slot, num_cached, evict, source, saved, tuple(lost))

    def reusable_tokens(self, slot: Slot, sequence: Sequence) -> int:
        """How many leading tokens of a prompt a slot holds, as far as its state can be brought back there."""
        request = sequence.request
        if not request.cache_prompt or slot.namespace != request.cache_namespace:
            return 0
        shared = common_prefix_length(slot.token_ids, sequence.token_ids)
        # One token is always computed anew: without it there would be no logits to sample from.
        limit = min(shared, sequence.num_tokens - 1)
        if not limit or self._can_cut is None or self._can_cut(slot.seq_id, limit):
            return limit
        stops = [checkpoint.num_tokens for checkpoint in slot.checkpoints]
        return usable(shared, limit, limit + 1, stops)

    def _cost(self, slot: Slot, num_own: int, num_shared: int) -> tuple[float, float]:
        """Tokens lost to the cache, discounted by age, less tokens saved, and what being apart costs; among
        equals the oldest slot."""
        resident = len(slot.token_ids)
        value = max(0.0, slot.priority - self._age)
        lost = value * (resident - num_own) / resident if resident else 0.0
        saved = num_own if num_shared < num_own + MIN_SHARED_TOKENS else num_shared
        return lost - saved + APART_TOKENS * self._num_more_passes(slot), slot.priority

    def _num_more_passes(self, slot: Slot) -> int:
        """How many groups of neighbours more are running with this slot: -1 when it joins two."""
        if self.unified:
            return 0
        around = self.slots[max(0, slot.seq_id - 1) : slot.seq_id + 2]
        return 1 - sum(not item.is_idle for item in around)

    def _evictions(self, sequence: Sequence, target: Slot, source: Slot | None = None) -> tuple[Slot, ...]:
        if not self.unified:
            return ()
        others = [slot for slot in self.slots if slot.is_idle and slot is not target and slot.token_ids]
        kept = sum(len(slot.token_ids) for slot in others)
        excess = self.num_reserved_cells + sequence.max_num_tokens + kept - self.n_ctx
        evict: list[Slot] = []
        # The source goes last: its cells are shared with the newcomer and live on there.
        for slot in sorted(others, key=lambda slot: (slot is source, slot.priority)):
            if excess <= 0:
                break
            evict.append(slot)
            excess -= len(slot.token_ids)
        return tuple(evict)

    def acquire(self, placement: Placement, sequence: Sequence) -> None:
        """Give the slot to a sequence with the prefix that it shares; what else was in it, and in the evicted
        slots, is forgotten."""
        slot, holder = placement.slot, placement.saved or placement.source or placement.slot
        # The prompt's own tokens: whoever holds them, they were compared.
        prefix = sequence.token_ids[: placement.num_cached_tokens]
        checkpoints = [item for item in holder.checkpoints if item.num_tokens <= len(prefix)]
        for victim in placement.evict:
            self._give_up(victim)
        if holder is not slot or len(slot.token_ids) > len(prefix):
            self._give_up(slot, num_kept=0 if holder is not slot else len(prefix))
        slot.token_ids = prefix
        slot.checkpoints = checkpoints
        slot.namespace = sequence.request.cache_namespace
        slot.sequence = sequence
        sequence.seq_id = slot.seq_id

    def _give_up(self, slot: Slot, num_kept: int = 0) -> None:
        if slot.token_ids:
            self._age = max(self._age, slot.priority)
        self.num_evicted_tokens += len(slot.token_ids) - num_kept
        slot.token_ids = []
        slot.checkpoints = []

    def advance(self, sequence: Sequence, num_tokens: int) -> None:
        """Record that the next `num_tokens` tokens of a sequence are now resident."""
        slot = self.slots[sequence.seq_id]
        start = len(slot.token_ids)
        slot.token_ids.extend(sequence.token_ids[start : start + num_tokens])
        self._num_decoded += num_tokens if sequence.is_decoding else 0

    def truncate(self, sequence: Sequence, num_tokens: int) -> None:
        """Record that only the first `num_tokens` tokens of a running sequence are resident."""
        slot = self.slots[sequence.seq_id]
        del slot.token_ids[num_tokens:]
        slot.checkpoints = [item for item in slot.checkpoints if item.num_tokens <= num_tokens]

    def release(self, sequence: Sequence) -> None:
        """The sequence is over: its slot is idle and its tokens stay as prefix cache."""
        slot = self.slots[sequence.seq_id]
        slot.sequence = None
        slot.priority = self._age + len(slot.token_ids)
        slot.idle_since = self._num_decoded

    def carried(self, part: float = 1.0) -> list[Slot]:
        """Idle slots whose tokens have cost those beside them in the pool what they are worth, or a part of
        it."""
        if not self.unified:
            return []
        limit = self._num_decoded - part * self._carry_tokens
        return [slot for slot in self.slots if slot.is_idle and slot.token_ids and slot.idle_since <= limit]

    def drop(self, slot: Slot) -> None:
        """Give up an idle slot's tokens."""
        self._give_up(slot)


def _is_much(num_lost: int, num_resident: int) -> bool:
    """Whether losing so many tokens of a slot is worth a copy of all of them: an answer that was told
    differently in the next turn is not."""
    return num_lost >= max(MIN_SHARED_TOKENS, num_resident // 4)
