"""The expected time of one step on one device, and how far it may be off.

Owns the fitted factors, and the corrections: the unknown ways in which this very device differs from its
class, each with a spread. Without measurements the corrections are zero and wide; a calibration
(speed_calibration.py) moves and narrows them. Knows nothing of tokens per second or of several devices.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from edgeserve.errors import UsageError
from edgeserve.planner.speed_terms import (
    MAIN_TERM,
    ModelWork,
    SpeedDevice,
    SpeedSettings,
    StepKind,
    Term,
    terms,
)

FIT_PATH = Path(__file__).with_name("speed_fit.json")
# Two runs on one machine: clocks, temperature, other programs.
NOISE_SD = 0.03

# How far measured steps of one device are from any sum of these terms.
MISFIT_SD = 0.08

# How well a term's factor carries over from a class of devices to one of them, before scaling by the fit's
# widths: reads of weights are regular, fixed costs depend on driver, host and build.
_TERM_SD: dict[StepKind, dict[str, float]] = {
    "decode": {"weights": 0.10, "kv": 0.50, "attention": 0.50, "fixed": 0.40},
    "prefill": {"matmul": 0.15, "tiles": 0.30, "attention": 0.40, "weights": 0.10, "fixed": 0.40},
}
# The widths are learned from rows that the main term dominates; they must not blow up the rare others.
_SIDE_TERM_SD_MOST = 0.7
# No published row decodes several sequences at once: what a further one costs is a guess within a factor.
BATCH_SD = 1.0
# A kernel family that was not measured on a device whose other kernels were.
_QUANT_SD = 0.08
_UNSEEN_CLASS_SD = 0.25
# Two devices were measured with experts, and their prompts disagree by a factor of two.
_EXPERTS_SD: dict[StepKind, float] = {"decode": 0.25, "prefill": 0.6}
_ASSUMED_BANDWIDTH_SD = 0.40
# Below this size kernels no longer fill a device. Nearly all rows are of larger models; one site's averages
# at 1.24 billion parameters are 11 to 28 % (decode) and 17 to 55 % (prefill) worse than its averages at 8
# billion.
_SMALL_PARAMS = 3e9
_SMALL_SD_PER_HALVING: dict[StepKind, float] = {"decode": 0.2, "prefill": 0.3}
_SMALL_SD_MOST = 0.8
# Recurrent layers run kernels of their own: the few rows of such models lie up to a quarter below the others.
_RECURRENT_SD = 0.2


@dataclass(frozen=True, slots=True)
class SpeedFit:
    """Log factors by name, and by "backend.kind" how wide intervals must be and what they rest on.

    `widths` scales the spread of the corrections so that 9 of 10 rows of devices left out of the fit lie
    inside. `num_devices` and `num_rows` count what was measured.
    """

    factors: Mapping[str, float]
    widths: Mapping[str, float]
    num_devices: Mapping[str, int] = field(default_factory=dict)
    num_rows: Mapping[str, int] = field(default_factory=dict)

    def log_factor(self, term: Term) -> float:
        return sum(self.factors.get(name, 0.0) for name in term.factors)

    def width(self, kind: StepKind, backend: str) -> float:
        """An unknown backend is as uncertain as the worst known one."""
        return self.widths.get(f"{backend}.{kind}", max(self.widths.values(), default=1.0))


def load_fit(path: Path = FIT_PATH) -> SpeedFit:
    """The factors that ship with edgeserve, or another set written by benchmarks/fit_speed.py."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return SpeedFit(data["factors"], data["widths"], data["num_devices"], data["num_rows"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"The speed factors in {path} cannot be read.", str(error)) from error


@dataclass(frozen=True, slots=True)
class Corrections:
    """Log corrections by name with their covariance: what is known of one device beyond its class."""

    names: tuple[str, ...] = ()
    mean: tuple[float, ...] = ()
    covariance: tuple[tuple[float, ...], ...] = ()

    def get(self, name: str) -> float:
        return self.mean[self.names.index(name)] if name in self.names else 0.0


