"""Charts in characters, for a terminal or a plain text file.

Owns: the grid of characters. Does not know: benchmarks, colours (every line has a mark of its own).
"""

from __future__ import annotations

from collections.abc import Sequence

from edgeserve.bench.svg import Axis, Chart

MARKS = "ox+*#@"


def text_chart(chart: Chart, width: int = 64, height: int = 11) -> str:
    """Points on a grid of `width` by `height` characters, with the ends of both axes named."""
    points = [point for series in chart.series for point in series.points]
    if not points:
        return ""
    x_axis = Axis.to(max(chart.x_top, *(x for x, _ in points)))
    y_axis = Axis.to(max(y for _, y in points))
    grid = [[" "] * width for _ in range(height)]
    for index, series in enumerate(chart.series):
        for x, y in series.points:
            column = round((width - 1) * x / x_axis.top)
            row = height - 1 - round((height - 1) * y / y_axis.top)
            grid[row][column] = MARKS[index % len(MARKS)]
    names = [f"{y_axis.top * (height - 1 - row) / (height - 1):.3g}" for row in range(height)]
    margin = max(len(name) for name in (names[0], names[height // 2], "0"))
    shown = {0, height // 2, height - 1}
    lines = [
        f"{(names[row] if row in shown else ''):>{margin}} ┤{''.join(cells).rstrip()}"
        for row, cells in enumerate(grid)
    ]
    right = f"{x_axis.top:.4g} {chart.x_label}"
    legend = "  ".join(
        f"{MARKS[index % len(MARKS)]} {series.label}"
        for index, series in enumerate(chart.series)
        if series.points
    )
    foot = [f"{'':>{margin}} └{'─' * width}", f"{'':>{margin}}  0{right:>{width - 1}}"]
    return "\n".join([f"{chart.title}, {chart.y_label}   {legend}", *lines, *foot])


def text_timeline(
    rows: Sequence[tuple[str, Sequence[float]]],
    bar: tuple[str, float, float],
    width: int = 64,
) -> str:
    """Ticks on rows, and one bar: where each tick falls, in `width` characters from the first to the last."""
    stamps = [at for _, row in rows for at in row]
    start, end = min(stamps), max(*stamps, bar[2])
    scale = (width - 1) / (end - start) if end > start else 0.0

    def column(at: float) -> int:
        return min(width - 1, max(0, round((at - start) * scale)))

    margin = max(len(name) for name in (*(name for name, _ in rows), bar[0]))
    lines = []
    for name, row in rows:
        hit = {column(at) for at in row}
        lines.append(f"{name:>{margin}} {''.join('▮' if index in hit else '·' for index in range(width))}")
    first, last = column(bar[1]), column(bar[2])
    cells = "".join("▯" if first <= index <= last else " " for index in range(width))
    lines.append(f"{bar[0]:>{margin}} {cells}".rstrip())
    lines.append(f"{'':>{margin}} 0 s{end - start:>{width - 5}.2f} s")
    return "\n".join(lines)
