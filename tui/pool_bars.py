"""Memory of a plan, one bar for each pool: parts of different shape, the free rest, and the figures.

Owns the drawing only; whoever shows it hands in bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from rich.style import Style
from textual.reactive import reactive
from textual.strip import Strip
from textual.widget import Widget

from edgeserve.ink import printable
from edgeserve.planner.words import size
from tui.strips import Cell, meter, strip_of

_MARKS = {"weights": "█", "kv": "▓", "compute": "▒", "other": "░"}
_MOST_POOLS_IN_FULL = 3
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
    """For each pool: name and sum, bar, and its parts in a row or two, or with room in a row each."""

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

    has_room: reactive[bool] = reactive(False, layout=True)
    """Each part then has a row and a bar of its own."""

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
        return max(1, sum(len(self._rows(pool, width)) for pool in self._pools))

    def render_line(self, y: int) -> Strip:
        width = self.size.width
        rows = [row for pool in self._pools for row in self._rows(pool, width)]
        return strip_of(rows[y] if y < len(rows) else [], width, self._style("blank"))

    def _rows(self, pool: PoolBar, width: int) -> list[list[Cell]]:
        parts = [(name, n_bytes) for name, n_bytes in pool.parts.items() if n_bytes]
        rows = [self._head(pool), self._bar(pool, width)]
        if self.has_room and len(self._pools) <= _MOST_POOLS_IN_FULL:
            return rows + [self._part(pool, name, n_bytes, width) for name, n_bytes in parts]
        if width >= _WIDE_COLUMNS:
            return [*rows, self._parts(parts)]
        return [*rows, self._parts(parts[:2]), self._parts(parts[2:])]

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

    def _bar(self, pool: PoolBar, width: int) -> list[Cell]:
        """Over the larger of usable and needed, so that a misfit is seen as one."""
        width = max(8, width - 1)
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

    def _part(self, pool: PoolBar, name: str, n_bytes: int, width: int) -> list[Cell]:
        """A part by itself, its bar over the largest part's."""
        share = n_bytes / max(1, pool.usable_bytes)
        percent = f"{100 * share:.0f} %" if share >= 0.01 else "< 1 %"
        most = max(pool.parts.values())
        rest = (" ", self._style("blank"))
        return [
            (f"{_MARKS[name]} ", self._style(name)),
            (f"{name:<8}{size(n_bytes):>10}{percent:>7}  ", self._style("label")),
            *meter([(n_bytes / most, _MARKS[name], self._style(name))], max(8, width - 28), rest),
        ]
