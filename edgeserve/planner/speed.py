"""Expected speed of a model on a device: tokens per second and time to first token, as intervals.

Owns the questions people ask and the sum over devices when layers are split between them. The costs are in
speed_terms.py, what is known of a device in speed_step.py and speed_calibration.py. Knows nothing of memory:
whether a model fits at all is asked elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from edgeserve.errors import UsageError
from edgeserve.planner.speed_calibration import Calibration
from edgeserve.planner.speed_step import SpeedFit, StepEstimate, estimate_step, load_fit
from edgeserve.planner.speed_terms import ModelWork, SpeedDevice, SpeedSettings, StepKind

# Half-width of the interval that holds 9 of 10, in standard deviations of a normal distribution.
_NINE_OF_TEN = 1.645


@dataclass(frozen=True, slots=True)
class Interval:
    """`mid` is the expectation; 9 of 10 values are expected between `low` and `high`."""

    low: float
    mid: float
    high: float


@dataclass(frozen=True, slots=True)
class SpeedPart:
    """The layers that one device computes."""

    work: ModelWork
    device: SpeedDevice
    calibration: Calibration | None = None


@dataclass(frozen=True, slots=True)
class SpeedEstimate:
    """Expected speed at `settings`. None where the device's figures do not allow a prediction.

    `decode_tok_s`: one sequence alone. `total_decode_tok_s`: all of `settings.num_sequences` together, as
    one figure for the machine. Both with `settings.num_resident` tokens in each sequence. `prefill_tok_s`: a
    prompt of `settings.n_prompt` tokens. `…_shares`: which cost takes which part of the time. `basis`: what
    it rests on.
    """

    settings: SpeedSettings
    decode_tok_s: Interval | None
    total_decode_tok_s: Interval | None
    prefill_tok_s: Interval | None
    decode_shares: Mapping[str, float]
    prefill_shares: Mapping[str, float]
    basis: str
    _parts: tuple[SpeedPart, ...]
    _fit: SpeedFit

    def ttft_s(self, n_prompt: int, num_cached: int = 0) -> Interval | None:
        """Seconds to the first token of a prompt whose first `num_cached` tokens are resident; no queue."""
        n_new = max(1, n_prompt - num_cached)
        settings = replace(self.settings, n_prompt=n_new, num_resident=num_cached)
        return _interval(_step("prefill", self._parts, settings, self._fit), lambda seconds: seconds)


def predict(
    work: ModelWork,
    device: SpeedDevice,
    settings: SpeedSettings | None = None,
    *,
    calibration: Calibration | None = None,
    fit: SpeedFit | None = None,
) -> SpeedEstimate:
    """Expected speed with all layers on one device."""
    return predict_split([SpeedPart(work, device, calibration)], settings, fit=fit)


def predict_split(
    parts: Sequence[SpeedPart], settings: SpeedSettings | None = None, *, fit: SpeedFit | None = None
) -> SpeedEstimate:
    """Expected speed with layers on several devices: they work one after the other, so the times add up.

    For long prompts llama.cpp may move weights to the GPU instead of computing on the host; the sum is then
    on the slow side. Raises UsageError for settings that make no sense.
    """
    settings = settings or SpeedSettings()
    if not parts or min(settings.n_prompt, settings.num_sequences, settings.n_ubatch) < 1:
        raise UsageError("A prompt, a sequence, a batch and a device are the least to predict for.")
    fit = fit or load_fit()
    alone = _step("decode", parts, replace(settings, num_sequences=1), fit)
    together = _step("decode", parts, settings, fit)
    prompt = _step("prefill", parts, settings, fit)
    return SpeedEstimate(
        settings,
        decode_tok_s=_interval(alone, lambda seconds: 1.0 / seconds),
        total_decode_tok_s=_interval(together, lambda seconds: settings.num_sequences / seconds),
        prefill_tok_s=_interval(prompt, lambda seconds: settings.n_prompt / seconds),
        decode_shares=_shares(together),
        prefill_shares=_shares(prompt),
        basis=_basis(parts, fit),
        _parts=tuple(parts),
        _fit=fit,
    )


def _step(
    kind: StepKind, parts: Sequence[SpeedPart], settings: SpeedSettings, fit: SpeedFit
) -> StepEstimate | None:
    """The sum over devices; what is unknown of one device is independent of the others."""
    total, variance = 0.0, 0.0
    term_s: dict[str, float] = {}
    for part in parts:
        corrections = part.calibration.corrections(kind) if part.calibration else None
        step = estimate_step(kind, part.work, part.device, settings, fit, corrections)
        if step is None:
            return None
        total += step.seconds
        variance += (step.seconds * step.log_sd) ** 2
        for name, seconds in step.term_s.items():
            term_s[name] = term_s.get(name, 0.0) + seconds
    return StepEstimate(total, math.sqrt(variance) / total, term_s)


def _interval(step: StepEstimate | None, convert: Callable[[float], float]) -> Interval | None:
    if step is None:
        return None
    spread = math.exp(_NINE_OF_TEN * step.log_sd)
    ends = sorted((convert(step.seconds / spread), convert(step.seconds * spread)))
    return Interval(ends[0], convert(step.seconds), ends[1])


def _shares(step: StepEstimate | None) -> dict[str, float]:
    return {} if step is None else {name: seconds / step.seconds for name, seconds in step.term_s.items()}


def _basis(parts: Sequence[SpeedPart], fit: SpeedFit) -> str:
    sentences = dict.fromkeys(_part_basis(part, fit) for part in parts)
    return " ".join(sentences)


def _part_basis(part: SpeedPart, fit: SpeedFit) -> str:
    backend = part.device.backend
    if part.calibration is not None:
        return f"Calibrated on this device ({backend})."
    count = fit.num_devices.get(f"{backend}.decode", 0)
    if part.device.assumed:
        return "The host's memory bandwidth is assumed: measure it for a narrower interval."
    if count == 0:
        return f"No device was measured with {backend}: a rough guess."
    return f"Learned from {count} other devices measured with {backend}."
