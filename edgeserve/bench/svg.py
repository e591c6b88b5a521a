"""Small line charts and timelines as SVG text, readable on light and dark pages.

Owns: scales, ticks, strokes and the palette. Does not know: benchmarks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 420, 260
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 46, 40
LEGEND_LINE = 13
MARK_ROOM = 0.25
MAX_LABEL_CHARS = 17
# Shape and label tell the lines apart as well: colour alone never does.
DASHES = ("", "6 3", "2 3", "9 3 2 3")

STYLE = """
text { font: 11px system-ui, sans-serif; fill: #333 }
.title { font-weight: 600; font-size: 12px }
.axis { stroke: #999; fill: none } .grid { stroke: #ddd; fill: none }
.prefill { stroke: #b4741a; fill: #b4741a } .decode { stroke: #0d8577; fill: #0d8577 }
.stalled { stroke: #c2342b; fill: #c2342b } .queue { stroke: #777; fill: #777 }
polyline { fill: none; stroke-width: 1.8 } rect { stroke: none }
circle.hollow { fill-opacity: 0; stroke-width: 1.4 } .mark { stroke-dasharray: 2 3 }
@media (prefers-color-scheme: dark) {
  text { fill: #ddd } .axis { stroke: #777 } .grid { stroke: #444 }
  .prefill { stroke: #e0a448; fill: #e0a448 } .decode { stroke: #3fbfae; fill: #3fbfae }
  .stalled { stroke: #f0736a; fill: #f0736a } .queue { stroke: #aaa; fill: #aaa }
}
polyline.prefill, polyline.decode, polyline.stalled, polyline.queue { fill: none }
"""


@dataclass(frozen=True)
class Series:
    """A line. `role` is prefill, decode, stalled or queue; points with an undefined y are left out."""

    label: str
    role: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Mark:
    """A place on the x axis that a reader looks for, as a dotted line with its name."""

    label: str
    role: str
    x: float


@dataclass(frozen=True)
class Chart:
    """`x_top`: where the x axis at least reaches, so that charts beside each other can be compared."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    has_steps: bool = False  # a distribution: the value holds until the next point
    x_top: float = 0.0
    marks: tuple[Mark, ...] = ()

    @property
    def is_empty(self) -> bool:
        return not any(series.points for series in self.series)


@dataclass(frozen=True)
class Axis:
    """Linear, from 0 to a round number above the largest value."""

    top: float
    step: float

    @classmethod
    def to(cls, largest: float) -> Axis:
        if not largest > 0:
            return cls(1.0, 0.5)
        raw = largest / 4
        power = 10 ** math.floor(math.log10(raw))
        step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw)
        return cls(step * math.ceil(largest / step - 1e-9), step)

    @property
    def ticks(self) -> list[float]:
        return [index * self.step for index in range(round(self.top / self.step) + 1)]


def charts(title: str, panels: Sequence[Chart], num_columns: int = 2) -> str:
    """Panels side by side in one document."""
    shown = [panel for panel in panels if not panel.is_empty]
    num_columns = max(1, min(num_columns, len(shown)))
    num_rows = math.ceil(len(shown) / num_columns)
    body = "".join(
        f'<g transform="translate({index % num_columns * WIDTH},{24 + index // num_columns * HEIGHT})">'
        f"{''.join(_panel(panel))}</g>"
        for index, panel in enumerate(shown)
    )
    return document(title, num_columns * WIDTH, 24 + num_rows * HEIGHT, body)


def document(title: str, width: int, height: int, body: str) -> str:
    name = escape(title, quote=True)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" aria-label="{name}"><style>{STYLE}</style>'
        f'<text class="title" x="8" y="16">{name}</text>{body}</svg>\n'
    )


def text(x: float, y: float, words: str, anchor: str = "start", css: str = "") -> str:
    kind = f' class="{css}"' if css else ""
    return f'<text{kind} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, css: str) -> str:
    return f'<line class="{css}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def box(x: float, y: float, width: float, height: float, css: str) -> str:
    return f'<rect class="{css}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"/>'


def _panel(chart: Chart) -> Iterator[str]:
    points = [point for series in chart.series for point in series.points]
    x_axis = Axis.to(max(chart.x_top, *(x for x, _ in points)))
    # Names of marks stand inside, above the lines.
    y_axis = Axis.to(max(y for _, y in points) * (1 + MARK_ROOM * bool(chart.marks)))
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    # The legend stands above the plot, two lines of it beside the title's.
    top = TOP + LEGEND_LINE * max(0, len(chart.series) - 2)

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (right - LEFT) * x / x_axis.top
        return across, bottom - (bottom - top) * y / y_axis.top

    yield text(8, 14, chart.title, css="title")
    for tick in y_axis.ticks:
        _, y = place(0, tick)
        yield line(LEFT, y, right, y, "axis" if tick == 0 else "grid")
        yield text(LEFT - 6, y + 4, f"{tick:.4g}", "end")
    for tick in x_axis.ticks:
        x, _ = place(tick, 0)
        yield line(x, bottom, x, bottom + 4, "axis")
        yield text(x, bottom + 16, f"{tick:.4g}", "middle")
    yield text((LEFT + right) / 2, HEIGHT - 8, chart.x_label, "middle")
    yield text(8, top - 18, chart.y_label)
    for index, mark in enumerate(chart.marks):
        x, _ = place(mark.x, 0)
        is_left = x < (LEFT + right) / 2
        yield f'<line class="{mark.role} mark" x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{bottom}"/>'
        beside, anchor = (x + 4, "start") if is_left else (x - 4, "end")
        yield text(beside, top + 11 + 13 * index, mark.label, anchor)
    for index, series in enumerate(chart.series):
        yield from _series(series, index, [place(x, y) for x, y in series.points], chart.has_steps)


def _series(
    series: Series, index: int, points: Sequence[tuple[float, float]], has_steps: bool
) -> Iterator[str]:
    if not points:
        return
    dash = f' stroke-dasharray="{DASHES[index % len(DASHES)]}"' if index % len(DASHES) else ""
    path = list(_stepped(points)) if has_steps else points
    drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in path)
    yield f'<polyline class="{series.role}"{dash} points="{drawn}"/>'
    if not has_steps:
        hollow = " hollow" if index % 2 else ""
        for x, y in points:
            yield f'<circle class="{series.role}{hollow}" cx="{x:.1f}" cy="{y:.1f}" r="2.4"/>'
    x = WIDTH - RIGHT - 118
    y = TOP - 20 + LEGEND_LINE * index
    yield f'<line class="{series.role}"{dash} x1="{x}" y1="{y}" x2="{x + 24}" y2="{y}" stroke-width="2"/>'
    yield text(x + 30, y + 4, _cut(series.label))


def _cut(label: str) -> str:
    return label if len(label) <= MAX_LABEL_CHARS else f"{label[: MAX_LABEL_CHARS - 1]}…"


def _stepped(points: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    previous: float | None = None
    for x, y in points:
        if previous is not None:
            yield x, previous
        yield x, y
        previous = y
