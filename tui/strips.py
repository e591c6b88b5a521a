"""Rows of styled characters, and the scales and bars that charts are made of. Knows no figures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

EIGHTHS = " ▁▂▃▄▅▆▇█"
_NICE = (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)

Cell = tuple[str, Style]


def strip_of(cells: Iterable[Cell], width: int, blank: Style) -> Strip:
    """One row of exactly `width` cells; neighbours of one style become one segment."""
    segments: list[Segment] = []
    texts: list[str] = []
    current: Style | None = None
    for text, style in cells:
        # By identity: a widget hands out one object for one style, and comparing styles is slow.
        if style is not current and texts:
            segments.append(Segment("".join(texts), current))
            texts = []
        current = style
        texts.append(text)
    if texts:  # Textual's filters and its opacity expect a style of every segment, of an empty one too
        segments.append(Segment("".join(texts), current))
    return Strip(segments).adjust_cell_length(width, blank)


def nice_top(value: float) -> float:
    """The end of an axis that holds `value`: a round number, 1 when there is nothing to hold."""
    if not value > 0 or not math.isfinite(value):
        return 1.0
    magnitude = 10.0 ** math.floor(math.log10(value))
    return next(step * magnitude for step in (*_NICE, 20.0) if step * magnitude >= value * (1 - 1e-9))


def axis_text(value: float) -> str:
    """A round number, shortly: `0.5`, `40`, `1,500`, `12k`."""
    if value >= 10_000:
        return f"{value / 1000:g}k"
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:g}"


def bar_eighths(value: float, top: float, num_rows: int) -> int:
    """The height of a bar of `value` in eighths of a row, where `num_rows` reach up to `top`.

    What is not nothing is at least an eighth high: a bar that vanishes would say 0.
    """
    return 0 if value <= 0 else max(1, min(8 * num_rows, round(8 * num_rows * value / top)))


def bar_character(value: float, top: float, row: int, num_rows: int) -> str:
    """The character of such a bar in `row`; 0 is the lowest."""
    return character_in(row, bar_eighths(value, top, num_rows))


def character_in(row: int, height: int) -> str:
    """The character in `row` of a bar that is so many eighths of a row high."""
    return EIGHTHS[max(0, min(8, height - 8 * row))]


def axis_labels(top: float, num_rows: int) -> dict[int, str]:
    """Labels by row from above: the top, and the middle where a row has it."""
    labels = {0: axis_text(top)}
    if num_rows >= 4 and num_rows % 2 == 0:
        labels[num_rows // 2] = axis_text(top / 2)
    return labels


def meter(shares: Sequence[tuple[float, str, Style]], width: int, rest: Cell) -> list[Cell]:
    """A horizontal bar: each share (0 to 1) with its own character, then the rest.

    Ends are rounded on the running sum, so that the parts never exceed the whole; a share that is not
    nothing gets a cell while there is room.
    """
    cells: list[Cell] = []
    total = 0.0
    for share, character, style in shares:
        total += share
        end = min(width, max(round(total * width), len(cells) + 1 if share > 0 else 0))
        cells += [(character, style)] * (end - len(cells))
    return [*cells, *([rest] * (width - len(cells)))]
