"""How the text of a setting becomes a value: numbers, switches, choices, texts and lists.

Owns what is possible for each kind, and the words for it. Knows nothing of particular settings.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

Value: TypeAlias = (
    bool | int | float | str | tuple[str, ...] | tuple[float, ...] | tuple[tuple[str, str], ...] | None
)

_ON, _OFF = ("on", "true", "yes", "1", "enabled"), ("off", "false", "no", "0", "disabled")


class BadValueError(ValueError):
    """The text is no value of this kind."""


@dataclass(frozen=True, slots=True)
class WholeNumber:
    """A whole number within bounds. `words` are texts with a meaning of their own; None is the default."""

    low: int
    high: int = 2**31 - 1
    words: Mapping[str, int | None] = field(default_factory=dict, hash=False)
    metavar: str = "N"

    def parse(self, text: str) -> Value:
        if text.lower() in self.words:
            return self.words[text.lower()]
        try:
            value = int(text.replace("_", ""))
        except ValueError:
            raise BadValueError("is not a whole number") from None
        if not self.low <= value <= self.high:
            raise BadValueError("is out of range")
        return value

    def word_for(self, value: Value) -> str:
        """The word that stands for a value, "" when it is a plain number."""
        words = [word for word, meaning in self.words.items() if meaning == value and value is not None]
        return min(words, key=lambda word: word.startswith("-"), default="")

    @property
    def allowed(self) -> str:
        words = "".join(f", or {word}" for word in self.words if not word.startswith("-"))
        return f"A whole number {_range(self.low, self.high, 2**31 - 1)}{words}."


@dataclass(frozen=True, slots=True)
class Number:
    low: float
    high: float = 1e6
    metavar: str = "X"

    def parse(self, text: str) -> Value:
        try:
            value = float(text)
        except ValueError:
            raise BadValueError("is not a number") from None
        if not math.isfinite(value) or not self.low <= value <= self.high:
            raise BadValueError("is out of range")
        return value

    @property
    def allowed(self) -> str:
        return f"A number {_range(self.low, self.high, 1e6)}."


@dataclass(frozen=True, slots=True)
class Switch:
    metavar: str = "on|off"

    def parse(self, text: str) -> Value:
        if text.lower() in _ON + _OFF:
            return text.lower() in _ON
        raise BadValueError("is neither on nor off")

    @property
    def allowed(self) -> str:
        return "on or off (true or false, 1 or 0)."


@dataclass(frozen=True, slots=True)
class Choice:
    """One of a few words. `bare` is what the flag means without a word."""

    words: tuple[str, ...]
    bare: str | None = None

    def parse(self, text: str) -> Value:
        # llama.cpp reads 1 and true as on, 0 and false as off, wherever on and off are choices.
        word = text.lower()
        if word not in self.words and {"on", "off"} <= set(self.words):
            word = "on" if word in _ON else "off" if word in _OFF else word
        if word not in self.words:
            raise BadValueError("is not one of them")
        return word

    @property
    def metavar(self) -> str:
        return "|".join(self.words) if len(self.words) <= 3 else "TYPE"

    @property
    def allowed(self) -> str:
        return f"One of: {', '.join(self.words)}."


@dataclass(frozen=True, slots=True)
class AnyText:
    metavar: str = "TEXT"

    def parse(self, text: str) -> Value:
        if not text:
            raise BadValueError("is empty")
        return text

    @property
    def allowed(self) -> str:
        return "A text."


@dataclass(frozen=True, slots=True)
class TextList:
    """Texts between commas; the flag may also be repeated."""

    metavar: str = "TEXT"

    def parse(self, text: str) -> Value:
        parts = tuple(part.strip() for part in text.split(",") if part.strip())
        if not parts:
            raise BadValueError("is empty")
        return parts

    @property
    def allowed(self) -> str:
        return "One text, or several between commas."


@dataclass(frozen=True, slots=True)
class Shares:
    """Numbers between commas or slashes, as llama.cpp takes both."""

    metavar: str = "N,N"

    def parse(self, text: str) -> Value:
        try:
            shares = tuple(float(part) for part in text.replace("/", ",").split(","))
        except ValueError:
            raise BadValueError("is not a list of numbers") from None
        if not all(math.isfinite(share) and share >= 0 for share in shares) or sum(shares) == 0:
            raise BadValueError("is no division into shares")
        return shares

    @property
    def allowed(self) -> str:
        return "Numbers between commas, such as 3,1."


@dataclass(frozen=True, slots=True)
class Pairs:
    """NAME=VALUE, several between commas."""

    metavar: str = "NAME=VALUE"

    def parse(self, text: str) -> Value:
        pairs = tuple(part.rpartition("=")[::2] for part in text.split(",") if part.strip())
        if not pairs or not all(name and value for name, value in pairs):
            raise BadValueError(f"is not {self.metavar}")
        return tuple((name.strip(), value.strip()) for name, value in pairs)

    @property
    def allowed(self) -> str:
        return f"{self.metavar}, several between commas."


_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(?:i?B)?|(B))?", re.IGNORECASE)
_SIZE_UNITS = {"B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True, slots=True)
class Size:
    """An amount of memory, in bytes. `bare` is the unit of a number without one: K, M, G or T."""

    bare: str = "G"
    metavar: str = "SIZE"

    def parse(self, text: str) -> Value:
        found = _SIZE.fullmatch(text)
        if found is None:
            raise BadValueError("is no size")
        return int(float(found[1]) * _SIZE_UNITS[(found[2] or found[3] or self.bare).upper()])

    @property
    def allowed(self) -> str:
        return f"Such as 6GiB or 512MiB; a bare number is {self.bare}iB."


Kind: TypeAlias = WholeNumber | Number | Switch | Choice | AnyText | TextList | Shares | Pairs | Size


def _range(low: float, high: float, unbounded: float) -> str:
    return f"from {low:g} on" if high >= unbounded else f"from {low:g} to {high:g}"


def format_value(value: Value, kind: Kind | None = None) -> str:
    """A value as it would be typed; "" for none."""
    if value is None:
        return ""
    if isinstance(kind, WholeNumber) and (word := kind.word_for(value)):
        return word
    if isinstance(kind, Size) and isinstance(value, int):
        return _size_words(value)
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ",".join("=".join(item) if isinstance(item, tuple) else format_value(item) for item in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _size_words(n_bytes: int) -> str:
    """In the largest unit that says it exactly."""
    for unit in ("T", "G", "M", "K"):
        if n_bytes and n_bytes % _SIZE_UNITS[unit] == 0:
            return f"{n_bytes // _SIZE_UNITS[unit]}{unit}iB"
    return f"{n_bytes}B"
