"""Conditions for a script: `ttft_p95>2s`, `attainment<95%`, `stall: a_gap_max>300ms`.

Owns: their grammar and their check. Does not know: where the figures come from.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from edgeserve.bench.results import BenchResult, CaseResult
from edgeserve.errors import ThresholdMissedError, UsageError

_UNITS: Mapping[str, float] = {"": 1.0, "us": 1e-6, "ms": 1e-3, "s": 1.0, "%": 0.01, "/s": 1.0, "tok/s": 1.0}
_COMPARE: Mapping[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}
_CONDITION = re.compile(
    r"(?:(?P<case>[^:<>]+):)?\s*(?P<name>[a-z][a-z0-9_]*)\s*(?P<sign>[<>]=?)\s*"
    r"(?P<number>\d+(?:\.\d+)?|\.\d+)\s*(?P<unit>us|ms|s|%|/s|tok/s)?"
)


@dataclass(frozen=True)
class Condition:
    """Holds when the median of the figure stands in this relation to the bound. `case` picks the cases whose
    label contains it; None: all that have the figure."""

    text: str
    case: str | None
    figure: str
    sign: str
    bound: float

    @classmethod
    def parse(cls, text: str) -> Condition:
        match = _CONDITION.fullmatch(text.strip())
        if match is None:
            raise UsageError(
                f"{text!r} is not a condition.", "Write `figure>number unit`, such as ttft_p95>2s or ok<10."
            )
        case = match["case"].strip() if match["case"] else None
        bound = float(match["number"]) * _UNITS[match["unit"] or ""]
        return cls(text.strip(), case, match["name"], match["sign"], bound)

    def names(self) -> tuple[str, ...]:
        """A figure may be written without its unit: `ttft_p95` is `ttft_p95_s`."""
        return (self.figure, f"{self.figure}_s", f"{self.figure}_per_s")

    def holds(self, value: float) -> bool:
        return _COMPARE[self.sign](value, self.bound)


def check_thresholds(result: BenchResult, conditions: Sequence[Condition]) -> None:
    """Raises `ThresholdMissedError` with every condition that holds. A figure that could not be measured is
    missed too: a check that silently passes is worse than none. Only the first server is judged."""
    missed = [line for condition in conditions for line in _missed(result, condition)]
    if missed:
        raise ThresholdMissedError(" ".join(missed), "See the report for the figures behind it.")


def _missed(result: BenchResult, condition: Condition) -> list[str]:
    cases = [case for case in result.of_target("A") if condition.case is None or condition.case in case.label]
    known = {name for case in cases for repeat in case.repeats for name in repeat.figures}
    name = next((name for name in condition.names() if name in known), None)
    if name is None:
        figures = ", ".join(sorted(known)) or "none, since nothing was measured"
        raise UsageError(f"{condition.text!r} names no figure of this benchmark.", f"Figures: {figures}.")
    having = [case for case in cases if any(name in repeat.figures for repeat in case.repeats)]
    return [line for case in having if (line := _verdict(case, name, condition)) is not None]


def _verdict(case: CaseResult, name: str, condition: Condition) -> str | None:
    value = case.median(name)
    if value is None:
        return f"{case.label}: {name} could not be measured ({condition.text})."
    if condition.holds(value):
        return f"{case.label}: {name} is {value:.4g} ({condition.text})."
    return None
