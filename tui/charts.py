"""Two charts: a speed over time, and the last steps one by one.

Own how values become rows of characters, with axes, units and the target's line. Know nothing of servers:
whoever shows them hands in values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.style import Style
from textual.strip import Strip

from tui.snapshot import Step
from tui.strips import (
    EIGHTHS,
    Cell,
    axis_labels,
    bar_character,
    bar_eighths,
    character_in,
    nice_top,
    strip_of,
)
from tui.titled import Titled

AXIS_COLUMNS = 6
_TICK_COLUMNS = 20
DECODE_MARK, PREFILL_MARK, MIXED_MARK = "▮", "▯", "◧"


class _Chart(Titled):
    """Rows of a plot with a labelled axis to the left."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {
        "chart--blank",
        "chart--prefill",
        "chart--decode",
        "chart--axis",
        "chart--target",
        "chart--boundary",
        "chart--solid-prefill",
        "chart--solid-decode",
    }
    DEFAULT_CSS = """
    _Chart {
        & .chart--prefill { color: $prefill; }
        & .chart--decode { color: $decode; }
        & .chart--boundary { color: $decode; background: $prefill; }
        /* For full cells: fonts whose block is lower than the line would leave stripes. */
        & .chart--solid-prefill { color: $prefill; background: $prefill; }
        & .chart--solid-decode { color: $decode; background: $decode; }
        & .chart--axis { color: $quiet; }
        & .chart--target { color: $stalled; }
    }
    """

    def style_of(self, name: str) -> Style:
        """Remembered by the widget, unlike its own style, which is worked out anew at every call."""
        return self.get_component_rich_style(f"chart--{name}")

    @property
    def num_columns(self) -> int:
        """Columns of the plot itself."""
        return max(0, self.size.width - AXIS_COLUMNS)

    def axis_cells(self, label: str, mark: str) -> list[Cell]:
        return [(f"{label:>{AXIS_COLUMNS - 1}}{mark}", self.style_of("axis"))]


