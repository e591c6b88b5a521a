"""A prefix outside the context: its tokens, the state that llama.cpp computed for them, and what of both a
new prompt can use.

Owns the comparison of tokens and the rule of what a state can be cut back to. Does not know where a prefix is
kept (prefix_ram.py, prefix_disk.py) nor how its state gets into a context.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

MIN_SHARED_TOKENS = 32
"""A prefix that is somewhere else is worth fetching from so many tokens on: it costs a copy."""

State = NDArray[np.uint8]
Tokens = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """The part of a sequence's state that cannot be cut back, as it was after `num_tokens` tokens."""

    num_tokens: int
    state: State

    @property
    def num_bytes(self) -> int:
        return self.state.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class SavedPrefix:
    """Tokens with the state after them, made under one namespace.

    The state can be cut back to any length from `cut_from` on, and to each of the `checkpoints` (shortest
    first).
    """

    namespace: str
    token_ids: Tokens
    state: State
    cut_from: int = 0
    checkpoints: tuple[Checkpoint, ...] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_bytes(self) -> int:
        kept = sum(checkpoint.num_bytes for checkpoint in self.checkpoints)
        return self.token_ids.nbytes + self.state.nbytes + kept

    def usable_tokens(self, token_ids: Tokens, most: int) -> int:
        """How many of its leading tokens, `most` at most, a prompt can take over."""
        stops = [checkpoint.num_tokens for checkpoint in self.checkpoints]
        return usable(common_prefix_length(self.token_ids, token_ids), most, self.cut_from, stops)


@dataclass(frozen=True, slots=True)
class Found:
    """A saved prefix, and how many of its leading tokens a prompt can take over."""

    prefix: SavedPrefix
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Holding:
    """How much of a kind is kept, and how much may be."""

    num_items: int = 0
    num_bytes: int = 0
    limit_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PrefixCacheStats:
    """The prefix cache beyond the context's own cells. Hits are by where the prefix came from: `checkpoint`,
    `ram` or `disk`."""

    checkpoints: Holding = Holding()
    ram: Holding = Holding()
    disk: Holding = Holding()
    hits_total: dict[str, int] = field(default_factory=dict)
    hit_tokens_total: dict[str, int] = field(default_factory=dict)
    num_unsaved_total: int = 0
    """Prefixes given up for good: copying them would have made running streams wait too long."""


def usable(num_shared: int, most: int, cut_from: int, stops: Seq[int]) -> int:
    """The longest prefix within `num_shared` and `most` tokens that a state can be brought back to: anything
    from `cut_from` on, or one of `stops`."""
    limit = min(num_shared, most)
    if limit >= cut_from:
        return limit
    return max((stop for stop in stops if stop <= limit), default=0)


def common_prefix_length(a: Seq[int] | Tokens, b: Seq[int] | Tokens) -> int:
    """Number of leading tokens that two token lists share."""
    n = min(len(a), len(b))
    if n == 0 or a[0] != b[0]:
        return 0
    differ = np.flatnonzero(np.asarray(a[:n]) != np.asarray(b[:n]))
    return int(differ[0]) if differ.size else n
