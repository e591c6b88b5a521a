"""Which tokens are resident for which slot; prefix reuse, eviction and reservation.

Owns the bookkeeping only: it decides, and the model runner carries out. Knows nothing of llama.cpp, time or
text.

What to give up is decided as by GreedyDual: a slot is worth its tokens, and the cache's age rises to the
worth of what it last gave up, so that a long prefix outlives a few short ones, but not for ever.

A slot is a `seq_id` of the context. With split cells every slot has `n_ctx_seq` cells of its own; with
unified cells all slots draw on one pool of `n_ctx`, so that idle tokens may have to be evicted for a
newcomer.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from edgeserve.engine.request import Sequence

MIN_SHARED_TOKENS = 32
"""A prefix of another slot is worth sharing from so many tokens on: with split cells it costs a copy."""


@dataclass(slots=True, eq=False)
class Slot:
    """One seq_id, the tokens whose KV it holds, and who is using it."""

    seq_id: int
    token_ids: list[int] = field(default_factory=list)
    namespace: str = ""
    sequence: Sequence | None = None
    priority: float = 0.0
    """What the cache would lose with it: its tokens, on top of the cache's age when it was last used."""

    @property
    def is_idle(self) -> bool:
        return self.sequence is None


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a waiting sequence can go: the slot, how many leading tokens it will find resident there, the
    slots to empty first, and the slot to take the prefix from when it is another one."""

    slot: Slot
    num_cached_tokens: int
    evict: tuple[Slot, ...] = ()
    source: Slot | None = None


def common_prefix_length(a: Seq[int], b: Seq[int]) -> int:
    """Number of leading tokens that two token lists share."""
    n = min(len(a), len(b))
    if n == 0 or a[0] != b[0]:
        return 0
    differ = np.flatnonzero(np.asarray(a[:n]) != np.asarray(b[:n]))
    return int(differ[0]) if differ.size else n


class KVCache:
    """The slots of one context and the room in them."""

    def __init__(
        self, num_slots: int, n_ctx: int, n_ctx_seq: int, unified: bool, can_share: bool = True
    ) -> None:
        """`can_share` False keeps a prefix to its own slot: recurrent state and moving windows cannot be
        cut."""
        self.slots = tuple(Slot(seq_id) for seq_id in range(num_slots))
        self.n_ctx = n_ctx
        self.n_ctx_seq = n_ctx_seq
        self.unified = unified
        self._can_share = can_share
        self._age = 0.0
        self.num_evicted_tokens = 0
        """Cached tokens given up for others so far."""

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

    def place(self, sequence: Sequence) -> Placement | None:
        """The idle slot that costs the cache least, counting what of the prompt is resident there or can be
        taken over from any other slot, idle or running. None when the sequence must wait."""
        idle = [slot for slot in self.slots if slot.is_idle]
        if not idle or self.num_missing_cells(sequence):
            return None
        cached = {slot.seq_id: self._reusable_tokens(slot, sequence) for slot in self.slots}
        source = max(self.slots, key=lambda slot: cached[slot.seq_id])
        shared = cached[source.seq_id] if self._can_share else 0
        slot = min(idle, key=lambda slot: self._cost(slot, cached[slot.seq_id], shared))
        if shared >= cached[slot.seq_id] + MIN_SHARED_TOKENS:
            return Placement(slot, shared, self._evictions(sequence, slot, source), source)
        return Placement(slot, cached[slot.seq_id], self._evictions(sequence, slot))

    def _reusable_tokens(self, slot: Slot, sequence: Sequence) -> int:
        request = sequence.request
        if not request.cache_prompt or slot.namespace != request.cache_namespace:
            return 0
        shared = common_prefix_length(slot.token_ids, sequence.token_ids)
        # One token is always computed anew: without it there would be no logits to sample from.
        return min(shared, sequence.num_tokens - 1)

    def _cost(self, slot: Slot, num_own: int, num_shared: int) -> tuple[float, float]:
        """Tokens lost to the cache, discounted by age, less tokens saved; among equals the oldest slot."""
        resident = len(slot.token_ids)
        value = max(0.0, slot.priority - self._age)
        lost = value * (resident - num_own) / resident if resident else 0.0
        saved = num_own if num_shared < num_own + MIN_SHARED_TOKENS else num_shared
        return lost - saved, slot.priority

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
        slot, holder = placement.slot, placement.source or placement.slot
        prefix = holder.token_ids[: placement.num_cached_tokens]
        for victim in placement.evict:
            self._give_up(victim)
        if placement.source or len(slot.token_ids) > len(prefix):
            self._give_up(slot, num_kept=0 if placement.source else len(prefix))
        slot.token_ids = prefix
        slot.namespace = sequence.request.cache_namespace
        slot.sequence = sequence
        sequence.seq_id = slot.seq_id

    def _give_up(self, slot: Slot, num_kept: int = 0) -> None:
        if slot.token_ids:
            self._age = max(self._age, slot.priority)
        self.num_evicted_tokens += len(slot.token_ids) - num_kept
        slot.token_ids = []

    def advance(self, sequence: Sequence, num_tokens: int) -> None:
        """Record that the next `num_tokens` tokens of a sequence are now resident."""
        slot = self.slots[sequence.seq_id]
        start = len(slot.token_ids)
        slot.token_ids.extend(sequence.token_ids[start : start + num_tokens])

    def truncate(self, sequence: Sequence, num_tokens: int) -> None:
        """Record that only the first `num_tokens` tokens of a running sequence are resident."""
        del self.slots[sequence.seq_id].token_ids[num_tokens:]

    def release(self, sequence: Sequence) -> None:
        """The sequence is over: its slot is idle and its tokens stay as prefix cache."""
        slot = self.slots[sequence.seq_id]
        slot.sequence = None
        slot.priority = self._age + len(slot.token_ids)
