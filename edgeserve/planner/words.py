"""How a plan writes its figures: bytes, tokens, intervals and rates, with units and without false digits.

Knows nothing of plans. A figure that does not exist is "n/a".
"""

from __future__ import annotations

from typing import Protocol

GIB, MIB = 1 << 30, 1 << 20


class Range(Protocol):
    """An interval of floats, such as speed.Interval."""

    @property
    def low(self) -> float: ...
    @property
    def mid(self) -> float: ...
    @property
    def high(self) -> float: ...


def gib(n_bytes: float) -> str:
    """`6.4`, without unit; small amounts get a second digit."""
    value = n_bytes / GIB
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def size(n_bytes: float) -> str:
    """`6.43 GiB`, `512 MiB`, `36.0 MiB`, `0 MiB`."""
    if abs(n_bytes) >= GIB:
        return f"{gib(n_bytes)} GiB"
    mib = n_bytes / MIB
    return f"{mib:.0f} MiB" if abs(mib) >= 99.95 or mib == 0 else f"{mib:.1f} MiB"


def number(value: float) -> str:
    """Two or three digits that mean something: `0.42`, `7.5`, `74`, `1,240`."""
    if value >= 9.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 0.995 else f"{value:.2g}"


def rate(interval: Range | None) -> str:
    """`24–31 tok/s`, or n/a."""
    return "n/a" if interval is None else f"{_ends(interval)} tok/s"


def seconds(interval: Range | None) -> str:
    """`1.9–2.6 s`, `210–290 ms` below a second, or n/a."""
    if interval is None:
        return "n/a"
    if interval.high < 1:
        return f"{number(interval.low * 1000)}–{number(interval.high * 1000)} ms"
    return f"{_ends(interval)} s"


def _ends(interval: Range) -> str:
    low, high = number(interval.low), number(interval.high)
    return low if low == high else f"{low}–{high}"


def count(value: int, noun: str) -> str:
    """`1 sequence`, `4 sequences`, `8,192 tokens`."""
    return f"{value:,} {noun}" if value == 1 else f"{value:,} {noun}s"
