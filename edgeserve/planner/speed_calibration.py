"""What a few measurements on a device say about its speed with any model.

Owns the measured corrections and their reading as bandwidth, compute and overhead. How the measurements are
made is not known here: they come as data, from an engine or from a benchmark file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from edgeserve.errors import UsageError
from edgeserve.planner.speed_step import (
    BATCH_SD,
    MISFIT_SD,
    Corrections,
    SpeedFit,
    correction_names,
    load_fit,
    prior_sd,
)
from edgeserve.planner.speed_terms import ModelWork, SpeedDevice, SpeedSettings, StepKind, Term, terms

if TYPE_CHECKING:
    from edgeserve.planner.speed_solver import Problem


@dataclass(frozen=True, slots=True)
class Measurement:
    """One measured time: a decode step of `num_sequences` tokens, or a whole prompt of `n_prompt` tokens."""

    kind: StepKind
    work: ModelWork
    settings: SpeedSettings
    seconds: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """A device as measured. The corrections are what predictions use; the figures are their plain reading.

    `bandwidth_gb_s`: rate at which decode reads weights. `gflops`: rate of prompt processing by kernel
    family, tile and weight reads included. `overhead_s`: fixed cost of a decode step of the measured model.
    None or absent where nothing was measured.
    """

    backend: str
    decode: Corrections = field(default_factory=Corrections)
    prefill: Corrections = field(default_factory=Corrections)
    bandwidth_gb_s: float | None = None
    gflops: Mapping[str, float] = field(default_factory=dict)
    overhead_s: float | None = None

    def corrections(self, kind: StepKind) -> Corrections:
        return self.decode if kind == "decode" else self.prefill


def calibrate_from(
    measurements: Sequence[Measurement], device: SpeedDevice, fit: SpeedFit | None = None
) -> Calibration:
    """The most probable corrections given the times and the class's prior (a Bayesian update).

    One measurement tells how fast that model runs, not why; models of different size and different context
    fills tell the terms apart, and the covariance keeps what could not be told. Raises UsageError for times
    that are not positive, or when nothing fits the device.
    """
    if not measurements or not all(0 < m.seconds < math.inf for m in measurements):
        raise UsageError("A calibration needs measurements with positive times.")
    fit = fit or load_fit()
    prefill = _corrections("prefill", measurements, device, fit)
    decode = _corrections("decode", measurements, device, fit)
    if device.backend == "cpu":
        decode = _with_batch(decode, prefill)
    if not decode.names and not prefill.names:
        raise UsageError("These measurements cannot calibrate a device of unknown bandwidth and compute.")
    return Calibration(
        device.backend,
        decode,
        prefill,
        bandwidth_gb_s=_bandwidth_gb_s(measurements, device, fit, decode),
        gflops=_gflops(measurements),
        overhead_s=_overhead_s(measurements, device, fit, decode),
    )


def _corrections(
    kind: StepKind, measurements: Sequence[Measurement], device: SpeedDevice, fit: SpeedFit
) -> Corrections:
    rows = [
        (measured, costs)
        for measured in measurements
        if measured.kind == kind
        and (costs := terms(kind, measured.work, device, measured.settings)) is not None
    ]
    spread: dict[str, float] = {}
    for measured, costs in rows:
        spread.update(prior_sd(kind, costs, measured.work, device, fit))
    if not spread:
        return Corrections()
    names = tuple(spread)
    # numpy takes longer to import than a plan to make, and only a calibration needs it.
    from edgeserve.planner.speed_solver import solve

    problem = _problem(kind, rows, names, [spread[name] for name in names], fit)
    mean, covariance = solve(problem, MISFIT_SD)
    return Corrections(names, tuple(map(float, mean)), tuple(tuple(map(float, line)) for line in covariance))


def _with_batch(decode: Corrections, prefill: Corrections) -> Corrections:
    """A processor's rate with prompts is the best guess at that with several sequences, unless measured."""
    if not prefill.names or not decode.names or "batch" in decode.names:
        return decode
    empty = (0.0,) * len(decode.names)
    guess = sum(value for name, value in zip(prefill.names, prefill.mean, strict=True) if "matmul" in name)
    lines = (*((*line, 0.0) for line in decode.covariance), (*empty, BATCH_SD**2))
    return Corrections((*decode.names, "batch"), (*decode.mean, guess), lines)


