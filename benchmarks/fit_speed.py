"""Learn the speed model's factors from published measurements, and say how well they predict unseen devices.

    python benchmarks/fit_speed.py --report          leave-one-device-out errors and coverage, as a table
    python benchmarks/fit_speed.py --report --json   the same for programs
    python benchmarks/fit_speed.py --write           fit on all rows, write edgeserve/planner/speed_fit.json

Each time is a sum of terms, peak time multiplied by factors (edgeserve/planner/speed_terms.py). Factors
belong to classes (backend, chip generation, kernel family, build), never to a device. Rows with a flag are
not used, except those of llama-server of 2026 and some on processors, where there is little else: they train
and are never counted in the report. Needs numpy only.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from speed_rows import Row, load_rows

from edgeserve.planner.speed_solver import FloatArray, Problem, solve, term_times
from edgeserve.planner.speed_step import FIT_PATH, NOISE_SD, SpeedFit, correction_names, prior_sd
from edgeserve.planner.speed_terms import StepKind

KINDS: tuple[StepKind, ...] = ("decode", "prefill")
# Spread of rows around the model when fitting: far above a run's noise, since classes are coarse.
FIT_NOISE_SD = 0.08
COVERAGE_AIM = 0.9
FEW_DEVICES = 15
NINE_OF_TEN = 1.645
# A prompt's matrix work then counts as known within a factor of 7: wider says no more than that nobody knows.
WIDEST = 8.0
# Log factors expected before any data: about 85 % of peak bandwidth; matrix units beyond the shader peak on
# CUDA.
BASE_PRIOR = {
    "weights": 0.15,
    "kv": 0.5,
    "batch": 0.3,
    "fixed": 4.0,
    "matmul": -0.2,
    "tiles": 0.0,
    "attention": 0.3,
}
MATMUL_PRIOR = {"metal": 0.35, "cuda": -1.1, "vulkan": -0.4, "rocm": -0.2, "cpu": 0.0}
BASE_SD = {
    "weights": 0.3,
    "kv": 0.5,
    "batch": 0.5,
    "fixed": 0.8,
    "matmul": 0.6,
    "tiles": 0.5,
    "attention": 0.8,
}
CLASS_SD = {
    "arch": 0.2,
    "quant": 0.2,
    "experts": 0.5,
    "workstation": 0.3,
    "flash_attn": 0.3,
    "old_build": 0.4,
}


def prior(name: str) -> tuple[float, float]:
    """Mean and spread of a log factor before any data, from its name "backend.kind.term[.class]"."""
    backend, kind, term, *classes = name.split(".", 3)
    if classes:
        label = classes[0].split("=")[0]
        wide = (label == "arch" and term == "fixed") or (classes[0] == "quant=f16" and term == "matmul")
        return 0.0, CLASS_SD[label] * (2.0 if wide else 1.0)
    if term == "matmul":
        return MATMUL_PRIOR[backend], BASE_SD[term] * (1.5 if backend == "cpu" else 1.0)
    if kind == "prefill" and term == "weights":
        return 0.1, 0.2
    return BASE_PRIOR[term], BASE_SD[term]


def build_problem(rows: Sequence[Row]) -> tuple[tuple[str, ...], Problem]:
    """Factor names, and the rows as arrays; rows of one kind, all backends together."""
    names = tuple(sorted({factor for row in rows for term in row.terms for factor in term.factors}))
    columns = sorted({term.name for row in rows for term in row.terms})
    peak_s = np.zeros((len(rows), len(columns)))
    applies = np.zeros((len(rows), len(columns), len(names)))
    place = {name: index for index, name in enumerate(names)}
    for index, row in enumerate(rows):
        for term in row.terms:
            column = columns.index(term.name)
            peak_s[index, column] = term.peak_s
            applies[index, column, [place[factor] for factor in term.factors]] = 1.0
    means, spreads = np.array([prior(name) for name in names]).T
    return names, Problem(peak_s, applies, np.array([row.log_time for row in rows]), means, spreads)


def fit_factors(
    names: Sequence[str], problem: Problem, start: FloatArray | None = None
) -> tuple[FloatArray, dict[str, float]]:
    log_factors, _ = solve(problem, FIT_NOISE_SD, start)
    return log_factors, {name: float(value) for name, value in zip(names, log_factors, strict=True)}


@dataclass(frozen=True)
class Checked:
    """One row, predicted by a fit that never saw its device; an interval of `needed_width` just holds it."""

    row: Row
    log_error: float
    needed_width: float
    fit: SpeedFit

    def spread(self, width: float) -> float:
        """The factor by which the interval's ends differ from its middle."""
        return float(np.exp(NINE_OF_TEN * np.sqrt(_variance(self.row, self.fit, width))))


