"""Measure this machine: a few steps of the engine in a child process, and what they say of its speed.

Owns which steps are taken from the child's answers and the judgement on flash attention. The fitting is
`speed_calibration`'s matter, the keeping `calibration_store`'s.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgeserve.errors import UsageError
from edgeserve.gguf import read_header
from edgeserve.planner.calibration_store import MachineCalibration, MeasuredRow, fingerprint
from edgeserve.planner.device import DeviceProfile
from edgeserve.planner.here import ask_probe, machine_now
from edgeserve.planner.model_work import model_work
from edgeserve.planner.speed_calibration import Calibration, Measurement, calibrate_from
from edgeserve.planner.speed_step import estimate_step, load_fit
from edgeserve.planner.speed_terms import SpeedDevice, SpeedSettings
from edgeserve.planner.target import Target, measured_target
from edgeserve.planner.this_machine import ThisMachine

BUDGET_S = 30.0
"""Seconds for all models together, loading aside."""

_TIMEOUT_S = 170.0
_CHUNKED = "chunked prefill"
# Flash attention must be faster by this much before it is worth giving up the plain path.
_PAYS = 0.95

Ask = Callable[[dict[str, object], float], list[dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class _Case:
    """One model on one backend of this machine."""

    path: Path
    backend: str
    device: SpeedDevice
    n_gpu_layers: int
    modes: tuple[str, ...]


def calibrate(
    models: Sequence[Path], *, budget_s: float = BUDGET_S, ask: Ask = ask_probe
) -> tuple[MachineCalibration, Target]:
    """Measure `models` on this machine. Raises UsageError when nothing can be measured."""
    if not models:
        raise UsageError("A calibration needs a model.", "`edgeserve models pull smollm2-135m` is enough.")
    machine, _ = machine_now()
    target = measured_target(machine)
    cases = list(_cases(models, target))
    rows = [row for case in cases for row in _measured(case, machine, budget_s / len(cases), ask)]
    on_cpu = flash_attn_pays([row for row in rows if row.backend == "cpu"])
    calibrations: dict[str, Calibration] = {}
    shown: list[MeasuredRow] = []
    for backend in dict.fromkeys(case.backend for case in cases):
        own = [row for row in rows if row.backend == backend]
        device = next(case.device for case in cases if case.backend == backend)
        used = [row for row in own if backend != "cpu" or row.flash_attn == on_cpu]
        calibrations[backend], predicted = _fitted(used, device, models)
        shown += predicted
    today = datetime.date.today().isoformat()
    found = MachineCalibration(fingerprint(machine), today, calibrations, on_cpu, tuple(shown))
    return found, target


def _cases(models: Sequence[Path], target: Target) -> Iterator[_Case]:
    """Every model on the processor, and on the GPU where there is one."""
    for path in models:
        if target.accelerators:
            device = target.speeds[target.accelerators[0].name]
            yield _Case(path, target.backend, device, 999, ("on",))
        yield _Case(path, "cpu", target.speeds["CPU"], 0, ("off", "on"))


def _measured(case: _Case, machine: ThisMachine, budget_s: float, ask: Ask) -> Iterator[MeasuredRow]:
    request: dict[str, object] = {
        "want": "speed",
        "path": str(case.path),
        "n_threads": machine.cpu.n_threads,
        "n_gpu_layers": case.n_gpu_layers,
        "flash_attn": list(case.modes),
        "budget_s": budget_s,
    }
    for answer in ask(request, _TIMEOUT_S):
        fields = {name: value for name, value in answer.items() if name != "count"}
        yield MeasuredRow(model=str(case.path), backend=case.backend, **fields)


def flash_attn_pays(rows: Sequence[MeasuredRow]) -> bool:
    """Whether flash attention is faster here in prompts, small chunks and long contexts taken together."""
    times = {
        on: [row.seconds for row in rows if row.flash_attn is on and _counts(row)] for on in (False, True)
    }
    if not times[True] or len(times[True]) != len(times[False]):
        return False
    ratios = [on / off for on, off in zip(times[True], times[False], strict=True)]
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) < _PAYS


def _counts(row: MeasuredRow) -> bool:
    return row.num_sequences == 1 and (row.kind != "decode" or row.num_resident > 256)


def _fitted(
    rows: Sequence[MeasuredRow], device: SpeedDevice, models: Sequence[Path]
) -> tuple[Calibration, list[MeasuredRow]]:
    """The calibration, and the rows with what it predicts for them."""
    works = {str(path): model_work(read_header(path)) for path in models}
    kept = [row for row in rows if row.kind != _CHUNKED]
    measurements = [
        Measurement(
            "decode" if row.kind == "decode" else "prefill", works[row.model], _asked(row), row.seconds
        )
        for row in kept
    ]
    calibration = calibrate_from(measurements, device)
    fit = load_fit()
    shown = []
    for row, one in zip(kept, measurements, strict=True):
        corrections = calibration.corrections(one.kind)
        step = estimate_step(one.kind, one.work, device, one.settings, fit, corrections)
        shown.append(replace(row, predicted_s=step.seconds if step else None))
    return calibration, shown


def _asked(row: MeasuredRow) -> SpeedSettings:
    return SpeedSettings(
        n_prompt=row.n_prompt,
        num_resident=row.num_resident if row.kind == "decode" else 0,
        num_sequences=row.num_sequences,
        n_ubatch=row.n_ubatch,
        flash_attn=row.flash_attn,
    )


def as_profile(calibration: MachineCalibration, machine: ThisMachine) -> DeviceProfile:
    """This machine as a profile that others can plan with: measured bandwidth in place of a vendor's."""
    profile = machine.profile
    own = calibration.calibrations.get(profile.backends[0]) or next(iter(calibration.calibrations.values()))
    return replace(
        profile,
        vendor=profile.vendor or "unknown",
        bandwidth_gb_s=round(own.bandwidth_gb_s, 1) if own.bandwidth_gb_s else profile.bandwidth_gb_s,
        bandwidth_source=f"rate at which decode read weights, measured on {calibration.made}",
        confidence="memory, cores and bandwidth measured",
    )