def _problem(
    kind: StepKind,
    rows: Sequence[tuple[Measurement, Sequence[Term]]],
    names: Sequence[str],
    spread: Sequence[float],
    fit: SpeedFit,
) -> Problem:
    import numpy as np

    from edgeserve.planner.speed_solver import Problem

    columns = list(dict.fromkeys(cost.name for _, costs in rows for cost in costs))
    peak_s = np.zeros((len(rows), len(columns)))
    applies = np.zeros((len(rows), len(columns), len(names)))
    for row, (measured, costs) in enumerate(rows):
        for cost in costs:
            column = columns.index(cost.name)
            peak_s[row, column] = cost.peak_s * math.exp(fit.log_factor(cost))
            for name in correction_names(cost.name, kind, measured.work):
                applies[row, column, names.index(name)] = 1.0
    log_time = np.log([measured.seconds for measured, _ in rows])
    return Problem(peak_s, applies, log_time, np.zeros(len(names)), np.array(spread))


def _corrected(
    name: str, measured: Measurement, device: SpeedDevice, fit: SpeedFit, corrections: Corrections
) -> float | None:
    """Seconds of one decode term of a measurement after calibration."""
    for cost in terms("decode", measured.work, device, measured.settings) or ():
        if cost.name == name:
            known = sum(corrections.get(own) for own in correction_names(name, "decode", measured.work))
            return cost.peak_s * math.exp(fit.log_factor(cost) + known)
    return None


def _bandwidth_gb_s(
    measurements: Sequence[Measurement], device: SpeedDevice, fit: SpeedFit, corrections: Corrections
) -> float | None:
    first = next((m for m in measurements if m.kind == "decode"), None)
    seconds = _corrected("weights", first, device, fit, corrections) if first else None
    if first is None or seconds is None:
        return None
    return first.work.weights_read_bytes(first.settings.num_sequences) / seconds / 1e9


def _overhead_s(
    measurements: Sequence[Measurement], device: SpeedDevice, fit: SpeedFit, corrections: Corrections
) -> float | None:
    first = next((m for m in measurements if m.kind == "decode"), None)
    return _corrected("fixed", first, device, fit, corrections) if first else None


def _gflops(measurements: Sequence[Measurement]) -> dict[str, float]:
    """Best rate seen by kernel family, matrix work only: attention would make long prompts look slow."""
    rates: dict[str, float] = {}
    for measured in measurements:
        if measured.kind == "prefill":
            flops = 2.0 * measured.work.active_params * measured.settings.n_prompt
            rate = flops / measured.seconds / 1e9
            family = measured.work.quant_class
            rates[family] = max(rate, rates.get(family, 0.0))
    return rates


def calibration_to_json(calibration: Calibration) -> str:
    """The calibration as a document that `calibration_from_json` reads back unchanged."""
    return json.dumps(asdict(calibration), indent=1)


def calibration_from_json(text: str) -> Calibration:
    """Raises UsageError for anything that `calibration_to_json` did not write."""
    try:
        data = json.loads(text)
        return Calibration(
            backend=str(data["backend"]),
            decode=_read_corrections(data["decode"]),
            prefill=_read_corrections(data["prefill"]),
            bandwidth_gb_s=data["bandwidth_gb_s"],
            gflops={str(name): float(rate) for name, rate in data["gflops"].items()},
            overhead_s=data["overhead_s"],
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError("This calibration cannot be read: measure it again.", str(error)) from error


def _read_corrections(data: Mapping[str, Any]) -> Corrections:
    names = tuple(map(str, data["names"]))
    mean = tuple(map(float, data["mean"]))
    covariance = tuple(tuple(map(float, line)) for line in data["covariance"])
    square = len(covariance) == len(names) and all(len(line) == len(names) for line in covariance)
    if len(mean) != len(names) or not square:
        raise ValueError("corrections and names do not match")
    if not all(map(math.isfinite, (*mean, *(entry for line in covariance for entry in line)))):
        raise ValueError("a correction is not a number")
    return Corrections(names, mean, covariance)