def leave_one_device_out(rows: Sequence[Row]) -> list[Checked]:
    """Every row that counts, predicted from all other devices."""
    names, problem = build_problem(rows)
    start, _ = fit_factors(names, problem)
    devices = np.array([row.device_key for row in rows])
    checked: list[Checked] = []
    for device in sorted({row.device_key for row in rows if row.counts}):
        mine: NDArray[np.bool_] = devices == device
        log_factors, factors = fit_factors(names, problem.rows(~mine), start)
        seen = {factor for row, own in zip(rows, mine, strict=True) if not own for factor in _names(row)}
        known = SpeedFit({name: value for name, value in factors.items() if name in seen}, {})
        times = term_times(problem.rows(mine), log_factors).sum(axis=1)
        own_rows = [row for row, own in zip(rows, mine, strict=True) if own]
        for row, time in zip(own_rows, times, strict=True):
            if row.counts:
                error = float(np.log(time)) - row.log_time
                checked.append(Checked(row, error, _needed_width(row, error, known), known))
    return checked


def _names(row: Row) -> set[str]:
    return {factor for term in row.terms for factor in term.factors}


def _needed_width(row: Row, log_error: float, fit: SpeedFit) -> float:
    """By halving: the variance grows with the width."""
    low, high = 0.0, WIDEST
    for _ in range(12):
        middle = (low + high) / 2
        inside = abs(log_error) <= NINE_OF_TEN * np.sqrt(_variance(row, fit, middle))
        low, high = (low, middle) if inside else (middle, high)
    return high


def _variance(row: Row, fit: SpeedFit, width: float) -> float:
    """Of the logarithm of the predicted time."""
    scaled = SpeedFit(fit.factors, {f"{row.device.backend}.{row.kind}": width})
    spread = prior_sd(row.kind, row.terms, row.work, row.device, scaled)
    seconds = {term.name: term.peak_s * np.exp(fit.log_factor(term)) for term in row.terms}
    total = sum(seconds.values())
    share: Counter[str] = Counter()
    for term, time in seconds.items():
        for name in correction_names(term, row.kind, row.work):
            share[name] += time / total
    return float(sum((part * spread[name]) ** 2 for name, part in share.items()) + NOISE_SD**2)


def width_of(checked: Sequence[Checked]) -> float:
    """The width that holds 9 of 10 rows, and 9 of 10 when each device counts as one.

    A quantile of few devices says little about the next one: there the widest that was needed is taken.
    """
    if not checked:
        return 1.0
    widths = np.array([one.needed_width for one in checked])
    order = np.argsort(widths)
    rows_of = Counter(one.row.device_key for one in checked)
    by_device = np.array([1.0 / rows_of[one.row.device_key] for one in checked])
    aim = COVERAGE_AIM if len(rows_of) >= FEW_DEVICES else 1.0
    answers = []
    for weights in (np.ones(len(widths)), by_device):
        share = np.cumsum(weights[order]) / (weights.sum() + weights.mean())
        answers.append(widths[order][min(int(np.searchsorted(share, aim)), len(widths) - 1)])
    return max(0.5, float(max(answers)))


@dataclass(frozen=True)
class Line:
    """One line of the report: how rows of one group were predicted without their device."""

    group: str
    kind: str
    num_rows: int
    num_devices: int
    median_error: float
    p90_error: float
    coverage: float
    typical_spread: float


