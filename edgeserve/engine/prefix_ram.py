"""The RAM tier of the prefix cache: prefixes that lost their slot, in host memory, within a bound.

Owns which prefix gives way. Knows nothing of contexts, files or threads.

By GreedyDual-Size-Frequency: a prefix is worth its tokens per byte times its uses, on top of the tier's age,
which rises to the worth of what was last given up, so that nothing stays only because it once was useful.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from edgeserve.engine.saved_prefix import Found, SavedPrefix, Tokens, common_prefix_length


@dataclass(slots=True, eq=False)
class _Kept:
    prefix: SavedPrefix
    num_uses: int = 1
    priority: float = 0.0


class RamTier:
    """Saved prefixes, `limit_bytes` of them at most; 0 keeps none."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.num_bytes = 0
        self._kept: list[_Kept] = []
        self._age = 0.0

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[SavedPrefix]:
        return (kept.prefix for kept in self._kept)

    def find(self, namespace: str, token_ids: Tokens, most: int) -> Found | None:
        """The prefix that spares a prompt the most tokens, compared token by token; None when there is
        none."""
        found = [
            Found(prefix, prefix.usable_tokens(token_ids, most))
            for prefix in self
            if prefix.namespace == namespace
        ]
        best = max(found, key=lambda item: item.num_tokens, default=None)
        return best if best and best.num_tokens else None

    def covers(self, namespace: str, token_ids: Tokens) -> bool:
        """Whether all these tokens are kept already."""
        return any(
            prefix.namespace == namespace
            and common_prefix_length(prefix.token_ids, token_ids) == len(token_ids)
            for prefix in self
        )

    def make_room(self, num_bytes: int) -> list[SavedPrefix] | None:
        """Give up what is worth least until so many bytes are free: to be called before they are allocated.
        Returns what was given up; None, and gives up nothing, when so much never fits."""
        if num_bytes > self.limit_bytes:
            return None
        given_up: list[SavedPrefix] = []
        while self.num_bytes + num_bytes > self.limit_bytes:
            least = min(self._kept, key=lambda kept: kept.priority)
            self._age = max(self._age, least.priority)
            self._drop(least)
            given_up.append(least.prefix)
        return given_up

    def add(self, prefix: SavedPrefix) -> None:
        """Keep a prefix, in place of those that it continues and that it can be cut back to. Room was
        made."""
        for kept in list(self._kept):
            shorter = kept.prefix
            if shorter.namespace == prefix.namespace and shorter.num_tokens == prefix.usable_tokens(
                shorter.token_ids, shorter.num_tokens
            ):
                self._drop(kept)
        kept = _Kept(prefix)
        self._kept.append(kept)
        self.num_bytes += prefix.num_bytes
        self._value(kept)

    def used(self, found: Found) -> None:
        """A prefix went back into a context: one that is there as a whole is not kept twice."""
        for kept in self._kept:
            if kept.prefix is found.prefix:
                if found.num_tokens >= kept.prefix.num_tokens - 1:
                    self._drop(kept)
                else:
                    kept.num_uses += 1
                    self._value(kept)
                return

    def _value(self, kept: _Kept) -> None:
        prefix = kept.prefix
        kept.priority = self._age + kept.num_uses * prefix.num_tokens / prefix.num_bytes

    def _drop(self, kept: _Kept) -> None:
        self._kept.remove(kept)
        self.num_bytes -= kept.prefix.num_bytes
