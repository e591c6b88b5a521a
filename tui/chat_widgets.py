"""The pieces of a chat: what was said, an answer as it grows, the line being written, the live meter.

Own how text is shown while it streams: at most a few times a second, whole blocks only, nothing repainted
that stands. Know nothing of servers or sessions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.cells import cell_len
from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.message import Message
from textual.widgets import Collapsible, Markdown, Static, TextArea
from textual.widgets.markdown import MarkdownStream

from edgeserve.chat.answer import Answer, figures_of
from edgeserve.chat.figures import figures_lines, progress_text
from edgeserve.ink import Ink, printable, significant
from edgeserve.metrics import percentile
from tui.lines import TwoEndedLine
from tui.strips import EIGHTHS

MAX_SHOWN_LINES = 40
_SPARK_COLUMNS = 24
_BAR_COLUMNS = 20
_GAP = "   "


class Said(Static):
    """A message of the person; a very long one is shown by its beginning."""

    DEFAULT_CSS = """
    Said { padding: 0 1; margin: 1 0 0 0; border-left: outer $frame-focus; }
    """

    def __init__(self, text: str) -> None:
        lines = printable(text).splitlines() or [""]
        self.shown = "\n".join(lines[:MAX_SHOWN_LINES])
        if len(lines) > MAX_SHOWN_LINES:
            self.shown += f"\n… {len(lines) - MAX_SHOWN_LINES:,} more lines, all of them sent"
        super().__init__(Text(self.shown))


class AnswerView(Vertical):
    """An answer: reasoning folded away, Markdown that grows, and the line of figures below."""

    DEFAULT_CSS = """
    AnswerView {
        height: auto; margin: 1 0 0 0;
        & Markdown { padding: 0 1; margin: 0; background: $background; }
        & Collapsible { border: none; padding: 0; background: $background; color: $quiet; }
        & .figures { padding: 0 1; color: $quiet; }
        & .error { padding: 0 1; color: $stalled; }
    }
    """

    def __init__(self, text: str = "", reasoning: str = "") -> None:
        super().__init__()
        self._initial = printable(text)
        self._reasoning = printable(reasoning)
        self._num_shown = 0
        self._stream: MarkdownStream | None = None
        self.figures_text = ""

    def compose(self) -> ComposeResult:
        with Collapsible(title="reasoning", collapsed=True) as thoughts:
            thoughts.display = bool(self._reasoning)
            yield Static(Text(self._reasoning), classes="thoughts")
        yield Markdown(self._initial, open_links=False)

    async def grow(self, answer: Answer) -> None:
        """Show what has come since the last call."""
        if answer.reasoning and len(answer.reasoning) != len(self._reasoning):
            self._reasoning = answer.reasoning
            thoughts = self.query_one(Collapsible)
            thoughts.display = True
            thoughts.title = f"reasoning, {len(answer.reasoning.split()):,} words"
            self.query_one(".thoughts", Static).update(Text(printable(answer.reasoning)))
        fresh = answer.text[self._num_shown :]
        if fresh:
            self._num_shown = len(answer.text)
            if self._stream is None:
                self._stream = Markdown.get_stream(self.query_one(Markdown))
            await self._stream.write(printable(fresh))

    async def end(self, answer: Answer, n_ctx: int | None, *notes: str) -> None:
        """The answer is over: the rest of it, and its figures."""
        await self.grow(answer)
        if self._stream is not None:
            await self._stream.stop()
            self._stream = None
        # No columns: each figure by itself.
        parts = figures_lines(figures_of(answer), n_ctx, Ink(False), 0, *notes)
        self.figures_text = _GAP.join(parts)
        await self.mount(FiguresLine(parts))

    async def fail(self, message: str) -> None:
        """What went wrong, in place of figures."""
        await self.mount(Static(Text(printable(message)), classes="error"))


class FiguresLine(Static):
    """The quiet line under an answer: coloured figures, never broken within one."""

    def __init__(self, parts: Sequence[str]) -> None:
        super().__init__("", classes="figures")
        self._parts = parts
        self._columns = -1

    def on_mount(self) -> None:
        self._arrange(1 << 20)

    def on_resize(self) -> None:
        self._arrange(self.content_size.width)

    def _arrange(self, columns: int) -> None:
        if columns != self._columns:
            self._columns = columns
            self.update("\n".join(arranged(self._parts, columns)))


def arranged(parts: Sequence[str], columns: int) -> list[str]:
    """Figures as lines of markup, as many on each as `columns` hold."""
    lines: list[str] = []
    room = 0
    for part in parts:
        needed = cell_len(_GAP + part)
        if lines and needed <= room:
            lines[-1] += _GAP + _coloured(part)
            room -= needed
        else:
            lines.append(_coloured(part))
            room = columns - cell_len(part)
    return lines


def _coloured(part: str) -> str:
    """A figure's colour is told by the word it begins with."""
    word = part.split(" ", 1)[0]
    part = part.replace("[", "\\[")
    return f"[${word}]{part}[/]" if word in ("prefill", "decode", "stalled") else part


