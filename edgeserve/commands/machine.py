"""`edgeserve devices show` and `devices calibrate`: one machine's figures, and how this one is measured."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from edgeserve import models
from edgeserve.commands import devices
from edgeserve.errors import ModelNotFoundError, UsageError
from edgeserve.local_models import find_local_models
from edgeserve.model_list import read_models_list
from edgeserve.planner import calibration_store
from edgeserve.planner.calibrate import as_profile
from edgeserve.planner.calibrate import calibrate as measure
from edgeserve.planner.calibration_store import MachineCalibration, MeasuredRow
from edgeserve.planner.device import profile_to_toml
from edgeserve.planner.device_search import find_profile
from edgeserve.planner.here import here, known_calibration, machine_now
from edgeserve.planner.target import Target, described_target
from edgeserve.planner.words import number, size

# A second model for a calibration is only worth it when it can be measured in the time there is.
_LARGEST_SECOND_BYTES = 2 << 30
# Below this, what runs beside a measurement is a desktop at rest.
_BUSY_PERCENT = 25.0
_LOOK_S = 0.5


def show(name: str | None, *, as_json: bool) -> int:
    """One machine's figures; this one's without a name."""
    if name is not None:
        choice = find_profile(name)
        target = described_target(choice)
        if as_json:
            print(_dump({**asdict(choice), "pools": _pools_json(target)}))
        else:
            print("\n".join([*devices.details(choice), *pool_lines(target)]))
        return 0
    machine, notes = machine_now()
    calibration, more = known_calibration(machine)
    target = here()
    if as_json:
        print(
            _dump(
                {
                    "profile": asdict(machine.profile),
                    "pools": _pools_json(target),
                    "cpu": asdict(machine.cpu),
                    "memory": asdict(machine.memory),
                    "calibration": calibration_json(calibration) if calibration else None,
                    "notes": [*notes, *more],
                }
            )
        )
        return 0
    lines = [
        f"{'machine':12}{machine.profile.name or 'unknown'}",
        f"{'backends':12}{', '.join(machine.profile.backends)}",
        f"{'threads':12}{machine.cpu.n_threads}: {machine.cpu.reason}",
        *pool_lines(target),
        *(calibration_lines(calibration) if calibration else [f"{'measured':12}not yet: {_HOW}"]),
        *(f"{'note':12}{note}" for note in [*notes, *more]),
    ]
    print("\n".join(lines))
    return 0


_HOW = "`edgeserve devices calibrate` takes less than a minute"


def pool_lines(target: Target) -> Iterator[str]:
    """What a plan may use of each memory, and why it is not all."""
    for pool in target.pools:
        yield f"{'usable':12}{size(pool.usable_bytes)} of {size(pool.total_bytes)} {pool.name}: {pool.reason}"


def _pools_json(target: Target) -> list[dict[str, Any]]:
    return [asdict(pool) for pool in target.pools]


# --- calibrate


def calibrate(references: Sequence[str], export: Path | None, *, as_json: bool) -> int:
    """Measure, keep, and say what was found."""
    if export is not None and export.suffix != ".toml":
        raise UsageError(f"{export} must end in .toml.", "Profiles are read by that ending.")
    if note := busy_note(psutil.cpu_percent(interval=_LOOK_S)):
        print(note, file=sys.stderr)
    found, _ = measure(_models(references))
    kept = calibration_store.save(found)
    if export is not None:
        _export(found, export)
    if as_json:
        print(_dump({**calibration_json(found), "path": str(kept)}))
        return 0
    print("\n".join([*calibration_lines(found), f"{'kept in':12}{kept}"]))
    return 0


def busy_note(percent: float) -> str:
    """What is wrong with measuring while others compute; "" when they do not."""
    if percent < _BUSY_PERCENT:
        return ""
    return (
        f"note: other programs keep the processor {percent:.0f} % busy, so what is measured now will be too"
        " slow. Calibrate again when it is idle."
    )


def _export(found: MachineCalibration, path: Path) -> None:
    machine, _ = machine_now()
    try:
        path.write_text(profile_to_toml(as_profile(found, machine)), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}.") from None


def _models(references: Sequence[str]) -> list[Path]:
    """The models asked for; otherwise the list's first and the next larger one that is here."""
    if references:
        return [models.locate(reference) for reference in references]
    found: list[Path] = []
    try:
        found.append(models.locate(read_models_list()[0].name, offline=True))
    except ModelNotFoundError:
        found.append(models.locate(read_models_list()[0].name))
    least = found[0].stat().st_size
    others = sorted(
        (model.n_bytes, model.path)
        for model in find_local_models()
        if 2 * least < model.n_bytes <= _LARGEST_SECOND_BYTES and model.num_parts == 1
    )
    return [*found, *(path for _, path in others[-1:])]


def calibration_lines(found: MachineCalibration) -> Iterator[str]:
    """What was measured and how well it is reproduced."""
    for backend, one in found.calibrations.items():
        parts = [f"{backend} on {found.made}"]
        if one.bandwidth_gb_s:
            parts.append(f"reads weights at {one.bandwidth_gb_s:.3g} GB/s")
        parts += [f"{rate:,.0f} GFLOPS in prompts ({kind} weights)" for kind, rate in one.gflops.items()]
        if one.overhead_s:
            parts.append(f"{one.overhead_s * 1000:.2g} ms a step besides")
        yield f"{'measured':12}{'; '.join(parts)}"
    verdict = "pays here" if found.flash_attn_on_cpu else "does not pay here"
    yield f"{'attention':12}flash attention on the processor {verdict}"
    yield from (f"{'':12}{row_text(row)}" for row in found.rows)


def row_text(row: MeasuredRow) -> str:
    """One measured time beside what the calibration now predicts for it."""
    if row.kind == "decode":
        what = f"decode {row.num_sequences} × with {row.num_resident:,} tokens resident"
        rates = f"{number(row.num_sequences / row.seconds)} tok/s"
    else:
        what = f"prompt of {row.n_prompt:,} tokens"
        rates = f"{number(row.n_prompt / row.seconds)} tok/s"
    if row.predicted_s is None:
        return f"{Path(row.model).stem}: {what}: {rates}"
    off = f"{100 * (row.seconds / row.predicted_s - 1):+.0f} %".replace("-", "−")
    return f"{Path(row.model).stem}: {what}: {rates}, predicted {off}"


def calibration_json(found: MachineCalibration) -> dict[str, Any]:
    return {
        "machine": found.machine,
        "made": found.made,
        "flash_attn_on_cpu": found.flash_attn_on_cpu,
        "backends": {
            backend: {
                "bandwidth_gb_s": one.bandwidth_gb_s,
                "gflops": dict(one.gflops),
                "overhead_s": one.overhead_s,
            }
            for backend, one in found.calibrations.items()
        },
        "rows": [asdict(row) for row in found.rows],
    }


def _dump(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=1, allow_nan=False)
