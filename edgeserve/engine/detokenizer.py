"""Tokens to text, as they come: whole UTF-8 characters only, and nothing of a stop string.

Owns what is held back. Knows nothing of vocabularies: it is fed the bytes of each token.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class Detokenizer:
    """One generation's text stream.

    Bytes that begin a character are held until it is complete (invalid bytes become U+FFFD); text that could
    be the start of a stop string is held until it is known not to be one.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._stop = tuple(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self.stop_string: str | None = None

    def feed(self, data: bytes) -> str:
        """Add one token's bytes; returns the text that may be shown now. Sets `stop_string` when one is
        hit."""
        return self._release(self._decoder.decode(data))

    def finish(self) -> str:
        """The rest, when the generation ends for another reason: half characters become U+FFFD."""
        text = self._release(self._decoder.decode(b"", final=True))
        if self.stop_string is None:
            text, self._held = text + self._held, ""
        return text

    def _release(self, text: str) -> str:
        if self.stop_string is not None:
            return ""
        self._held += text
        if hit := self._first_stop():
            position, self.stop_string = hit
            shown, self._held = self._held[:position], ""
            return shown
        keep = self._possible_stop_length()
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def _first_stop(self) -> tuple[int, str] | None:
        hits = [(self._held.find(stop), stop) for stop in self._stop]
        # Of stops that begin at the same place the longest is meant.
        return min(
            ((at, stop) for at, stop in hits if at >= 0), key=lambda hit: (hit[0], -len(hit[1])), default=None
        )

    def _possible_stop_length(self) -> int:
        longest = max((len(stop) for stop in self._stop), default=0) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            tail = self._held[-length:]
            if any(stop.startswith(tail) for stop in self._stop):
                return length
        return 0
