"""What the chat shows: the answer on standard output, everything else on standard error.

Owns the writing of an answer as it comes and the line that shows progress and disappears. Knows nothing of
keys, requests or conversations.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from typing import TextIO

from edgeserve.chat.markdown import MarkdownStyler
from edgeserve.errors import EdgeserveError
from edgeserve.ink import RESET, Ink, can_redraw, ink_for, printable
from edgeserve.reasoning import Part

INDENT = "  "
_ERASE_LINE = "\r\x1b[K"


class ChatView:
    """Two streams of one terminal, or of none."""

    def __init__(self, out: TextIO, err: TextIO, environ: Mapping[str, str]) -> None:
        self._out = out
        self._err = err
        self.is_terminal = out.isatty()
        self._redraws = can_redraw(err, environ)
        self._shows_reasoning = err.isatty()
        self.ink = ink_for(err, environ)
        # What a pipe or file gets is the answer and nothing else, whatever FORCE_COLOR says.
        self._answer_ink = ink_for(out, environ) if self.is_terminal else Ink(False)
        self._styler: MarkdownStyler | None = None
        self._has_status = False
        self._is_reasoning: bool | None = None  # None before the first piece
        self._last = "\n"  # the last character of the answer

    # -- an answer ------------------------------------------------------------------------------------------

    def begin(self, *, plain: bool) -> None:
        """Get ready for the next answer."""
        styled = self.is_terminal and not plain
        self._styler = MarkdownStyler(self._answer_ink, columns()) if styled else None
        self._is_reasoning, self._last = None, "\n"

    def show(self, part: Part) -> None:
        """The next piece of the answer or of the reasoning."""
        if part.is_reasoning and not self._shows_reasoning:
            return
        self.clear_status()
        if part.is_reasoning is not self._is_reasoning:
            self._change_to(part.is_reasoning)
        if part.is_reasoning:
            self._write_err(self.ink(printable(part.text), "dim"))
            self._last = part.text[-1]
        else:
            self._write_answer(part.text)

    def end(self) -> None:
        """The answer is over: close every style and end its line."""
        self.clear_status()
        if self._styler is not None:
            self._put(self._styler.finish())
        if self._is_reasoning:
            self._end_reasoning()
        elif self._is_reasoning is False and self._last != "\n":
            self._put("\n")
        self._is_reasoning = None

    def _change_to(self, is_reasoning: bool) -> None:
        if is_reasoning:
            self._write_err(self.ink("reasoning:", "dim") + "\n")
        elif self._is_reasoning:
            self._end_reasoning()
            # Without the dimming only a word tells where the reasoning ends.
            self._write_err("\n" if self.ink.enabled else "\nanswer:\n")
            self._last = "\n"
        self._is_reasoning = is_reasoning

    def _end_reasoning(self) -> None:
        if self._last != "\n":
            self._write_err("\n")

    def _write_answer(self, text: str) -> None:
        self._put(text if not self.is_terminal else self._styled(printable(text)))
        if self._styler is not None and self._styler.num_held_rows and self._last == "\n":
            self.status(f"table, {self._styler.num_held_rows} rows so far")

    def _styled(self, text: str) -> str:
        return self._styler.feed(text) if self._styler is not None else text

    def _put(self, text: str) -> None:
        if not text:
            return
        self._out.write(text)
        self._out.flush()
        self._last = text.removesuffix(RESET)[-1:] or self._last

    # -- everything else ------------------------------------------------------------------------------------

    def status(self, text: str) -> None:
        """A line that the next output replaces; nothing where a line cannot be taken back."""
        if self._redraws:
            self._write_err(_ERASE_LINE + self.ink(INDENT + text[: columns() - 3], "dim"))
            self._has_status = True

    def clear_status(self) -> None:
        if self._has_status:
            self._write_err(_ERASE_LINE)
            self._has_status = False

    def note(self, *lines: str) -> None:
        """Quiet lines."""
        self.clear_status()
        self._write_err("".join(f"{INDENT}{line}".rstrip() + "\n" for line in lines))

    def error(self, error: EdgeserveError) -> None:
        self.clear_status()
        hint = f"{INDENT}{printable(error.hint)}\n" if error.hint else ""
        self._write_err(f"{self.ink('error:', 'stalled')} {printable(error.message)}\n{hint}")

    def blank(self) -> None:
        self._write_err("\n")

    def _write_err(self, text: str) -> None:
        self._err.write(text)
        self._err.flush()


def columns() -> int:
    """Cells in a line; 80 where nobody says."""
    return max(20, shutil.get_terminal_size().columns)
