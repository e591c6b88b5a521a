"""Figures in words, as everywhere in edgeserve: with units, without false digits, `n/a` where undefined."""

from __future__ import annotations

from edgeserve.ink import format_ms, significant
from edgeserve.planner import words as planner_words

NA = "n/a"


def rate(tokens_per_s: float | None) -> str:
    return NA if tokens_per_s is None else f"{significant(tokens_per_s)} tok/s"


def per_token(ms: float | None) -> str:
    return NA if ms is None else f"{significant(ms)} ms/token"


def duration(seconds: float | None) -> str:
    """Milliseconds below 10 s, then seconds."""
    return NA if seconds is None else format_ms(seconds)


def count(number: int | None) -> str:
    return NA if number is None else f"{number:,}"


def size(num_bytes: float | None) -> str:
    """As plans write it: `93.9 MiB`, `6.40 GiB`."""
    return NA if num_bytes is None else planner_words.size(num_bytes)


def span(seconds: float) -> str:
    """A stretch of time a person would say: `40 s`, `12 min`, `3 h 12 min`."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min" if minutes else f"{rest} s"


def short_id(request_id: str) -> str:
    """The end of an id, since ids of one server begin alike; a choice's number stays with it."""
    base, dash, choice = request_id.rpartition("-")
    if base and choice.isdigit() and len(choice) < 3:
        return f"{base[-4:]}{dash}{choice}"
    return request_id[-5:]


def plural(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
