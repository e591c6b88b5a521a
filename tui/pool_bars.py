"""Memory of a plan, one bar for each pool: parts of different shape, the free rest, and the figures.

Owns the drawing only; whoever shows it hands in bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from rich.style import Style
from textual.strip import Strip
from textual.widget import Widget

from edgeserve.ink import printable
from edgeserve.planner.words import size
from tui.strips import Cell, meter, strip_of

_MARKS = {"weights": "█", "kv": "▓", "compute": "▒", "other": "░"}
_WIDE_COLUMNS = 72
"""From here on all parts of a pool stand in one row."""


@dataclass(frozen=True, slots=True)
class PoolBar:
    """`parts` are expected bytes by name; `high_bytes` is what must be free; `reason` why usable is less than
    all."""

    name: str
    parts: Mapping[str, int]
    high_bytes: int
    usable_bytes: int
    total_bytes: int

    @property
    def fits(self) -> bool:
        return self.high_bytes <= self.usable_bytes


class PoolBars(Widget):
    """For each pool: name and sum, bar, and its parts in one or two rows."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {
        "bars--blank",
        "bars--weights",
        "bars--kv",
        "bars--compute",
        "bars--other",
        "bars--rest",
        "bars--label",
        "bars--over",
    }
    DEFAULT_CSS = """
    PoolBars {
        height: auto;
        & .bars--weights { color: $frame-focus; }
        & .bars--kv { color: $decode; }
        & .bars--compute { color: $prefill; }
        & .bars--other { color: $quiet; }
        & .bars--rest { color: $frame; }
        & .bars--label { color: $quiet; }
        & .bars--over { color: $stalled; text-style: bold; }
    }
    """

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self._pools: Sequence[PoolBar] = ()

    def show(self, pools: Sequence[PoolBar]) -> None:
        """The pools from above, cards first."""
        if list(pools) != list(self._pools):
            self._pools = list(pools)
            self.refresh(layout=True)

    @property
    def pools(self) -> Sequence[PoolBar]:
        """What is drawn now."""
        return self._pools

    def get_content_height(self, container: object, viewport: object, width: int) -> int:
        return max(1, _rows_per_pool(width) * len(self._pools))

    def render_line(self, y: int) -> Strip:
        index, row = divmod(y, _rows_per_pool(self.size.width))
        cells: list[Cell] = []
        if index < len(self._pools):
            cells = self._row(self._pools[index], row)
        return strip_of(cells, self.size.width, self._style("blank"))

    def _row(self, pool: PoolBar, row: int) -> list[Cell]:
        if row == 0:
            return self._head(pool)
        if row == 1:
            return self._bar(pool)
        parts = [(name, n_bytes) for name, n_bytes in pool.parts.items() if n_bytes]
        if self.size.width < _WIDE_COLUMNS:
            parts = parts[:2] if row == 2 else parts[2:]
        return self._parts(parts)

    def _style(self, name: str) -> Style:
        return self.get_component_rich_style(f"bars--{name}")

    def _head(self, pool: PoolBar) -> list[Cell]:
        sign = "≤ " if pool.high_bytes > sum(pool.parts.values()) else ""
        text = f"  {sign}{size(pool.high_bytes)} of {size(pool.usable_bytes)}"
        cells = [(printable(pool.name), self._style("label")), (text, self._style("blank"))]
        if not pool.fits:
            over = size(pool.high_bytes - pool.usable_bytes)
            cells.append((f"   too much by {over}", self._style("over")))
        return cells

    def _bar(self, pool: PoolBar) -> list[Cell]:
        """Over the larger of usable and needed, so that a misfit is seen as one."""
        width = max(8, self.size.width - 1)
        whole = max(1, pool.usable_bytes, pool.high_bytes)
        parts = [(n_bytes / whole, _MARKS[name], self._style(name)) for name, n_bytes in pool.parts.items()]
        cells = meter(parts, width, ("·", self._style("rest")))
        if not pool.fits:
            at = min(width - 1, int(width * pool.usable_bytes / whole))
            cells[at] = ("┃", self._style("over"))
        return cells

    def _parts(self, parts: Sequence[tuple[str, int]]) -> list[Cell]:
        cells: list[Cell] = []
        for name, n_bytes in parts:
            cells.append((f"{_MARKS[name]} ", self._style(name)))
            cells.append((f"{name} {size(n_bytes)}  ", self._style("label")))
        return cells


def _rows_per_pool(width: int) -> int:
    return 3 if width >= _WIDE_COLUMNS else 4
