"""This machine as a target: its memory now, the devices that the installed build can use, what was measured.

Owns the question to the runtime, which is asked in a child process and only when its files say that it can
use a GPU at all. Nothing of it is loaded here.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edgeserve.errors import UsageError
from edgeserve.planner import calibration_store
from edgeserve.planner.calibration_store import MachineCalibration, fingerprint
from edgeserve.planner.goals import Goals
from edgeserve.planner.target import Target, measured_target
from edgeserve.planner.this_machine import GgmlDevice, ThisMachine, nvml_devices, this_machine

_PROBE_TIMEOUT_S = 60.0
# Libraries of ggml's backends, as the bindings' wheels carry them: libggml-cuda.so, ggml-vulkan.dll.
_GPU_BACKENDS = ("cuda", "hip", "vulkan", "metal", "sycl", "opencl", "musa", "cann")


def here(goals: Goals | None = None, backend: str = "") -> Target:
    """This machine, with what is free now and what the installed build can use."""
    machine, notes = machine_now()
    calibration, more = known_calibration(machine)
    return measured_target(
        machine,
        goals,
        calibration.calibrations if calibration else {},
        backend,
        flash_attn_on_cpu=calibration.flash_attn_on_cpu if calibration else False,
        notes=[*notes, *more],
    )


def machine_now() -> tuple[ThisMachine, list[str]]:
    """The machine, and what is worth saying about how it was looked at."""
    backends = build_backends()
    if backends is None:
        # No runtime: plan for what a build with GPU support would find.
        return this_machine(), []
    if not backends:
        return this_machine(()), _unused_cards()
    devices, problem = ask_devices()
    return this_machine(devices), [problem] if problem else []


def _unused_cards() -> list[str]:
    cards = nvml_devices()
    if not cards:
        return []
    return [
        f"{cards[0].description} is here, but this build of llama.cpp has no GPU support:"
        " `make install BACKEND=cuda`."
    ]


def build_backends() -> tuple[str, ...] | None:
    """GPU backends of the installed build, by the names of its libraries; None when none is installed."""
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or not spec.submodule_search_locations:
        return None
    folders = [Path(folder) / "lib" for folder in spec.submodule_search_locations]
    names = [path.name for folder in folders if folder.is_dir() for path in folder.iterdir()]
    return tuple(backend for backend in _GPU_BACKENDS if any(f"ggml-{backend}" in name for name in names))


def ask_devices() -> tuple[Sequence[GgmlDevice], str]:
    """ggml's device list from a child process; empty with a sentence when it cannot be had."""
    try:
        answers = ask_probe({"want": "devices"}, _PROBE_TIMEOUT_S)
        return [GgmlDevice(**device) for answer in answers for device in answer["devices"]], ""
    except (UsageError, KeyError, TypeError) as error:
        return (), f"The devices of this build are not known, so the plan is for the processor: {error}"


def ask_probe(request: dict[str, object], timeout_s: float) -> list[dict[str, Any]]:
    """The lines that edgeserve.speed_probe answers. Raises UsageError when it fails."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "edgeserve.speed_probe"],
            input=json.dumps(request),
            env={**os.environ, "GGML_NO_BACKTRACE": "1", "PYTHONPATH": _python_path()},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError("The runtime gave no answer.", str(error)) from None
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    errors = [str(answer["error"]) for answer in answers if "error" in answer]
    if errors or done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UsageError("The runtime failed.", errors[0] if errors else last)
    return answers


def _python_path() -> str:
    """The child must find this edgeserve, whatever folder it is started in."""
    root = str(Path(__file__).resolve().parent.parent.parent)
    return os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))


def known_calibration(machine: ThisMachine) -> tuple[MachineCalibration | None, list[str]]:
    """What was measured here, if it was this machine as it is now."""
    try:
        calibration = calibration_store.load()
    except UsageError as error:
        return None, [error.message]
    if calibration is None:
        return None, []
    if calibration.machine != fingerprint(machine):
        return None, [
            f"The calibration of {calibration.made} is not used: it was made for {calibration.machine}."
        ]
    return calibration, []