@dataclass(frozen=True, slots=True)
class StepEstimate:
    """`seconds` expected, `log_sd` the standard deviation of its logarithm, `term_s` the parts of the sum."""

    seconds: float
    log_sd: float
    term_s: Mapping[str, float]


def estimate_step(
    kind: StepKind,
    work: ModelWork,
    device: SpeedDevice,
    settings: SpeedSettings,
    fit: SpeedFit,
    corrections: Corrections | None = None,
) -> StepEstimate | None:
    """One decode step or one whole prompt; None where the device's peaks are not known."""
    costs = terms(kind, work, device, settings)
    if costs is None:
        return None
    known = corrections or Corrections()
    used = {cost.name: correction_names(cost.name, kind, work) for cost in costs}
    seconds = {
        cost.name: cost.peak_s
        * math.exp(fit.log_factor(cost) + sum(known.get(name) for name in used[cost.name]))
        for cost in costs
    }
    total = sum(seconds.values())
    weight: dict[str, float] = {}
    for term, names in used.items():
        for name in names:
            weight[name] = weight.get(name, 0.0) + seconds[term] / total
    variance = _variance(weight, known, prior_sd(kind, costs, work, device, fit))
    floor = MISFIT_SD if known.names else NOISE_SD
    return StepEstimate(total, math.sqrt(variance + floor**2), seconds)


def correction_names(term: str, kind: StepKind, work: ModelWork) -> tuple[str, ...]:
    """Corrections that act on a term: its own, a matrix kernel family's, and one more for small models."""
    names: tuple[str, ...] = (term,)
    if term == MAIN_TERM[kind]:
        names += (f"{term}:{work.quant_class}",)
    return (*names, "small") if _halvings(work) else names


def prior_sd(
    kind: StepKind, costs: Sequence[Term], work: ModelWork, device: SpeedDevice, fit: SpeedFit
) -> dict[str, float]:
    """Spread of each correction for a device that was never measured."""
    width = fit.width(kind, device.backend)
    spread: dict[str, float] = {}
    for cost in costs:
        own = BATCH_SD if cost.name == "batch" else width * _TERM_SD[kind][cost.name]
        if cost.name not in (MAIN_TERM[kind], "batch"):
            own = min(own, _SIDE_TERM_SD_MOST)
        spread[cost.name] = math.hypot(own, *_extra_sd(kind, cost, work, device, fit))
        for name in correction_names(cost.name, kind, work)[1:]:
            spread[name] = width * _QUANT_SD
    if (halvings := _halvings(work)) > 0:
        spread["small"] = min(_SMALL_SD_MOST, _SMALL_SD_PER_HALVING[kind] * halvings)
    return spread


def _halvings(work: ModelWork) -> float:
    """How often the size must be halved to come from the sizes that were measured to this one."""
    return max(0.0, math.log2(_SMALL_PARAMS / max(1.0, work.active_params + work.output_params)))


def _extra_sd(
    kind: StepKind, cost: Term, work: ModelWork, device: SpeedDevice, fit: SpeedFit
) -> Iterator[float]:
    """What the widths, learned from plain rows, do not cover."""
    if any(".arch=" in name and name not in fit.factors for name in cost.factors):
        yield _UNSEEN_CLASS_SD
    if any(name.endswith(".experts") for name in cost.factors):
        yield _EXPERTS_SD[kind]
    if device.assumed and cost.name in ("weights", "kv"):
        yield _ASSUMED_BANDWIDTH_SD
    if work.state_bytes:
        yield _RECURRENT_SD


def _variance(weight: Mapping[str, float], known: Corrections, prior: Mapping[str, float]) -> float:
    """Of the sum's logarithm: measured corrections with their covariance, the others with their prior."""
    unmeasured = sum((share * prior[name]) ** 2 for name, share in weight.items() if name not in known.names)
    share = [weight.get(name, 0.0) for name in known.names]
    return unmeasured + sum(
        one * entry * other
        for one, line in zip(share, known.covariance, strict=True)
        for entry, other in zip(line, share, strict=True)
    )
