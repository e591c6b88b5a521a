"""What was measured of this machine, kept in the user's data folder until it is measured again.

Owns the file's format and its fingerprint: figures of another machine, or of this one with another number of
threads, are not used. Knows nothing of how they were measured.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from edgeserve.errors import UsageError
from edgeserve.folders import data_dir
from edgeserve.planner.speed_calibration import Calibration, calibration_from_json, calibration_to_json
from edgeserve.planner.this_machine import ThisMachine

_VERSION = 1


@dataclass(frozen=True, slots=True)
class MeasuredRow:
    """One measured time, as the child gave it; `predicted_s` is what the calibration then says."""

    model: str
    backend: str
    kind: str
    n_prompt: int
    num_resident: int
    num_sequences: int
    n_ubatch: int
    flash_attn: bool
    seconds: float
    predicted_s: float | None = None


@dataclass(frozen=True, slots=True)
class MachineCalibration:
    """All that was measured here. `made` is the day, `machine` the fingerprint."""

    machine: str
    made: str
    calibrations: Mapping[str, Calibration]
    flash_attn_on_cpu: bool = False
    rows: tuple[MeasuredRow, ...] = field(default_factory=tuple)


def fingerprint(machine: ThisMachine) -> str:
    """What speeds depend on: devices, backends, threads."""
    profile, threads = machine.profile, machine.cpu.n_threads
    return f"{profile.name} | {', '.join(profile.backends)} | {threads} threads"


def store_path() -> Path:
    return data_dir() / "calibration.json"


def save(calibration: MachineCalibration, path: Path | None = None) -> Path:
    """Write it in one step; returns where. Raises UsageError when the folder cannot be written."""
    path = path or store_path()
    document = {
        "version": _VERSION,
        "machine": calibration.machine,
        "made": calibration.made,
        "flash_attn_on_cpu": calibration.flash_attn_on_cpu,
        "calibrations": {
            backend: json.loads(calibration_to_json(one)) for backend, one in calibration.calibrations.items()
        },
        "rows": [asdict(row) for row in calibration.rows],
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        partial.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise UsageError(f"The calibration cannot be kept in {path}: {error.strerror or error}.") from None
    return path


def load(path: Path | None = None) -> MachineCalibration | None:
    """What is kept; None when there is nothing. Raises UsageError when it cannot be read."""
    path = path or store_path()
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    try:
        data: dict[str, Any] = json.loads(text)
        calibrations = {
            str(backend): calibration_from_json(json.dumps(one))
            for backend, one in data["calibrations"].items()
        }
        rows = tuple(MeasuredRow(**row) for row in data["rows"])
        if data["version"] != _VERSION:
            raise ValueError("another version of edgeserve wrote it")
        return MachineCalibration(
            str(data["machine"]), str(data["made"]), calibrations, bool(data["flash_attn_on_cpu"]), rows
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"The calibration in {path} cannot be read: measure again.", str(error)) from None
