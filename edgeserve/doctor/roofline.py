"""Measured decode and prefill against what the machine's memory and arithmetic allow at most.

Owns the two bounds of a step (its bytes at full bandwidth, its arithmetic at peak: the roofline of Williams,
Waterman and Patterson, 2009), which of a machine's figures are bounds, and the words. Does not know how a
server was looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf

from edgeserve.doctor.observed import Observed
from edgeserve.ink import significant
from edgeserve.metrics import step_lower_bound_s
from edgeserve.planner.placement import HOST_NAME
from edgeserve.planner.speed_terms import ModelWork
from edgeserve.planner.target import Target

VENDOR = "the device's peak"
CALIBRATED = "the most that `edgeserve devices calibrate` reached here"
_DEFAULT_UBATCH = 512


@dataclass(frozen=True, slots=True)
class Peak:
    """At most so many of a unit (GB/s or GFLOP/s) on a device, and where that is known from."""

    value: float
    source: str


@dataclass(frozen=True, slots=True)
class Peaks:
    """Of the device that computes a model; None where nobody has stated or measured it."""

    bandwidth_gb_s: Peak | None = None
    gflops: Peak | None = None


@dataclass(frozen=True, slots=True)
class RoofPoint:
    """One phase ("decode" or "prefill"): measured tokens a second, the bytes and operations that they take at
    least, and the bound that follows; `bound_tok_s` None where no peak is known. `bound_by`: "memory" or
    "arithmetic", whichever comes first."""

    phase: str
    tok_s: float
    gb_s: float
    gflops: float
    peaks: Peaks
    bound_tok_s: float | None
    bound_by: str

    @property
    def share(self) -> float | None:
        return self.tok_s / self.bound_tok_s if self.bound_tok_s else None


def peaks_of(target: Target, work: ModelWork, num_gpu_layers: int) -> Peaks | None:
    """None where a model's layers are split between devices: then no single roof lies above them."""
    is_on_host = not target.accelerators or num_gpu_layers == 0
    is_on_card = len(target.accelerators) == 1 and (num_gpu_layers < 0 or num_gpu_layers > work.n_layer)
    if not is_on_host and not is_on_card:
        return None
    name = HOST_NAME if is_on_host else target.accelerators[0].name
    device, calibration = target.speeds[name], target.calibration(name)
    bandwidth = None if device.assumed else device.bandwidth_gb_s
    # A processor's compute is counted in cores, which is no peak.
    tflops = None if device.backend == "cpu" else (target.profile.fp16_matrix_tflops or device.tflops)
    reached = calibration.gflops.get(work.quant_class) if calibration else None
    return Peaks(
        _peak(bandwidth, calibration.bandwidth_gb_s if calibration else None),
        _peak(1e3 * tflops if tflops else None, reached),
    )


def _peak(stated: float | None, reached: float | None) -> Peak | None:
    if stated is not None:
        return Peak(stated, VENDOR)
    return None if reached is None else Peak(reached, CALIBRATED)


def roofline(seen: Observed, work: ModelWork, peaks: Peaks) -> list[RoofPoint]:
    """The phases that were measured."""
    return [*_decode(seen, work, peaks), *_prefill(seen, work, peaks)]


def _decode(seen: Observed, work: ModelWork, peaks: Peaks) -> Iterator[RoofPoint]:
    """One step: the weights once, and each stream's context; its prompt and half its answer on average."""
    if not seen.decode_step_s or not seen.decodes_per_step:
        return
    num = max(1.0, seen.decodes_per_step)
    resident = (seen.mean_prompt_tokens or 0.0) + (seen.mean_output_tokens or 0.0) / 2
    num_bytes = work.weights_read_bytes(num) + num * work.context_bytes(resident)
    per_token = 2.0 * (work.active_params + work.output_params) + work.attention_flops(1, resident)
    yield _point("decode", num, seen.decode_step_s, num * per_token, num_bytes, peaks)


def _prefill(seen: Observed, work: ModelWork, peaks: Peaks) -> Iterator[RoofPoint]:
    """One prompt of the mean length, the weights once a micro-batch: smaller pieces read them more often."""
    if not seen.prefill_tok_s or not seen.mean_prompt_tokens:
        return
    num = seen.mean_prompt_tokens
    ubatch = seen.settings.get("n_ubatch")
    size = ubatch if isinstance(ubatch, int) and ubatch > 0 else _DEFAULT_UBATCH
    flops = 2.0 * (work.active_params * num + work.output_params) + work.attention_flops(num, 0)
    num_bytes = ceil(num / size) * work.weights_read_bytes(min(num, size))
    yield _point("prefill", num, num / seen.prefill_tok_s, flops, num_bytes, peaks)


def _point(
    phase: str, num_tokens: float, seconds: float, flops: float, num_bytes: float, peaks: Peaks
) -> RoofPoint:
    peak_flops = peaks.gflops.value * 1e9 if peaks.gflops else inf
    bandwidth = peaks.bandwidth_gb_s.value * 1e9 if peaks.bandwidth_gb_s else inf
    least_s = step_lower_bound_s(flops, num_bytes, peak_flops, bandwidth)
    return RoofPoint(
        phase,
        tok_s=num_tokens / seconds,
        gb_s=num_bytes / seconds / 1e9,
        gflops=flops / seconds / 1e9,
        peaks=peaks,
        bound_tok_s=num_tokens / least_s if least_s else None,
        bound_by="memory" if num_bytes / bandwidth >= flops / peak_flops else "arithmetic",
    )


def roofline_lines(points: Sequence[RoofPoint]) -> list[str]:
    """A sentence for each phase, and one where no bound is known."""
    lines = [_sentence(point) for point in points]
    if any(point.bound_tok_s is None for point in points):
        lines.append(
            "What this machine can do at most is not known: `edgeserve devices calibrate` measures it."
        )
    return lines


def _sentence(point: RoofPoint) -> str:
    does = f"{point.phase} {significant(point.tok_s)} tok/s"
    work = f"at least {significant(point.gb_s)} GB/s read and {significant(point.gflops)} GFLOP/s computed"
    if point.bound_tok_s is None:
        return f"{does}: {work}."
    peak, unit = (
        (point.peaks.bandwidth_gb_s, "GB/s")
        if point.bound_by == "memory"
        else (point.peaks.gflops, "GFLOP/s")
    )
    assert peak is not None  # the bound was computed from it
    return (
        f"{does}, {100 * (point.share or 0.0):.0f} % of the {significant(point.bound_tok_s)} that"
        f" {significant(peak.value)} {unit} allow ({peak.source}): {work}."
    )


def roofline_json(points: Sequence[RoofPoint]) -> list[Mapping[str, object]]:
    return [
        {
            "phase": point.phase,
            "tok_s": point.tok_s,
            "bytes_gb_s": point.gb_s,
            "gflops": point.gflops,
            "bound_tok_s": point.bound_tok_s,
            "bound_by": point.bound_by if point.bound_tok_s else None,
            "share_of_bound": point.share,
        }
        for point in points
    ]
