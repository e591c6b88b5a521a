"""Checkpoints of state, for models that cannot drop a part of their memory: recurrent and hybrid ones, and
sliding windows.

Owns where in a prompt they are made and which gives way when the budget is full. What a checkpoint is good
for is decided in kv_cache.py. With other models nothing here does anything.

Places: before the end of the prompt, where the template's opening of the answer begins, since the next turn
may tell the answer differently; where another conversation parted from this one; and every so many tokens of
a long prompt.
"""

from __future__ import annotations

from itertools import pairwise

from edgeserve.engine.kv_cache import KVCache, Slot
from edgeserve.engine.model_runner import ModelRunner
from edgeserve.engine.request import Sequence
from edgeserve.engine.saved_prefix import MIN_SHARED_TOKENS, Checkpoint, Holding, common_prefix_length

OPENING_TOKENS = 8
"""So many tokens before the end of a prompt the last checkpoint is made. Openings of answers have two to
eight tokens (the longest are those of models whose thinking is switched off)."""

EVERY_TOKENS = 1024


class CheckpointKeeper:
    """Checkpoints of all slots, `limit_bytes` of them at most; 0 makes none."""

    def __init__(self, runner: ModelRunner, cache: KVCache, limit_bytes: int) -> None:
        self._runner = runner
        self._cache = cache
        self._limit_bytes = limit_bytes

    def holding(self) -> Holding:
        kept = {id(item): item.num_bytes for slot in self._cache.slots for item in slot.checkpoints}
        return Holding(len(kept), sum(kept.values()), self._limit_bytes)

    def plan(self, sequence: Sequence) -> None:
        """Say where a newcomer's prompt is to stop for a checkpoint."""
        needs_none = not self._runner.cut_from(sequence.max_num_tokens)
        if needs_none or not self._limit_bytes or not sequence.request.cache_prompt:
            return
        end, cached = sequence.num_prompt_tokens, sequence.num_cached_tokens
        places = {
            common_prefix_length(slot.token_ids, sequence.token_ids)
            for slot in self._cache.slots
            if slot.seq_id != sequence.seq_id and slot.namespace == sequence.request.cache_namespace
        }
        places |= set(range(EVERY_TOKENS, end, EVERY_TOKENS))
        places = {place for place in places if cached + MIN_SHARED_TOKENS <= place < end}
        places |= {end - OPENING_TOKENS} if end - OPENING_TOKENS > cached else set()
        sequence.checkpoints_at = tuple(sorted(places))

    def take(self, sequence: Sequence) -> None:
        """Make a checkpoint if the sequence is where one was planned."""
        num_tokens = sequence.num_computed_tokens
        if num_tokens not in sequence.checkpoints_at:
            return
        size = self._runner.saved_bytes(sequence.seq_id, partial=True)
        if not size or not self._make_room(size):
            return
        if (state := self._runner.save(sequence.seq_id, partial=True)) is not None:
            self._cache.slots[sequence.seq_id].checkpoints.append(Checkpoint(num_tokens, state))

    def _make_room(self, num_bytes: int) -> bool:
        """Drop checkpoints until so many bytes are free, before they are allocated: those of idle slots
        first, and in a slot the one whose loss costs the fewest tokens. False when so much never fits."""
        if num_bytes > self._limit_bytes:
            return False
        while self.holding().num_bytes + num_bytes > self._limit_bytes:
            slots = [slot for slot in self._cache.slots if slot.checkpoints]
            slot = min(slots, key=lambda slot: (not slot.is_idle, slot.priority))
            _drop_least(slot)
        return True


def _drop_least(slot: Slot) -> None:
    """Drop the checkpoint that is nearest to the one before it."""
    places = [0, *(item.num_tokens for item in slot.checkpoints)]
    gaps = [after - before for before, after in pairwise(places)]
    del slot.checkpoints[gaps.index(min(gaps))]