class Composer(TextArea):
    """Where the next message is written. Enter sends; Shift+Enter, Alt+Enter and Ctrl+J begin a new line.

    A paste comes as one piece, whatever lines it holds.
    """

    DEFAULT_CSS = """
    Composer {
        height: auto; min-height: 3; max-height: 12;
        border: round $frame; background: $background; padding: 0 1;
        &:focus { border: round $frame-focus; }
        & .text-area--placeholder { color: $quiet; }
    }
    """
    _NEW_LINE = frozenset(("shift+enter", "alt+enter", "ctrl+j"))

    @dataclass
    class Sent(Message):
        """The person has finished a message."""

        text: str

    def __init__(self) -> None:
        super().__init__(
            soft_wrap=True, show_line_numbers=False, tab_behavior="focus", highlight_cursor_line=False
        )
        self.placeholder = "Write a message. Enter sends, Ctrl+J begins a new line."

    async def _on_key(self, event: events.Key) -> None:
        # Without this the area would take Escape for itself, and nothing could be stopped from here.
        if event.key == "escape":
            return
        # Here and not as bindings: those overtake letters that were typed before and still queue.
        if event.key == "enter" or event.key in self._NEW_LINE:
            event.stop()
            event.prevent_default()
            if event.key == "enter":
                self._send()
            else:
                self.insert("\n")
            return
        await super()._on_key(event)

    def _send(self) -> None:
        if self.text.strip():
            self.post_message(self.Sent(self.text))


class LiveMeter(TwoEndedLine):
    """What the answer is doing: a prompt's progress, then the beat of its tokens."""

    def show_idle(self, text: str, right: str) -> None:
        self.show([(text, "quiet")], [(right, "quiet")])

    def show_answer(self, answer: Answer, now_s: float, num_waiting: int = 0) -> None:
        """`now_s` is on the client's own clock; `num_waiting` requests are in the server's queue."""
        if answer.stamps_s:
            self.show(_decode_parts(answer), [("Esc stops", "quiet")])
        elif answer.progress is not None and answer.progress.total:
            progress = answer.progress
            bar = _bar(progress.cache / progress.total, progress.processed / progress.total)
            text = progress_text(progress, now_s - answer.progress_at_s)
            self.show([(bar, "prefill"), (f"  {text}", "prefill")], [("Esc stops", "quiet")])
        else:
            text = f"for the first token, {now_s - answer.sent_s:.0f} s"
            queue = f"   {num_waiting:,} in the server's queue" if num_waiting else ""
            self.show([("waiting  ", "plain"), (text + queue, "quiet")], [("Esc stops", "quiet")])


def _bar(cached: float, ready: float) -> str:
    """▒ cached, █ computed, ░ still to do."""
    num_cached, num_ready = round(cached * _BAR_COLUMNS), round(ready * _BAR_COLUMNS)
    return "▒" * num_cached + "█" * (num_ready - num_cached) + "░" * (_BAR_COLUMNS - num_ready)


def _decode_parts(answer: Answer) -> list[TwoEndedLine.Part]:
    stamps = answer.stamps_s[-_SPARK_COLUMNS - 1 :]
    gaps_ms = [1e3 * (later - earlier) for earlier, later in pairwise(stamps)]
    typical = percentile(gaps_ms, 50)
    if typical is None or not gaps_ms:
        return [("decode  ", "decode"), ("first token", "quiet")]
    top = max(gaps_ms) or 1.0
    spark = "".join(EIGHTHS[max(1, min(8, round(8 * gap / top)))] for gap in gaps_ms)
    return [
        (f"decode  {spark:<{_SPARK_COLUMNS}}", "decode"),
        (f"  {significant(typical)} ms/token, longest {significant(top)}", "decode"),
        (f"   {len(answer.stamps_s):,} pieces", "quiet"),
    ]
