"""Two one-line widgets: what is watched (top), and what stands out (bottom)."""

from __future__ import annotations

from typing import ClassVar

from rich.cells import cell_len
from rich.style import Style
from textual.strip import Strip
from textual.widget import Widget

from edgeserve.ink import printable
from tui.strips import Cell, strip_of


class TwoEndedLine(Widget):
    """Parts from the left, parts from the right; the right end stays when the room is scarce.

    A part is (text, style name); style names are "plain", "name", "quiet", "prefill", "decode", "stalled".
    """

    COMPONENT_CLASSES: ClassVar[set[str]] = {
        "line--plain",
        "line--name",
        "line--quiet",
        "line--prefill",
        "line--decode",
        "line--stalled",
    }
    DEFAULT_CSS = """
    TwoEndedLine {
        height: 1;
        & .line--name { text-style: bold; }
        & .line--quiet { color: $quiet; }
        & .line--prefill { color: $prefill; }
        & .line--decode { color: $decode; }
        & .line--stalled { color: $stalled; text-style: bold; }
    }
    """
    Part = tuple[str, str]

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self._left: list[TwoEndedLine.Part] = []
        self._right: list[TwoEndedLine.Part] = []

    def show(self, left: list[Part], right: list[Part] | None = None) -> None:
        right = right or []
        if (left, right) != (self._left, self._right):
            self._left, self._right = left, right
            self.refresh()

    @property
    def text(self) -> str:
        """What it says, without styles."""
        return "".join(part for part, _ in self._left) + "  " + "".join(part for part, _ in self._right)

    def render_line(self, y: int) -> Strip:
        width, blank = self.size.width - 2, self.get_component_rich_style("line--plain")
        right = [self._cell(part) for part in self._right]
        room = width - sum(cell_len(text) for text, _ in right)
        left = _cut([self._cell(part) for part in self._left], max(0, room - (2 if right else 0)))
        gap = room - sum(cell_len(text) for text, _ in left)
        cells = [(" ", blank), *left, (" " * max(0, gap), blank), *right]
        return strip_of(cells, self.size.width, blank)

    def _cell(self, part: Part) -> Cell:
        text, name = part
        return printable(text), self.get_component_rich_style(f"line--{name}")


def _cut(cells: list[Cell], width: int) -> list[Cell]:
    """As much as `width` holds, with a sign where something was left out."""
    kept: list[tuple[str, Style]] = []
    for text, style in cells:
        if cell_len(text) <= width:
            kept.append((text, style))
            width -= cell_len(text)
            continue
        while text and cell_len(text) > width - 1:
            text = text[:-1]
        return [*kept, (text + "…", style)] if width > 0 else kept
    return kept
