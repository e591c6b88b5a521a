"""The fields of the plan's form: typed into as any other, and stepped through with Up and Down.

Own what one step is: a context doubles, a count moves by one, a choice gives way to the next.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.widgets import Input

from edgeserve.planner.goals import PREFERENCES

Step = Callable[[str, int], str]
"""(what stands there, or what the plan chose; +1 or -1) -> what is next"""

KV_TYPES = ("f16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")
_LEAST_CONTEXT = 256


def double_or_halve(text: str, by: int) -> str:
    """Up to the next power of two, or down to it; what is no number stays."""
    number = _number(text)
    if number is None:
        return text
    bits = number.bit_length()
    power = 1 << bits if by > 0 else 1 << (bits - 1 if number & (number - 1) else bits - 2)
    return f"{max(_LEAST_CONTEXT, power):,}"


def one_more_or_less(text: str, by: int) -> str:
    """A count of at least 1; what is no number stays."""
    number = _number(text)
    return text if number is None else f"{max(1, number + by)}"


def next_of(choices: tuple[str, ...]) -> Step:
    """Round and round."""

    def step(text: str, by: int) -> str:
        index = choices.index(text) if text in choices else 0
        return choices[(index + by) % len(choices)]

    return step


def _number(text: str) -> int | None:
    """The last whole number of `16,384`, `16k` or `all 31`."""
    found = re.search(r"(\d[\d,]*)(k?)\s*$", text.strip().lower())
    return int(found[1].replace(",", "")) * (1024 if found[2] else 1) if found else None


STEPS: dict[str, Step] = {
    "n_ctx": double_or_halve,
    "n_seq_max": one_more_or_less,
    "n_gpu_layers": one_more_or_less,
    "kv_type": next_of(KV_TYPES),
    "min_ctx": double_or_halve,
    "prefer": next_of(PREFERENCES),
}


class PlanField(Input):
    """Up and Down step from what is typed, or from what the plan chose where nothing is."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "step(1)", "More", show=False),
        Binding("down", "step(-1)", "Less", show=False),
    ]

    def __init__(self, name: str, value: str) -> None:
        super().__init__(value, placeholder="", id=name, compact=True)

    def action_step(self, by: int) -> None:
        step = STEPS.get(self.id or "")
        if step is not None:
            self.value = step(self.value.strip() or self.placeholder, by)
            self.cursor_position = len(self.value)
