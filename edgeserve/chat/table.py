"""The rows of a Markdown table, padded so that the columns stand under each other.

Owns splitting into cells, widths in terminal cells and alignment. Only spaces and dashes are added: the
result is still the same Markdown table.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from prompt_toolkit.utils import get_cwidth

_DELIMITER_CELL = re.compile(r"\s*:?-+:?\s*")
# A bar that is not escaped. Bars inside `code` separate cells too: GitHub's rule for tables.
_BAR = re.compile(r"(?<!\\)\|")


def split_row(row: str) -> list[str]:
    """The cells of one row, without the outer bars and surrounding spaces."""
    inner = row.strip().removeprefix("|")
    cells = [cell.strip() for cell in _BAR.split(inner)]
    return cells[:-1] if len(cells) > 1 and not cells[-1] else cells


def is_delimiter_row(row: str) -> bool:
    """Whether this is the row of dashes under a table's header."""
    return "-" in row and "|" in row and all(_DELIMITER_CELL.fullmatch(cell) for cell in split_row(row))


def lay_out_table(rows: Sequence[str], columns: int) -> list[str] | None:
    """The rows padded into columns, each with its newline. None if this is no table, or too wide to help."""
    if len(rows) < 2 or not is_delimiter_row(rows[1]):
        return None
    cells = [split_row(row) for row in rows]
    num_cells = len(cells[1])
    cells = [row + [""] * (num_cells - len(row)) for row in cells]
    if any(len(row) > num_cells for row in cells):
        return None
    body = cells[:1] + cells[2:]
    widths = [max(3, *(get_cwidth(row[index]) for row in body)) for index in range(num_cells)]
    if sum(widths) + 3 * num_cells + 1 > columns:
        return None
    marks = cells[1]
    lines = [_join(map(_pad, row, widths, marks)) for row in cells]
    lines[1] = _join(map(_dashes, widths, marks))
    return lines


def _join(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


def _pad(cell: str, width: int, mark: str) -> str:
    space = width - get_cwidth(cell)
    left = 0
    if mark.endswith(":"):
        left = space // 2 if mark.startswith(":") else space
    return " " * left + cell + " " * max(0, space - left)


def _dashes(width: int, mark: str) -> str:
    left, right = mark.startswith(":"), mark.endswith(":")
    return ":" * left + "-" * (width - left - right) + ":" * right
