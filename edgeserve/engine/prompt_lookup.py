"""Drafts without a second model: what followed when the latest tokens last occurred in the same sequence.

Owns one sequence's lookup and the record of how often it was right, which is kept for every token, drafted or
not, so that it costs nothing to know. Knows nothing of steps and their costs (drafter.py).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from itertools import accumulate

MIN_MATCH = 3
"""Tokens that must have occurred before; two are too often chance."""

_LONGER = (6, 12)
_LEVELS = (MIN_MATCH, 4, 6, 9, 14, 24)
"""Lengths of a match from which its odds are counted apart: the longer it has held, the likelier it goes
on."""

_PRIOR = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
_PRIOR_WEIGHT = 2.0
_MEMORY = 48.0
"""Odds are an average over about so many of the latest tokens of their level."""


class PromptLookup:
    """One sequence's tokens, where they are being repeated from, and the odds that this goes on."""

    def __init__(self) -> None:
        self._tokens: Seq[int] = ()
        # The same tokens as bytes, four each: a search in them runs at memory speed.
        self._bytes = bytearray()
        self._source = -1
        self._match = 0
        self._hits = [prior * _PRIOR_WEIGHT for prior in _PRIOR]
        self._tries = [_PRIOR_WEIGHT] * len(_PRIOR)

    @property
    def num_tokens(self) -> int:
        return len(self._bytes) // 4

    @property
    def is_matched(self) -> bool:
        """Whether the latest tokens occurred before, so that there is something to draft."""
        return self._source >= 0

    def follow(self, token_ids: Seq[int]) -> None:
        """Take in what a sequence has grown by since the last call, and look where it may have come from."""
        self._tokens = token_ids
        for token_id in token_ids[self.num_tokens :] if self._source >= 0 else ():
            self._judge(token_id)
        new = token_ids[self.num_tokens :]
        self._bytes += array("i", new).tobytes()
        if self._source < 0:
            self._search()

    def draft(self, num_tokens: int) -> tuple[int, ...]:
        """The next tokens as they came the last time; a repetition that is still going on repeats itself."""
        if self._source < 0:
            return ()
        period = self.num_tokens - self._source
        return tuple(self._tokens[self._source + index % period] for index in range(num_tokens))

    def expected(self, num_tokens: int) -> list[float]:
        """How many tokens are expected to be right of drafts of 0, 1, ... `num_tokens` tokens."""
        if self._source < 0:
            return [0.0] * (num_tokens + 1)
        chances, chance = [0.0], 1.0
        for ahead in range(num_tokens):
            level = _level(self._match + ahead)
            chance *= self._hits[level] / self._tries[level]
            chances.append(chance)
        return list(accumulate(chances))

    def _judge(self, token_id: int) -> None:
        """Whether the next token was the one that the lookup said."""
        if self._source < 0:
            return
        is_hit = self._tokens[self._source] == token_id
        level = _level(self._match)
        self._hits[level] += is_hit
        self._tries[level] += 1
        if self._tries[level] > _MEMORY:
            self._hits[level] *= 0.5
            self._tries[level] *= 0.5
        self._source, self._match = (self._source + 1, self._match + 1) if is_hit else (-1, 0)

    def _search(self) -> None:
        """The latest earlier place of the longest tail that occurred before."""
        for length in (MIN_MATCH, *_LONGER):
            end = self._end_of_last(length)
            if end < 0:
                return
            self._source, self._match = end, length

    def _end_of_last(self, length: int) -> int:
        """The index behind the latest earlier occurrence of the last `length` tokens; -1 without one."""
        size = len(self._bytes)
        if size < 4 * (length + 1):
            return -1
        pattern = bytes(self._bytes[-4 * length :])
        found = self._bytes.rfind(pattern, 0, size - 4)
        while found >= 0 and found % 4:  # bytes of two neighbours that look like it
            found = self._bytes.rfind(pattern, 0, found + len(pattern) - 1)
        return found // 4 + length if found >= 0 else -1


def _level(match: int) -> int:
    return sum(match >= least for least in _LEVELS[1:])
