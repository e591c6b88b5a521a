"""How far a download is: one line that disappears on a terminal, a plain line every few seconds elsewhere.

Owns the rhythm; the words are models_view's. Knows nothing of where the bytes come from.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import TextIO

from edgeserve.download import Progress
from edgeserve.ink import can_redraw, ink_for, printable
from edgeserve.models_view import progress_line

PLAIN_EVERY_S = 5.0
ERASE_LINE = "\r\x1b[K"


class ProgressLine:
    """Call it with each report; `close` takes the line away."""

    def __init__(
        self,
        stream: TextIO | None = None,
        environ: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream or sys.stderr
        self._redraws = can_redraw(self._stream, environ)
        self._ink = ink_for(self._stream, environ)
        self._clock = clock
        self._shown_s = float("-inf")
        self._is_open = False

    def __call__(self, progress: Progress) -> None:
        text = printable(progress_line(progress))
        if self._redraws:
            self._write(ERASE_LINE + self._ink(f"  {text}", "dim"))
            self._is_open = True
        elif self._clock() - self._shown_s >= PLAIN_EVERY_S:
            self._write(text + "\n")
            self._shown_s = self._clock()

    def close(self) -> None:
        if self._is_open:
            self._write(ERASE_LINE)
            self._is_open = False

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
