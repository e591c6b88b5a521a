"""Markdown made readable while it streams, without ever repainting a line.

Owns: which characters of an answer get which style, decided as they arrive. Every character stays in the
output and in its place (marks such as `**` are only dimmed), so that scrollback and copied text are the
answer itself. The one exception: the rows of a table are held back until it ends and padded into columns.
Knows nothing of terminals beyond their width.
"""

from __future__ import annotations

import re
from enum import Enum, auto

from edgeserve.chat.table import is_delimiter_row, lay_out_table
from edgeserve.ink import RESET, Ink

MAX_HELD_ROWS = 200
MAX_HELD_ROW_CHARS = 2000

# A line's beginning that may still become a heading, fence, quote, list item or table row.
_UNDECIDED = re.compile(r"[ \t]*(#{1,6}|`+|~+|[-+*_]+|\d{1,3}[.)]?|>)?")
_HEADING = re.compile(r" {0,3}#{1,6}\s")
_FENCE = re.compile(r"[ \t]*(`{3,}|~{3,})")
_LIST_OR_QUOTE = re.compile(r"[ \t]*(?:[-+*]|\d{1,3}[.)]|>)(?=\s)|[ \t]*>|[ \t]+")
_MARKS = "*_`"


class _Line(Enum):
    """What the line being received is."""

    UNDECIDED = auto()
    PROSE = auto()
    CODE = auto()
    FENCE = auto()
    ROW = auto()


class MarkdownStyler:
    """Feed it an answer in pieces; what comes out does not depend on where the pieces were cut."""

    def __init__(self, ink: Ink, columns: int = 80) -> None:
        self._columns = columns
        self._pen = _Pen(ink)
        self._spans = _Spans(self._pen)
        self._line = _Line.UNDECIDED
        self._held = ""  # the line so far, while it is undecided or a row
        self._fence = ""  # the mark that opened a code block, "" outside of one
        self._rows: list[str] = []

    @property
    def num_held_rows(self) -> int:
        """Table rows received and not yet shown."""
        return len(self._rows)

    def feed(self, text: str) -> str:
        """What can be shown now."""
        return "".join(self._character(character) for character in text)

    def finish(self) -> str:
        """The rest, with every style closed."""
        if self._line is _Line.ROW:
            self._rows.append(self._held)
            return self._flush_rows()
        rest = self._flush_rows()
        if self._held:
            rest += self._decide(self._held, "\n")
        return rest + self._spans.end_of_line()

    def _character(self, character: str) -> str:
        if self._line is _Line.UNDECIDED:
            return self._undecided_character(character)
        if self._line is _Line.ROW:
            return self._row_character(character)
        if character == "\n":
            return self._end_of_line()
        if self._line is _Line.PROSE:
            return self._spans.character(character)
        if self._line is _Line.FENCE:
            self._held += character
        return self._pen.to("dim" if self._line is _Line.FENCE else "code") + character

    def _end_of_line(self) -> str:
        if self._line is _Line.FENCE and self._fence and self._fence[0] == "`" and "`" in self._held:
            self._fence = ""  # ```code``` on one line opens nothing
        self._line, self._held = _Line.UNDECIDED, ""
        return self._spans.end_of_line() + "\n"

    def _undecided_character(self, character: str) -> str:
        line = self._held + character
        if line.lstrip(" ").startswith("|") and not self._fence:
            self._line, self._held = _Line.ROW, line
            return ""
        if character != "\n" and _UNDECIDED.fullmatch(line):
            self._held = line
            return ""
        head, self._held = self._held, ""
        # Text that is not a row ends a table; the rows stand before it.
        return self._flush_rows() + self._decide(head, character) + self._character(character)

    def _decide(self, head: str, following: str) -> str:
        """Show the beginning of a line whose kind is now known."""
        fence = _FENCE.match(head)
        if self._fence:
            closes = fence is not None and fence[1].startswith(self._fence) and following.isspace()
            self._line = _Line.FENCE if closes else _Line.CODE
            self._fence = "" if closes else self._fence
            return self._pen.to("dim" if closes else "code") + head
        if fence is not None:
            self._line, self._fence = _Line.FENCE, fence[1]
            return self._pen.to("dim") + head
        self._line = _Line.PROSE
        return self._begin_prose(head, following)

    def _begin_prose(self, head: str, following: str) -> str:
        if _HEADING.match(head + following):
            shown = self._pen.to("dim") + head
            self._spans.is_heading = True
            return shown
        prefix = _LIST_OR_QUOTE.match(head + following)
        length = min(prefix.end(), len(head)) if prefix else 0
        shown = self._pen.to("dim") + head[:length] if ">" in head[:length] else head[:length]
        return shown + "".join(self._spans.character(character) for character in head[length:])

    # -- tables ---------------------------------------------------------------------------------------------

    def _row_character(self, character: str) -> str:
        self._held += character
        if character == "\n":
            self._rows.append(self._held)
            self._line, self._held = _Line.UNDECIDED, ""
            is_table = len(self._rows) < 2 or is_delimiter_row(self._rows[1])
            return "" if is_table and len(self._rows) < MAX_HELD_ROWS else self._flush_rows()
        if len(self._held) < MAX_HELD_ROW_CHARS:
            return ""
        row, self._held, self._line = self._held, "", _Line.PROSE
        return self._flush_rows() + "".join(self._spans.character(each) for each in row)

    def _flush_rows(self) -> str:
        rows, self._rows = self._rows, []
        return "".join(self._styled_row(row) for row in lay_out_table(rows, self._columns) or rows)

    def _styled_row(self, row: str) -> str:
        body = row.removesuffix("\n")
        if is_delimiter_row(body):
            styled = self._pen.to("dim") + body
        else:
            styled = "".join(self._spans.character(character) for character in body)
        return styled + self._spans.end_of_line() + row[len(body) :]


