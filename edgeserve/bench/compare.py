"""Two results side by side: ratios of medians, and whether they stand out from the noise.

Owns: the reading of summary.json and the ratio of one figure on two sides. Does not know: how either was
measured; it warns when the two were not measured the same way.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from edgeserve.bench.results import MIN_REPEATS_FOR_INTERVAL, NUM_RESAMPLES, SUMMARY_SCHEMA, Spread
from edgeserve.errors import UsageError

# Settings that change what is measured; where they differ, a ratio compares two workloads.
SAME_OPTIONS = (
    "scenario",
    "prompt",
    "output",
    "shared_prefix_tokens",
    "arrivals",
    "burstiness",
    "seed",
    "ignore_eos",
    "extra_params",
)


@dataclass(frozen=True)
class Ratio:
    """Median of b over median of a. `low` and `high` are a 95 % bootstrap interval, or None below three
    repeats on either side, where no interval can be given."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def is_within_noise(self) -> bool | None:
        """None when the repeats do not allow a judgement."""
        if self.low is None or self.high is None:
            return None
        return self.low <= 1 <= self.high

    @property
    def text(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.value:.2f}×"
        return f"{self.value:.2f}× ({self.low:.2f}–{self.high:.2f})"


def ratio_of(a: Spread | None, b: Spread | None) -> Ratio | None:
    """None when either side lacks the figure or a's median is 0."""
    if a is None or b is None or not a.median:
        return None
    value = b.median / a.median
    if min(len(a.values), len(b.values)) < MIN_REPEATS_FOR_INTERVAL:
        return Ratio(value)
    rng = random.Random(0)
    drawn = sorted(_resampled_ratio(a, b, rng) for _ in range(NUM_RESAMPLES))
    return Ratio(value, drawn[int(0.025 * len(drawn))], drawn[int(0.975 * len(drawn))])


def _resampled_ratio(a: Spread, b: Spread, rng: random.Random) -> float:
    lower = median(rng.choices(a.values, k=len(a.values)))
    upper = median(rng.choices(b.values, k=len(b.values)))
    return upper / lower if lower else float("inf")


@dataclass(frozen=True)
class Compared:
    """One figure of one case in both documents."""

    case: str
    figure: str
    a: Spread
    b: Spread
    ratio: Ratio


@dataclass(frozen=True)
class Comparison:
    rows: tuple[Compared, ...]
    warnings: tuple[str, ...]


def read_summary(path: Path) -> dict[str, Any]:
    """A summary.json; `UsageError` for anything else."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is not a benchmark's summary.json: {error}.") from error
    if not isinstance(document, dict) or document.get("schema") != SUMMARY_SCHEMA:
        raise UsageError(f"{path} does not have the schema {SUMMARY_SCHEMA}.")
    return document


def compare(a: Mapping[str, Any], b: Mapping[str, Any], server: str = "A") -> Comparison:
    """Cases with the same label, figures that both have. `server` picks the side of a two-server result."""
    cases_a, cases_b = _cases(a, server), _cases(b, server)
    rows = [
        row
        for label in cases_a
        if label in cases_b
        for row in _compared(label, cases_a[label], cases_b[label])
    ]
    if not rows:
        raise UsageError("The two results have no case in common.")
    return Comparison(tuple(rows), tuple(_warnings(a, b, set(cases_a) ^ set(cases_b))))


def _cases(document: Mapping[str, Any], server: str) -> dict[str, dict[str, Spread]]:
    found = [case for case in document.get("cases", []) if case.get("server") == server]
    return {
        case["label"]: {name: _spread(spread) for name, spread in case.get("figures", {}).items()}
        for case in found
    }


def _spread(entry: Mapping[str, Any]) -> Spread:
    return Spread(entry["median"], entry["low"], entry["high"], tuple(entry["values"]))


def _compared(label: str, a: Mapping[str, Spread], b: Mapping[str, Spread]) -> Iterator[Compared]:
    for name, spread in a.items():
        ratio = ratio_of(spread, b.get(name))
        if ratio is not None:
            yield Compared(label, name, spread, b[name], ratio)


def _warnings(a: Mapping[str, Any], b: Mapping[str, Any], unmatched: set[str]) -> Iterator[str]:
    options_a, options_b = a.get("options", {}), b.get("options", {})
    for name in SAME_OPTIONS:
        if options_a.get(name) != options_b.get(name):
            yield f"{name} differs: {options_a.get(name)} and {options_b.get(name)}."
    for name in ("cpu", "os"):
        sides = [document.get("environment", {}).get("client", {}).get(name) for document in (a, b)]
        if sides[0] != sides[1]:
            yield f"Measured from different machines: {sides[0]} and {sides[1]}."
    for side, document in (("first", a), ("second", b)):
        if document.get("is_partial"):
            yield f"The {side} result is partial: it was interrupted."
    if unmatched:
        yield f"Only in one of the two: {', '.join(sorted(unmatched))}."
