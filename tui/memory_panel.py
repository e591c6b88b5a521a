"""KV cells and memory: what is used, what can be reused, what was planned against what is real.

Owns the wording and the bars, in a tall form for a column of its own and a flat one for a narrow screen.
"""

from __future__ import annotations

from typing import ClassVar

from rich.style import Style
from textual.strip import Strip

from tui import words
from tui.server_memory import PlannedMemory, ProcessMemory
from tui.snapshot import Cells
from tui.strips import Cell, meter, strip_of
from tui.titled import Titled, changed

_LABEL_COLUMNS = 10
_Line = list[Cell]


class MemoryPanel(Titled):
    """Shows what it was last told; lines that nobody knows say so."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {
        "memory--blank",
        "memory--label",
        "memory--used",
        "memory--cached",
        "memory--rest",
    }
    DEFAULT_CSS = """
    MemoryPanel {
        & .memory--label { color: $quiet; }
        & .memory--used { color: $decode; }
        & .memory--cached { color: $cached; }
        & .memory--rest { color: $frame-focus; }
    }
    """

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self._shown: tuple[Cells | None, PlannedMemory | None, ProcessMemory | None, str] = (
            None,
            None,
            None,
            "",
        )
        self._lines: list[_Line] = []
        self._drawn_for: object = None

    def show(
        self, cells: Cells | None, planned: PlannedMemory | None, real: ProcessMemory | None, note: str = ""
    ) -> None:
        """`note` says why something is not known."""
        if (cells, planned, real, note) != self._shown:
            self._shown = (cells, planned, real, note)
            old = self._lines
            self._arrange()
            self.repaint_lines(changed(old, self._lines))

    def _arrange(self) -> None:
        """The lines as they are now, if anything that they depend on has changed."""
        drawn_for = (self._shown, self.size)
        if drawn_for != self._drawn_for:
            self._drawn_for = drawn_for
            self._lines = self._tall_lines() if self.size.height > 3 else self._flat_lines()

    def render_line(self, y: int) -> Strip:
        self._arrange()
        lines = self._lines
        return strip_of(lines[y] if y < len(lines) else [], self.size.width, self._style("blank"))

    def notify_style_update(self) -> None:
        """A theme has reached the widget, later than the application: lines arranged in between have the old
        colours."""
        super().notify_style_update()
        self._drawn_for = None

    # --- lines

    def _tall_lines(self) -> list[_Line]:
        cells, planned, real, note = self._shown
        lines = self._cell_lines(cells)
        if planned is not None:
            lines += self._planned_lines(planned)
        lines += self._real_lines(real)
        return [*lines, *([self._text("", note)] if note else [])]

    def _flat_lines(self) -> list[_Line]:
        cells, planned, real, note = self._shown
        lines = self._cell_lines(cells)[:1]
        parts = [f"{words.size(planned.total_bytes)} planned"] if planned else []
        parts += [f"{_real_text(real)}"] if real else []
        if parts or not note:
            lines.append(self._text("memory", "   ".join(parts) or words.NA))
        return [*lines, *([self._text("", note)] if note else [])]

    def _cell_lines(self, cells: Cells | None) -> list[_Line]:
        if cells is None:
            return [self._text("cells", words.NA)]
        cached = cells.cached or 0
        parts = [
            ((cells.used - cached) / cells.total, "█", self._style("used")),
            (cached / cells.total, "▒", self._style("cached")),
        ]
        text = f"{cells.used:,} of {cells.total:,}"
        lines = [self._bar("cells", parts, text, f"▒ {cached:,} reusable" if cells.cached else "")]
        if self.size.height > 3 and cells.cached:
            lines.append(self._text("", f"▒ {cached:,} reusable (idle)"))
        return lines

    def _planned_lines(self, planned: PlannedMemory) -> list[_Line]:
        about = "~" if planned.is_compute_estimated else ""
        rows = (
            ("weights", planned.weights_bytes, ""),
            ("kv", planned.kv_bytes, ""),
            ("compute", planned.compute_bytes, about),
            ("other", planned.other_bytes, "~"),
        )
        most = max(n_bytes for _, n_bytes, _ in rows) or 1
        lines = [
            self._bar(name, [(n_bytes / most, "▬", self._style("rest"))], f"{mark}{words.size(n_bytes)}")
            for name, n_bytes, mark in rows
        ]
        return [*lines, self._text("planned", f"{words.size(planned.total_bytes)} in all")]

    def _real_lines(self, real: ProcessMemory | None) -> list[_Line]:
        if real is None:
            return [self._text("real", words.NA)]
        if real.file_bytes is None:
            return [self._text("real", f"{words.size(real.resident_bytes)} resident")]
        return [
            self._text("real", f"{words.size(real.private_bytes)} private"),
            self._text("", f"+ {words.size(real.file_bytes)} from files"),
        ]

    # --- pieces

    def _style(self, name: str) -> Style:
        return self.get_component_rich_style(f"memory--{name}")

    def _text(self, label: str, text: str) -> _Line:
        return [(f" {label:<{_LABEL_COLUMNS - 2}} ", self._style("label")), (text, self._style("blank"))]

    def _bar(self, label: str, parts: list[tuple[float, str, Style]], text: str, more: str = "") -> _Line:
        """Label, bar and figure; `more` only where the line is long enough for it."""
        width = max(4, min(30, self.size.width - _LABEL_COLUMNS - 19))
        bar = meter(parts, width, ("░" if parts[0][1] == "█" else " ", self._style("rest")))
        has_room = self.size.width > _LABEL_COLUMNS + width + 24 + len(more)
        tail = [(f"   {more}", self._style("label"))] if more and has_room else []
        return [
            (f" {label:<{_LABEL_COLUMNS - 2}} ", self._style("label")),
            *bar,
            (f"  {text}", self._style("blank")),
            *tail,
        ]


def _real_text(real: ProcessMemory) -> str:
    if real.private_bytes is None:
        return f"{words.size(real.resident_bytes)} resident"
    return f"{words.size(real.private_bytes)} private + {words.size(real.file_bytes)} from files"
