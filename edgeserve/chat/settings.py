"""The settings that `/set` knows: names, kinds and ranges, in the words of the API.

Owns reading them from what a person typed. Knows nothing of conversations or requests; the server checks
again, and has the last word on what it supports.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from edgeserve.errors import UsageError

Value = float | int | str | bool | tuple[str, ...]

ALIASES = {
    "temp": "temperature",
    "n_predict": "max_tokens",
    "max-tokens": "max_tokens",
    "repetition_penalty": "repeat_penalty",
    "timings-per-token": "timings_per_token",
}
_TRUE, _FALSE = ("on", "true", "yes", "1"), ("off", "false", "no", "0")


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: how its text is read, and what to say about it in the list."""

    parse: Callable[[str], Value]
    about: str
    is_local: bool = False
    """Whether it concerns the display only and is never sent."""


def _number(low: float, high: float) -> Callable[[str], Value]:
    def parse(text: str) -> float:
        value = float(text)
        if not low <= value <= high:
            raise ValueError(f"must be between {low:g} and {high:g}")
        return value

    return parse


def _integer(low: int, high: int) -> Callable[[str], Value]:
    def parse(text: str) -> int:
        value = int(text.replace(",", ""))
        if not low <= value <= high:
            raise ValueError(f"must be between {low:,} and {high:,}")
        return value

    return parse


def _switch(text: str) -> bool:
    if text.lower() not in _TRUE + _FALSE:
        raise ValueError("must be on or off")
    return text.lower() in _TRUE


def _stop_strings(text: str) -> tuple[str, ...]:
    """One stop string a word; `\\n` and `\\t` stand for themselves."""
    return tuple(word.replace("\\n", "\n").replace("\\t", "\t") for word in text.split())


SETTINGS: Mapping[str, Setting] = {
    "max_tokens": Setting(_integer(1, 2**31 - 1), "the longest answer, in tokens"),
    "temperature": Setting(_number(0, 100), "0 always takes the likeliest token"),
    "top_k": Setting(_integer(0, 2**31 - 1), "only the k likeliest tokens; 0 for all"),
    "top_p": Setting(_number(0, 1), "only the likeliest tokens that together reach p"),
    "min_p": Setting(_number(0, 1), "only tokens at least p times as likely as the likeliest"),
    "seed": Setting(_integer(0, 2**32 - 1), "the same seed draws the same answer"),
    "repeat_penalty": Setting(_number(0.01, 100), "above 1 discourages repetition"),
    "presence_penalty": Setting(_number(-100, 100), "against tokens that already occurred"),
    "frequency_penalty": Setting(_number(-100, 100), "against tokens by how often they occurred"),
    "stop": Setting(_stop_strings, "texts that end the answer, separated by spaces"),
    "reasoning_effort": Setting(str, "for models that have it: low, medium or high"),
    "plain": Setting(_switch, "on shows the answer without styles", is_local=True),
    "timings_per_token": Setting(_switch, "on lists each token's time after an answer", is_local=True),
}


def canonical_name(name: str) -> str:
    """The setting's own name. Raises UsageError, with the nearest name, when there is none."""
    name = ALIASES.get(name.lower(), name.lower())
    if name not in SETTINGS:
        near = difflib.get_close_matches(name, SETTINGS, n=1)
        raise UsageError(
            f"There is no setting {name}.", f"Did you mean {near[0]}?" if near else "/set lists them all."
        )
    return name


def parse_setting(name: str, text: str) -> tuple[str, Value]:
    """(own name, value) of what was typed. Raises UsageError for an unknown name or a value out of range."""
    name = canonical_name(name)
    try:
        return name, SETTINGS[name].parse(text)
    except ValueError as error:
        reason = str(error) if str(error).startswith("must") else f"cannot be {text!r}"
        raise UsageError(f"{name} {reason}.", SETTINGS[name].about.capitalize() + ".") from None


def format_value(value: Value) -> str:
    """A value as it would be typed."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return " ".join(text.replace("\n", "\\n").replace("\t", "\\t") for text in value)
    return f"{value:g}" if isinstance(value, float) else str(value)
