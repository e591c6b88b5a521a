"""Which tokens are resident for which slot; prefix reuse, eviction and reservation.

Owns the bookkeeping only: it decides, and the model runner carries out. Knows nothing of llama.cpp, time or
text.

A slot is a `seq_id` of the context. With split cells every slot has `n_ctx_seq` cells of its own; with
unified cells all slots draw on one pool of `n_ctx`, so that idle tokens may have to be evicted for a
newcomer.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from edgeserve.engine.request import Sequence


@dataclass(slots=True, eq=False)
class Slot:
    """One seq_id, the tokens whose KV it holds, and who is using it."""

    seq_id: int
    token_ids: list[int] = field(default_factory=list)
    namespace: str = ""
    sequence: Sequence | None = None
    last_used: int = 0

    @property
    def is_idle(self) -> bool:
        return self.sequence is None


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a waiting sequence can go: the slot, how many leading tokens are resident there, and the slots to
    empty first."""

    slot: Slot
    num_cached_tokens: int
    evict: tuple[Slot, ...] = ()


def common_prefix_length(a: Seq[int], b: Seq[int]) -> int:
    """Number of leading tokens that two token lists share."""
    n = min(len(a), len(b))
    if n == 0 or a[0] != b[0]:
        return 0
    differ = np.flatnonzero(np.asarray(a[:n]) != np.asarray(b[:n]))
    return int(differ[0]) if differ.size else n


class KVCache:
    """The slots of one context and the room in them."""

    def __init__(self, num_slots: int, n_ctx: int, n_ctx_seq: int, unified: bool) -> None:
        self.slots = tuple(Slot(seq_id) for seq_id in range(num_slots))
        self.n_ctx = n_ctx
        self.n_ctx_seq = n_ctx_seq
        self.unified = unified
        self._uses = 0

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
        """The best idle slot for a sequence: the one with the longest resident prefix of its prompt, unless
        taking it would throw away more than it saves while an emptier slot is free. None when it must
        wait."""
        idle = [slot for slot in self.slots if slot.is_idle]
        if not idle or self.num_missing_cells(sequence):
            return None
        cached = {slot.seq_id: self._reusable_tokens(slot, sequence) for slot in idle}
        slot = min(idle, key=lambda slot: self._cost(slot, cached[slot.seq_id]))
        num_cached = cached[slot.seq_id]
        return Placement(slot, num_cached, self._evictions(sequence, slot, num_cached))

    def _reusable_tokens(self, slot: Slot, sequence: Sequence) -> int:
        request = sequence.request
        if not request.cache_prompt or slot.namespace != request.cache_namespace:
            return 0
        shared = common_prefix_length(slot.token_ids, sequence.token_ids)
        # One token is always computed anew: without it there would be no logits to sample from.
        return min(shared, sequence.num_tokens - 1)

    def _cost(self, slot: Slot, num_cached: int) -> tuple[int, int]:
        """Tokens lost to the cache less tokens saved by it; among equals the slot unused for longest."""
        return len(slot.token_ids) - 2 * num_cached, slot.last_used

    def _evictions(self, sequence: Sequence, target: Slot, num_cached: int) -> tuple[Slot, ...]:
        if not self.unified:
            return ()
        others = [slot for slot in self.slots if slot.is_idle and slot is not target and slot.token_ids]
        kept = sum(len(slot.token_ids) for slot in others)
        excess = self.num_reserved_cells + sequence.max_num_tokens + kept - self.n_ctx
        evict: list[Slot] = []
        for slot in sorted(others, key=lambda slot: slot.last_used):
            if excess <= 0:
                break
            evict.append(slot)
            excess -= len(slot.token_ids)
        return tuple(evict)

    def acquire(self, placement: Placement, sequence: Sequence) -> None:
        """Give the slot to a sequence; what is beyond the shared prefix, and evicted slots, are forgotten."""
        for victim in placement.evict:
            victim.token_ids.clear()
        slot = placement.slot
        del slot.token_ids[placement.num_cached_tokens :]
        slot.namespace = sequence.request.cache_namespace
        slot.sequence = sequence
        self._touch(slot)
        sequence.seq_id = slot.seq_id

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
        self._touch(slot)

    def _touch(self, slot: Slot) -> None:
        self._uses += 1
        slot.last_used = self._uses
