"""Factors of a sum of terms, found from measured times and prior knowledge.

Owns the arithmetic: a time is a sum over terms of peak_s * exp(sum of the log factors that apply); the most
probable log factors under a normal prior are found by damped Gauss-Newton steps on the logarithm of the time.
Knows nothing of models or devices.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

_MAX_STEPS = 40
# One step moves no log factor further than this: the sum of exponentials is far from its tangent.
_MAX_MOVE = 0.5
_TOLERANCE = 1e-4
# Residuals beyond this many noise widths pull with constant force (Huber, 1964).
_HUBER_WIDTHS = 1.5


@dataclass(frozen=True, slots=True)
class Problem:
    """`peak_s`: rows x terms. `applies`: rows x terms x factors, 0 or 1. `log_time`: rows. Prior: factors."""

    peak_s: FloatArray
    applies: FloatArray
    log_time: FloatArray
    prior_mean: FloatArray
    prior_sd: FloatArray

    def rows(self, chosen: NDArray[np.bool_]) -> Problem:
        return Problem(
            self.peak_s[chosen], self.applies[chosen], self.log_time[chosen], self.prior_mean, self.prior_sd
        )


def term_times(problem: Problem, log_factors: FloatArray) -> FloatArray:
    """Seconds of each row's terms."""
    times: FloatArray = problem.peak_s * np.exp(problem.applies @ log_factors)
    return times


def solve(
    problem: Problem, noise_sd: float, start: FloatArray | None = None
) -> tuple[FloatArray, FloatArray]:
    """The most probable log factors, and their covariance. `noise_sd` is a measurement's relative error.

    `start` only saves steps: the answer does not depend on it beyond the tolerance.
    """
    log_factors = (problem.prior_mean if start is None else start).copy()
    precision: FloatArray = np.diag(1.0 / problem.prior_sd**2)
    curvature = precision
    for _ in range(_MAX_STEPS):
        times = term_times(problem, log_factors)
        total = times.sum(axis=1)
        slope = ((times / total[:, None])[:, None, :] @ problem.applies)[:, 0, :]
        residual = np.log(total) - problem.log_time
        weight = 1.0 / np.maximum(1.0, np.abs(residual) / (_HUBER_WIDTHS * noise_sd)) / noise_sd**2
        curvature = np.asarray(slope.T @ (weight[:, None] * slope) + precision, dtype=np.float64)
        pull = slope.T @ (weight * residual) + precision @ (log_factors - problem.prior_mean)
        step = np.linalg.solve(curvature, pull)
        step *= min(1.0, _MAX_MOVE / max(float(np.abs(step).max()), 1e-12))
        log_factors = log_factors - step
        if float(np.abs(step).max()) < _TOLERANCE:
            break
    return log_factors, np.asarray(np.linalg.inv(curvature), dtype=np.float64)
