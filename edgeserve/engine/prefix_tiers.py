"""The prefix cache beyond the context: what is saved when it loses its slot, what is brought back, and from
where.

Owns the two tiers (RAM and disk, both off by default), the requests that wait for a prefix from disk, and the
bound on what copying may cost the streams beside it. Decisions about slots stay with kv_cache.py, the copying
with model_runner.py. Everything here runs on the engine's thread, but for one hand-over from the disk's.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Empty, SimpleQueue

import numpy as np

from edgeserve.config import EngineConfig
from edgeserve.engine.kv_cache import KVCache, Placement, Resident
from edgeserve.engine.model_runner import ModelRunner
from edgeserve.engine.prefix_disk import DiskTier
from edgeserve.engine.prefix_identity import prefix_identity
from edgeserve.engine.prefix_ram import RamTier
from edgeserve.engine.request import Sequence
from edgeserve.engine.saved_prefix import (
    MIN_SHARED_TOKENS,
    Found,
    Holding,
    PrefixCacheStats,
    SavedPrefix,
    Tokens,
)
from edgeserve.llama import Model

_MOST_FETCH_S = 10.0
"""A request does not wait longer for its prefix from disk: then it is computed."""

_MOST_FETCHING = 16
"""They are not in the queue, whose limits do not bound them."""

_MOST_CLOSE_S = 10.0
_PART_IF_SAVED = 0.04
"""What idle tokens may cost others before they are moved to RAM, as a part of what computing them costs.
Saving and loading take 5 to 12 us a token, about 0.002 of it; more, so that a question that follows at once
needs neither."""

_FIRST_COPY_BYTES_S = 1e9
"""Speed of copying a state before any was copied: what a laptop manages with cold pages."""

Waiting = tuple[Sequence, float]


class PrefixTiers:
    """What the engine asks of the tiers. Nothing happens where both are off."""

    def __init__(self, runner: ModelRunner, ram: RamTier, disk: DiskTier | None = None) -> None:
        self._runner = runner
        self._ram = ram
        self._disk = disk
        self._copy_bytes_s = _FIRST_COPY_BYTES_S
        self._fetching: dict[str, Waiting] = {}
        self._fetched: dict[str, SavedPrefix] = {}
        self._arrived: SimpleQueue[tuple[str, SavedPrefix | None]] = SimpleQueue()
        self.wake: Callable[[], None] = lambda: None
        """Called on the disk's thread when a prefix has arrived."""
        self._refused: dict[int, int] = {}
        """Slots that were too large to be saved, by when they became idle."""
        self._hits: Counter[str] = Counter()
        self._hit_tokens: Counter[str] = Counter()
        self._num_unsaved = 0

    def stats(self, checkpoints: Holding) -> PrefixCacheStats:
        """What is kept where, and what it was good for."""
        ram, disk, runner = self._ram, self._disk, self._runner
        from_checkpoint = Counter(checkpoint=runner.num_checkpoint_hits)
        its_tokens = Counter(checkpoint=runner.num_checkpoint_hit_tokens)
        return PrefixCacheStats(
            checkpoints,
            Holding(len(ram), ram.num_bytes, ram.limit_bytes),
            Holding(len(disk), disk.num_bytes, disk.limit_bytes) if disk is not None else Holding(),
            dict(self._hits + from_checkpoint),
            dict(self._hit_tokens + its_tokens),
            self._num_unsaved,
        )

    # -- what a newcomer can take over ----------------------------------------------------------------------

    def find(self, sequence: Sequence) -> Found | None:
        """The longest usable prefix outside the context that is in memory; compared token by token."""
        fetched = self._fetched.get(sequence.request_id)
        if not sequence.request.cache_prompt or not (fetched or len(self._ram)):
            return None
        token_ids = _tokens(sequence.token_ids)
        found = self._ram.find(sequence.request.cache_namespace, token_ids, len(token_ids) - 1)
        if fetched is None:
            return found
        num_fetched = fetched.usable_tokens(token_ids, len(token_ids) - 1)
        return found if found and found.num_tokens >= num_fetched else Found(fetched, num_fetched)

    def placed(self, sequence: Sequence, placement: Placement, num_kept: int) -> None:
        """A newcomer has its slot, with so many tokens of its prompt resident."""
        fetched = self._fetched.pop(sequence.request_id, None)
        if placement.saved is None or not num_kept:
            return
        tier = "disk" if placement.saved is fetched else "ram"
        self._hits[tier] += 1
        self._hit_tokens[tier] += num_kept
        self._ram.used(Found(placement.saved, num_kept))

    # -- from disk ------------------------------------------------------------------------------------------

    def fetch(self, sequence: Sequence, cache: KVCache) -> bool:
        """Whether a newcomer has to wait for a prefix that only the disk has: it comes out of
        `take_fetched`."""
        request = sequence.request
        if self._disk is None or not len(self._disk) or not request.cache_prompt:
            return False
        if len(self._fetching) >= _MOST_FETCHING:
            return False
        token_ids = _tokens(sequence.token_ids)
        on_disk = self._disk.find(request.cache_namespace, token_ids, len(token_ids) - 1)
        if on_disk is None:
            return False
        entry, num_tokens = on_disk
        in_memory = max(cache.reusable_tokens(slot, sequence) for slot in cache.slots)
        if found := self.find(sequence):
            in_memory = max(in_memory, found.num_tokens)
        if num_tokens < in_memory + MIN_SHARED_TOKENS:
            return False
        self._fetching[request.request_id] = (sequence, time.perf_counter())
        self._disk.load(
            entry, request.cache_namespace, lambda prefix: self._arrive(request.request_id, prefix)
        )
        return True

    def _arrive(self, request_id: str, prefix: SavedPrefix | None) -> None:
        self._arrived.put((request_id, prefix))
        self.wake()

    @property
    def fetching(self) -> list[Sequence]:
        """Those that wait for the disk."""
        return [sequence for sequence, _ in self._fetching.values()]

    @property
    def has_fetched(self) -> bool:
        return not self._arrived.empty() or any(self._overdue())

    def take_fetched(self) -> list[Sequence]:
        """Those that need not wait for the disk any more, with their prefix or without."""
        ready = list(self._overdue())
        while True:
            try:
                request_id, prefix = self._arrived.get_nowait()
            except Empty:
                break
            if request_id in self._fetching:
                ready.append(request_id)
                if prefix is not None:
                    self._fetched[request_id] = prefix
        now_s = time.perf_counter()
        waited = [self._fetching.pop(request_id) for request_id in dict.fromkeys(ready)]
        for sequence, start_s in waited:
            sequence.restore_s += now_s - start_s
        return [sequence for sequence, _ in waited]

    def _overdue(self) -> Iterator[str]:
        limit_s = time.perf_counter() - _MOST_FETCH_S
        return (name for name, (_, start_s) in self._fetching.items() if start_s < limit_s)

    def withdraw(self, sequence: Sequence) -> bool:
        """Forget a sequence that ends; whether it was still waiting for the disk."""
        self._fetched.pop(sequence.request_id, None)
        return self._fetching.pop(sequence.request_id, None) is not None

    # -- what loses its slot --------------------------------------------------------------------------------

    def save(self, lost: tuple[Resident, ...], most_s: float) -> None:
        """Save what slots are about to lose, as far as a tier wants it and copying takes no longer than
        `most_s` seconds: somebody's next token may be waiting."""
        for resident in lost:
            size = self._wanted_bytes(resident)
            if not size:
                continue
            cost_s = size / self._copy_bytes_s
            if cost_s > most_s:
                self._num_unsaved += 1
                continue
            most_s -= cost_s
            if self._ram.limit_bytes:
                self._save_to_ram(resident, size)
            elif prefix := self._copy(resident):
                self._to_disk(prefix)

    def trim(self, cache: KVCache, most_s: float) -> None:
        """Empty an idle slot that has slowed others down for long enough: soon where RAM can keep its
        tokens."""
        outstayed = cache.carried()
        early = cache.carried(_PART_IF_SAVED) if self._ram.limit_bytes else []
        for slot in outstayed or early:
            resident = Resident.of(slot)
            if outstayed or self._can_save(resident, slot.idle_since, most_s):
                self.save((resident,), most_s)
                cache.drop(slot)
                self._runner.empty(slot.seq_id)
                return

    def _can_save(self, resident: Resident, idle_since: int, most_s: float) -> bool:
        """Whether RAM will have a slot's tokens; asked once for each time that it became idle."""
        if self._refused.get(resident.seq_id) == idle_since:
            return False
        size = self._wanted_bytes(resident)
        fits = 0 < size <= min(self._ram.limit_bytes, self._copy_bytes_s * most_s)
        if fits or self._ram.covers(resident.namespace, _tokens(resident.token_ids)):
            return True
        self._refused[resident.seq_id] = idle_since
        return False

    def _wanted_bytes(self, resident: Resident) -> int:
        """What saving a slot takes; 0 when no tier wants it."""
        tokens = _tokens(resident.token_ids)
        if len(tokens) < MIN_SHARED_TOKENS:
            return 0
        wanted = (
            not self._ram.covers(resident.namespace, tokens)
            if self._ram.limit_bytes
            else self._is_new_on_disk(resident.namespace, tokens)
        )
        if not wanted:
            return 0
        state_bytes = self._runner.saved_bytes(resident.seq_id)
        kept_bytes = sum(checkpoint.num_bytes for checkpoint in resident.checkpoints)
        return state_bytes and state_bytes + tokens.nbytes + kept_bytes

    def _save_to_ram(self, resident: Resident, size: int) -> None:
        given_up = self._ram.make_room(size)
        for prefix in given_up or ():
            self._to_disk(prefix)
        if given_up is not None and (saved := self._copy(resident)):
            self._ram.add(saved)

    def _copy(self, resident: Resident) -> SavedPrefix | None:
        start_s = time.perf_counter()
        state = self._runner.save(resident.seq_id)
        if state is None:
            return None
        speed = state.nbytes / max(1e-9, time.perf_counter() - start_s)
        self._copy_bytes_s += (speed - self._copy_bytes_s) / 4
        tokens = _tokens(resident.token_ids)
        cut_from = self._runner.cut_from(len(tokens))
        return SavedPrefix(resident.namespace, tokens, state, cut_from, resident.checkpoints)

    def _to_disk(self, prefix: SavedPrefix, *, wait: bool = False) -> None:
        if self._disk is not None and self._is_new_on_disk(prefix.namespace, prefix.token_ids):
            self._disk.write(prefix, wait=wait)

    def _is_new_on_disk(self, namespace: str, token_ids: Tokens) -> bool:
        """Whether at least half of these tokens are not on disk yet: a growing chat is not written again
        with every turn."""
        if self._disk is None:
            return False
        num_new = len(token_ids) - self._disk.num_covered(namespace, token_ids)
        return num_new >= max(MIN_SHARED_TOKENS, len(token_ids) / 2)

    # -- at leisure -----------------------------------------------------------------------------------------

    def idle(self, cache: KVCache) -> None:
        """Nobody wants anything: bring one idle slot to disk, so that not only an orderly end keeps it."""
        for resident in self._unwritten(cache):
            if prefix := self._copy(resident):
                self._to_disk(prefix)
            return

    def close(self, cache: KVCache) -> None:
        """Bring to disk what is only in memory, for a bounded time."""
        if self._disk is None:
            return
        end_s = time.perf_counter() + _MOST_CLOSE_S
        for resident in self._unwritten(cache):
            if time.perf_counter() < end_s and (prefix := self._copy(resident)):
                self._to_disk(prefix, wait=True)
        for prefix in self._ram:
            if time.perf_counter() < end_s:
                self._to_disk(prefix, wait=True)
        self._disk.close()

    def _unwritten(self, cache: KVCache) -> Iterator[Resident]:
        if self._disk is None:
            return
        for slot in cache.slots:
            resident = Resident.of(slot)
            if not slot.is_idle or len(resident.token_ids) < MIN_SHARED_TOKENS:
                continue
            if self._is_new_on_disk(resident.namespace, _tokens(resident.token_ids)):
                size = self._runner.saved_bytes(slot.seq_id)
                if size and self._disk.takes(size):
                    yield resident


def prefix_tiers(runner: ModelRunner, model: Model, config: EngineConfig) -> PrefixTiers:
    """The tiers that `config`, resolved, asks for. Raises UsageError when its directory cannot be used."""
    ram = RamTier(config.cache_ram_mib << 20)
    if not config.cache_disk:
        return PrefixTiers(runner, ram)
    identity = prefix_identity(model, config)
    return PrefixTiers(runner, ram, DiskTier(Path(config.cache_disk), config.cache_disk_mib << 20, identity))


def _tokens(token_ids: list[int]) -> Tokens:
    return np.asarray(token_ids, np.int32)