class TimeChart(_Chart):
    """A bar for each stretch of time, the newest on the right, and a line at the target."""

    def __init__(self, kind: str, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self._kind = kind
        self._values: Sequence[float | None] = ()
        self._column_s = 1.0
        self._target: float | None = None
        self._top = 1.0

    def show(self, values: Sequence[float | None], column_s: float, target: float | None = None) -> None:
        """`values` are the newest `num_columns` of them, each over `column_s`; None where nothing ran."""
        values = list(values)
        if (values, column_s, target) == (self._values, self._column_s, self._target):
            return
        self._values, self._column_s, self._target = values, column_s, target
        known = [value for value in values if value is not None]
        self._top = nice_top(max([*known, 1.1 * target if target and known else 0.0], default=0.0))
        self.refresh()

    @property
    def values(self) -> Sequence[float | None]:
        """What is drawn now."""
        return self._values

    @property
    def top(self) -> float:
        """The value at the upper end of the axis."""
        return self._top

    @property
    def _num_rows(self) -> int:
        return max(1, self.size.height - (2 if self.size.height >= 6 else 1))

    def render_line(self, y: int) -> Strip:
        width, blank = self.size.width, self.style_of("blank")
        num_rows = self._num_rows
        if y < num_rows:
            return strip_of(self._plot_cells(y, num_rows), width, blank)
        has_axis = self.size.height >= 6
        if has_axis and y == num_rows:
            return strip_of(self._axis_line(), width, blank)
        return strip_of([(self._time_labels(), self.style_of("axis"))], width, blank)

    def _plot_cells(self, y: int, num_rows: int) -> list[Cell]:
        row, top, num_columns = num_rows - 1 - y, self._top, self.num_columns
        label = axis_labels(top, num_rows).get(y, "")
        cells = self.axis_cells(label, "┤" if label else "│")
        bar, target = self.style_of(self._kind), self.style_of("target")
        solid = self.style_of(f"solid-{self._kind}")
        on_bar = Style(color=target.color, bgcolor=bar.color)
        is_target_row = self._target_row(num_rows) == row
        heights = [bar_eighths(value or 0.0, top, num_rows) for value in list(self._values)[-num_columns:]]
        for height in [0] * (num_columns - len(heights)) + heights:
            character = character_in(row, height)
            if is_target_row and character in " █":
                cells.append(("╌", on_bar if character == "█" else target))
            else:
                cells.append((character, solid if character == "█" else bar))
        return cells

    def _target_row(self, num_rows: int) -> int | None:
        if not self._target or self._target > self._top:
            return None
        return min(num_rows - 1, int(num_rows * self._target / self._top))

    def _axis_line(self) -> list[Cell]:
        ages = range(self.num_columns, 0, -1)
        marks = "".join("┬" if age % _TICK_COLUMNS == 0 else "─" for age in ages)
        return [*self.axis_cells("0", "┼"), (marks, self.style_of("axis"))]

    def _time_labels(self) -> str:
        """Ages under the ticks, `now` at the right end."""
        width = self.size.width
        line = [" "] * width
        for columns in range(_TICK_COLUMNS, self.num_columns + 1, _TICK_COLUMNS):
            text = _age_text(columns * self._column_s)
            start = max(0, width - columns - len(text) // 2)
            line[start : start + len(text)] = text
        line[width - 3 :] = "now"
        return "".join(line[:width])


def _age_text(seconds: float) -> str:
    return f"-{seconds:g} s" if seconds < 120 else f"-{seconds / 60:g} min"


class StepTimeline(_Chart):
    """The last steps, a column each: its height is the step's time, split by prefill and decode tokens.

    A row of marks below says the kind of each step by its shape.
    """

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self._steps: list[Step] = []
        self._reason = ""
        self._target_ms: float | None = None
        self._top = 1.0

    def show(self, steps: list[Step], target_ms: float | None) -> None:
        """The newest steps, at most `num_columns` of them."""
        # Steps are never changed, so the last one and the count tell; a wider chart is told more of them.
        told = (steps[-1:], len(steps), target_ms, "")
        if told == (self._steps[-1:], len(self._steps), self._target_ms, self._reason):
            return
        self._steps, self._target_ms, self._reason = steps, target_ms, ""
        longest_ms = max((step.duration_s * 1e3 for step in steps), default=0.0)
        self._top = nice_top(max(longest_ms, 1.1 * target_ms if target_ms and steps else 0.0))
        self.refresh()

    def show_absent(self, reason: str) -> None:
        """A sentence in place of steps."""
        if reason != self._reason:
            self._steps, self._reason = [], reason
            self.refresh()

    @property
    def steps(self) -> Sequence[Step]:
        """What is drawn now."""
        return self._steps

    def render_line(self, y: int) -> Strip:
        num_rows, num_columns = max(1, self.size.height - 1), self.num_columns
        blank = self.style_of("blank")
        if self._reason:
            text = f" {self._reason}" if y == 0 else ""
            return strip_of([(text, self.style_of("axis"))], self.size.width, blank)
        steps = self._steps[-num_columns:] if num_columns else []
        num_empty = num_columns - len(steps)
        if y >= num_rows:
            cells = [*self.axis_cells("step", " "), (" " * num_empty, blank)]
            return strip_of([*cells, *map(self._mark, steps)], self.size.width, blank)
        row = num_rows - 1 - y
        label = axis_labels(self._top, num_rows).get(y, "")
        is_target_row = self._target_row(num_rows) == row
        empty = ("╌", self.style_of("target")) if is_target_row else (" ", blank)
        cells = [*self.axis_cells(label, "┤" if label else "│"), *[empty] * num_empty]
        cells += [self._cell(step, row, num_rows, empty) for step in steps]
        return strip_of(cells, self.size.width, blank)

    def _mark(self, step: Step) -> Cell:
        if step.num_prefill and step.num_decode:
            return MIXED_MARK, self.style_of("prefill")
        if step.num_prefill:
            return PREFILL_MARK, self.style_of("prefill")
        return DECODE_MARK, self.style_of("decode")

    def _cell(self, step: Step, row: int, num_rows: int, empty: Cell) -> Cell:
        """What a step shows in a row; `empty` where it does not reach."""
        character = bar_character(step.duration_s * 1e3, self._top, row, num_rows)
        if character == " ":
            return empty
        split = self._decode_eighths(step, num_rows) - 8 * row
        if 0 < split < 8 and character == "█":
            return EIGHTHS[split], self.style_of("boundary")
        kind = "decode" if split > 0 else "prefill"
        if character != "█":
            return character, self.style_of(kind)
        if empty[0] != " ":
            return empty[0], Style(color=empty[1].color, bgcolor=self.style_of(kind).color)
        return character, self.style_of(f"solid-{kind}")

    def _decode_eighths(self, step: Step, num_rows: int) -> int:
        """Height of the lower, decode part; an eighth at least where there is one."""
        share = step.num_decode / max(1, step.num_decode + step.num_prefill)
        height = round(8 * num_rows * share * step.duration_s * 1e3 / self._top)
        return max(1, height) if step.num_decode else 0

    def _target_row(self, num_rows: int) -> int | None:
        if not self._target_ms or self._target_ms > self._top:
            return None
        return min(num_rows - 1, int(num_rows * self._target_ms / self._top))