def report(by_kind: Mapping[StepKind, Sequence[Checked]]) -> list[Line]:
    lines: list[Line] = []
    for kind, checked in by_kind.items():
        by_backend = {
            backend: [one for one in checked if one.row.device.backend == backend]
            for backend in dict.fromkeys(one.row.device.backend for one in checked)
        }
        held = {id(one): _held(one, group) for group in by_backend.values() for one in group}
        plain = [one for one in checked if one.row.device.backend in ("metal", "cuda") and one.row.plain]
        lines.append(_line("all", kind, checked, held))
        lines.append(_line("metal+cuda dense>=3B", kind, plain, held))
        for backend, group in by_backend.items():
            for label, want in (("dense>=3B", True), ("other", False)):
                part = [one for one in group if one.row.plain == want]
                if part:
                    lines.append(_line(f"{backend} {label}", kind, part, held))
    return lines


def _held(one: Checked, group: Sequence[Checked]) -> tuple[bool, float]:
    """Whether the interval holds the row, its width learned from the other devices of the backend only."""
    width = width_of([other for other in group if other.row.device_key != one.row.device_key])
    return one.needed_width <= width, one.spread(width)


def _line(group: str, kind: str, part: Sequence[Checked], held: dict[int, tuple[bool, float]]) -> Line:
    # log_error is of the time: a time too long is a speed too low.
    errors = np.abs(np.exp([-one.log_error for one in part]) - 1.0)
    return Line(
        group,
        kind,
        len(part),
        len({one.row.device_key for one in part}),
        float(np.median(errors)),
        float(np.quantile(errors, 0.9)),
        float(np.mean([held[id(one)][0] for one in part])),
        float(np.median([held[id(one)][1] for one in part])),
    )


def fit_all(rows: Sequence[Row], by_kind: Mapping[StepKind, Sequence[Checked]]) -> dict[str, object]:
    """What is shipped: factors from every row, widths from the rows left out in turn."""
    factors: dict[str, float] = {}
    widths: dict[str, float] = {}
    num_rows: Counter[str] = Counter()
    devices: dict[str, set[str]] = {}
    for kind, checked in by_kind.items():
        mine = [row for row in rows if row.kind == kind]
        factors.update(fit_factors(*build_problem(mine))[1])
        for row in mine:
            group = f"{row.device.backend}.{kind}"
            num_rows[group] += 1
            devices.setdefault(group, set()).add(row.device_key)
        for group in devices:
            if group.endswith(kind):
                own = [one for one in checked if f"{one.row.device.backend}.{kind}" == group]
                widths[group] = round(width_of(own), 3)
    return {
        "source": "benchmarks/fit_speed.py --write, from benchmarks/data/speeds.csv",
        "factors": {
            name: round(value, 4) for name, value in sorted(factors.items()) if "old_build" not in name
        },
        "widths": widths,
        "num_devices": {group: len(keys) for group, keys in devices.items()},
        "num_rows": dict(num_rows),
    }


def print_table(lines: Sequence[Line]) -> None:
    print("Leave-one-device-out: each device predicted from all others. Errors of tokens/s, unflagged rows.")
    print(
        f"{'group':24}{'test':10}{'rows':>6}{'devices':>9}{'median':>9}{'p90':>9}{'held':>7}{'interval':>12}"
    )
    for line in lines:
        print(
            f"{line.group:24}{line.kind:10}{line.num_rows:6}{line.num_devices:9}{line.median_error:9.1%}"
            f"{line.p90_error:9.1%}{line.coverage:7.0%}{'x/÷ ':>7}{line.typical_spread:.2f}"
        )
    print(
        "held: rows inside their interval, its width learned without their device. interval: median factor."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--report", action="store_true", help="leave-one-device-out errors and coverage")
    parser.add_argument("--json", action="store_true", help="the report as JSON")
    parser.add_argument(
        "--write", nargs="?", const=FIT_PATH, type=Path, metavar="PATH", help=f"write {FIT_PATH.name}"
    )
    asked = parser.parse_args()
    rows = load_rows()
    if not asked.report and not asked.write:
        parser.print_help(sys.stderr)
        return
    by_kind = {kind: leave_one_device_out([row for row in rows if row.kind == kind]) for kind in KINDS}
    if asked.report:
        lines = report(by_kind)
        if asked.json:
            json.dump([line.__dict__ for line in lines], sys.stdout, indent=1)
        else:
            print_table(lines)
    if asked.write:
        asked.write.write_text(json.dumps(fit_all(rows, by_kind), indent=1) + "\n", encoding="utf-8")
        print(f"wrote {asked.write}", file=sys.stderr)


if __name__ == "__main__":
    main()