class _Pen:
    """The styles in force, and the codes that change them."""

    def __init__(self, ink: Ink) -> None:
        self._ink = ink
        self._styles: tuple[str, ...] = ()

    def to(self, *styles: str) -> str:
        """Switch to exactly these styles."""
        if styles == self._styles:
            return ""
        closing = RESET if self._styles and self._ink.enabled else ""
        self._styles = styles
        return closing + self._ink.start(*styles)


class _Spans:
    """Bold, italic and code within one line. A span left open ends with its line."""

    def __init__(self, pen: _Pen) -> None:
        self._pen = pen
        self.is_heading = False
        self._open: list[str] = []  # marks of the open spans, outermost first
        self._run = ""  # marks that just arrived; the next character says what they do
        self._previous = " "

    def character(self, character: str) -> str:
        is_mark = character in _MARKS and self._previous != "\\"
        if is_mark and self._run[:1] in ("", character):
            self._run += character
            return ""
        shown = self._resolve_run(character)
        if is_mark:
            self._run = character
            return shown
        # A backslash that is itself escaped escapes nothing.
        self._previous = " " if self._previous == character == "\\" else character
        return shown + self._pen.to(*self._styles()) + character

    def end_of_line(self) -> str:
        shown = self._resolve_run("\n")
        self._open.clear()
        self.is_heading = False
        self._previous = " "
        return shown + self._pen.to()

    def _styles(self) -> list[str]:
        styles = {"bold"} if self.is_heading else set()
        for mark in self._open:
            if mark[0] == "`":
                styles.add("code")
            elif len(mark) != 2:
                styles.add("italic")
            if mark[0] != "`" and len(mark) >= 2:
                styles.add("bold")
        return sorted(styles)

    def _resolve_run(self, following: str) -> str:
        """Whether the marks just seen open a span, close one, or are only characters."""
        run, self._run = self._run, ""
        if not run:
            return ""
        if self._closes(run):
            shown = self._pen.to("dim") + run
            del self._open[self._open.index(run) :]
        elif self._opens(run, following):
            shown = self._pen.to("dim") + run
            self._open.append(run)
        else:
            shown = self._pen.to(*self._styles()) + run
        self._previous = run[-1] if run[0] != "`" else " "
        return shown

    def _closes(self, run: str) -> bool:
        in_code = any(mark[0] == "`" for mark in self._open)
        if run not in self._open or (in_code and run[0] != "`"):
            return False
        return in_code or not self._previous.isspace()

    def _opens(self, run: str, following: str) -> bool:
        if any(mark[0] == "`" for mark in self._open) or following == "\n":
            return False
        if run[0] == "`":
            return True
        within_word = self._previous.isalnum() or self._previous in "_)"
        return len(run) <= 3 and not following.isspace() and not within_word
