"""The table of requests: who runs and how far, who waits and for what, who has just left.

Owns the columns, which of them a narrow screen drops, and the cursor. Knows nothing of servers; a chosen
request is announced by a message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.reactive import reactive
from textual.strip import Strip

from edgeserve.ink import printable, significant
from tui import words
from tui.snapshot import SequenceView, Status
from tui.strips import Cell, strip_of
from tui.titled import Titled, changed

MARKS = {Status.WAITING: "·", Status.PREFILL: "▯", Status.DECODE: "▮", Status.DONE: "✓"}
_STYLES = {Status.WAITING: "queue", Status.PREFILL: "prefill", Status.DECODE: "decode", Status.DONE: "queue"}


@dataclass(frozen=True, slots=True)
class Row:
    """One request with what is known only over time: when its prompt will be done."""

    view: SequenceView
    eta_s: float | None = None


@dataclass(frozen=True, slots=True)
class _Column:
    """`priority` 0 is always shown; higher ones go first when columns are scarce. Width counts the gap."""

    title: str
    width: int
    priority: int
    text: Callable[[Row], str]
    is_right: bool = True


def _state(row: Row) -> str:
    return f"{MARKS[row.view.status]} {row.view.status.value}"


def _prompt(row: Row) -> str:
    # Nothing has been looked up for one that waits.
    is_known = row.view.num_cached is not None and row.view.status is not Status.WAITING
    cached = f" ({row.view.num_cached:,})" if is_known else ""
    return f"{words.count(row.view.num_prompt)}{cached}"


def _out(row: Row) -> str:
    return f"{row.view.num_output:,}" if row.view.num_output else "-"


def _own(row: Row) -> str:
    own = row.view.own_ms_per_token
    return "-" if own is None else f"{significant(own)} ms"


def _stalled(row: Row) -> str:
    stalled = row.view.stalled_ms
    return "-" if not stalled or stalled < 1 else words.duration(stalled / 1e3)


def _ttft(row: Row) -> str:
    return "-" if row.view.ttft_ms is None else words.duration(row.view.ttft_ms / 1e3)


def note(row: Row) -> str:
    """What happens next: what a request waits for, how far its prompt is, how much it may still say."""
    view = row.view
    if view.status is Status.WAITING:
        return f"for {view.waits_for}" if view.waits_for else ""
    if view.status is Status.PREFILL:
        return _prefill_note(row)
    if view.status is Status.DONE:
        return "ended"
    return f"up to {view.max_tokens:,} tokens" if view.max_tokens else ""


def _prefill_note(row: Row) -> str:
    share = row.view.prompt_share
    text = f"{100 * share:.0f} %" if share is not None else ""
    if row.eta_s is None:
        return text
    return f"{text}, {row.eta_s:,.0f} s left" if row.eta_s >= 1 else text


_COLUMNS = (
    _Column("id", 8, 0, lambda row: words.short_id(row.view.request_id), is_right=False),
    _Column("state", 11, 0, _state, is_right=False),
    _Column("prompt (cached)", 17, 0, _prompt),
    _Column("out", 7, 0, _out),
    _Column("own/token", 11, 2, _own),
    _Column("stalled", 10, 3, _stalled),
    _Column("ttft", 10, 4, _ttft),
)
_NOTE_MIN_COLUMNS = 20


class RequestList(Titled, can_focus=True):
    """Rows of requests with a cursor; scrolls when there are more than fit."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {
        "requests--blank",
        "requests--head",
        "requests--prefill",
        "requests--decode",
        "requests--stalled",
        "requests--queue",
        "requests--cursor",
    }
    DEFAULT_CSS = """
    RequestList {
        & .requests--head { color: $quiet; }
        & .requests--prefill { color: $prefill; }
        & .requests--decode { color: $decode; }
        & .requests--stalled { color: $stalled; }
        & .requests--queue { color: $queue; }
        & .requests--cursor { background: $panel; text-style: bold; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "Up", show=False),
        Binding("down,j", "move(1)", "Down", show=False),
        Binding("enter", "choose", "Figures", show=False),
    ]
    cursor: reactive[int] = reactive(0)

    @dataclass
    class Chosen(Message):
        """Enter, or a click, on a request."""

        view: SequenceView

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self._rows: Sequence[Row] = ()
        self._empty_text = ""
        self._is_held = False

    def show(self, rows: Sequence[Row], empty_text: str) -> None:
        """The rows from above. A cursor that somebody has moved stays with its request while that is there;
        any other stays at the top, where those that run are."""
        if list(rows) == list(self._rows) and empty_text == self._empty_text:
            return
        chosen, first_row, old = self.chosen, self._first_row, self._rows
        self._rows, self._empty_text = list(rows), empty_text
        ids = [row.view.request_id for row in rows]
        self._is_held = self._is_held and chosen is not None and chosen.request_id in ids
        self.cursor = ids.index(chosen.request_id) if self._is_held and chosen is not None else 0
        if not old or not rows or self._first_row != first_row:
            self.refresh()
        else:
            self.repaint_lines(index - first_row + 1 for index in changed(old, self._rows))

    @property
    def rows(self) -> Sequence[Row]:
        """What is shown now."""
        return self._rows

    @property
    def chosen(self) -> SequenceView | None:
        """The request under the cursor."""
        return self._rows[self.cursor].view if self.cursor < len(self._rows) else None

    def action_move(self, by: int) -> None:
        self.cursor = max(0, min(self.cursor + by, len(self._rows) - 1))
        self._is_held = True

    def action_choose(self) -> None:
        if self.chosen is not None:
            self.post_message(self.Chosen(self.chosen))

    def on_click(self, event: events.Click) -> None:
        index = self._first_row + event.y - 1
        if 0 <= index < len(self._rows) and event.y > 0:
            self.cursor = index
            self._is_held = True
            self.action_choose()

    # --- drawing

    @property
    def _first_row(self) -> int:
        """The first row that is visible, so that the cursor always is."""
        return max(0, self.cursor - max(1, self.size.height - 1) + 1)

    def _shown_columns(self) -> list[_Column]:
        columns = list(_COLUMNS)
        for priority in (4, 3, 2, 1):
            if sum(column.width for column in columns) + _NOTE_MIN_COLUMNS <= self.size.width:
                break
            columns = [column for column in columns if column.priority < priority]
        return columns

    def render_line(self, y: int) -> Strip:
        if y == 0:
            return self._strip(self._head(), self._style("blank"))
        index = self._first_row + y - 1
        if index < len(self._rows):
            return self._strip(*self._row(index))
        text = f" {self._empty_text}" if not self._rows and y == 1 else ""
        return self._strip([(text, self._style("queue"))], self._style("blank"))

    def _strip(self, cells: list[Cell], blank: Style) -> Strip:
        return strip_of(cells, self.size.width, blank)

    def _style(self, name: str) -> Style:
        return self.get_component_rich_style(f"requests--{name}")

    def _head(self) -> list[Cell]:
        text = "".join(_fit(column, column.title) for column in self._shown_columns())
        return [(f" {text}  what next", self._style("head"))]

    def _row(self, index: int) -> tuple[list[Cell], Style]:
        row = self._rows[index]
        is_chosen = index == self.cursor and self.has_focus
        base = self._style("cursor") if is_chosen else self._style("blank")
        state = self._style(_STYLES[row.view.status])
        quiet = row.view.status is Status.DONE
        cells: list[Cell] = [("›" if is_chosen else " ", base)]
        for column in self._shown_columns():
            style = self._style("queue") if quiet else base
            if column.title == "state":
                style = state
            elif column.title == "stalled" and column.text(row) != "-":
                style = self._style("stalled")
            cells.append((_fit(column, column.text(row)), base + Style(color=style.color)))
        cells.append((f"  {printable(note(row))}", base + Style(color=state.color)))
        return cells, base


def _fit(column: _Column, text: str) -> str:
    room = column.width - 2
    text = text if len(text) <= room else text[: room - 1] + "…"
    return f"{text:>{room}}  " if column.is_right else f"{text:<{room}}  "
