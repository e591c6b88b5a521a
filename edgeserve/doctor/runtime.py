"""The probe's report and what it means: the runtime's part of `edgeserve doctor`.

Owns starting the child, and the reading of how it ended: answers, an error with a sentence, a signal, or
silence. Never imports the runtime.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from edgeserve.doctor.hardware import (
    WHEEL_FEATURES,
    Gpu,
    build_features,
    missing_features,
)
from edgeserve.host import format_gib
from edgeserve.ink import significant

Level = Literal["ok", "note", "problem"]
PROBE_TIMEOUT_S = 60.0
# Windows reports a crash as an NTSTATUS in the exit code.
_NTSTATUS = {0xC000001D: signal.SIGILL, 0xC0000005: signal.SIGSEGV}
_STAGES = {
    "import": "while its library was loading",
    "devices": "while it looked for devices",
    "load": "while it loaded a model",
    "decode": "in a test decode",
}
_BACKENDS = {
    "cuda": "CUDA",
    "rocm": "ROCm",
    "hip": "ROCm",
    "metal": "Metal",
    "mtl": "Metal",
    "vulkan": "Vulkan",
}
_LIBRARIES = {
    "libgomp": "Install it: `apt-get install libgomp1`, or your system's package of GCC's OpenMP runtime.",
    "libcuda.so": "It comes with NVIDIA's driver: install that, or a CPU build with `make install`.",
    "libcud": "It comes with NVIDIA's CUDA runtime: install that, or a CPU build with `make install`.",
    "libcublas": "It comes with NVIDIA's CUDA runtime: install that, or a CPU build with `make install`.",
    "libvulkan": "Install it: `apt-get install libvulkan1`, or a CPU build with `make install`.",
    "libstdc++": "Yours is older than this build: update GCC's runtime, or `make install BACKEND=native`.",
}
_REBUILD = "Reinstall it compiled for this machine: `make install BACKEND=native`."
_GPU_REMEDY = {
    "NVIDIA": "`make install BACKEND=cuda`",
    "AMD": "`make install BACKEND=vulkan` (or rocm)",
    "Apple": "`make install BACKEND=metal`",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that doctor has to say. `figures` are what it rests on, by name with the unit last."""

    level: Level
    sentence: str
    remedy: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """What a probe said before it ended. `facts` are its answers, `stage` what it last set out to do.

    `died_of` is the signal that ended it; None when it ended by itself. `last_words` is its last line on
    standard error.
    """

    facts: Mapping[str, Any]
    stage: str = ""
    died_of: signal.Signals | None = None
    timed_out: bool = False
    exit_code: int = 0
    last_words: str = ""

    @property
    def is_complete(self) -> bool:
        return self.exit_code == 0 and self.died_of is None and not self.timed_out


def probe_command(model: Path | None, n_threads: int, *, repack: bool = True) -> list[str]:
    """The child to run."""
    command = [sys.executable, "-m", "edgeserve.doctor.probe", "--threads", str(n_threads)]
    if model is not None:
        command += ["--model", str(model)]
    return command if repack else [*command, "--no-repack"]


def run_probe(command: Sequence[str], timeout_s: float = PROBE_TIMEOUT_S) -> ProbeReport:
    """Run the child and read what it said, however it ended."""
    package_root = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, (package_root, os.environ.get("PYTHONPATH"))))
    environ = {**os.environ, "PYTHONPATH": path, "PYTHONIOENCODING": "utf-8"}
    try:
        done = subprocess.run(command, capture_output=True, timeout=timeout_s, env=environ, check=False)
    except subprocess.TimeoutExpired as error:
        facts, stage = _read_lines(error.stdout)
        return ProbeReport(facts, stage, timed_out=True)
    except OSError as error:
        return ProbeReport({}, exit_code=1, last_words=str(error))
    facts, stage = _read_lines(done.stdout)
    words = done.stderr.decode("utf-8", "replace").strip().splitlines()
    died_of = _signal_of(done.returncode)
    return ProbeReport(facts, stage, died_of, False, done.returncode, words[-1] if words else "")


def _read_lines(output: bytes | None) -> tuple[dict[str, Any], str]:
    facts: dict[str, Any] = {}
    for line in (output or b"").decode("utf-8", "replace").splitlines():
        try:
            answer = json.loads(line)
        except ValueError:
            continue  # the last line of a child that died while writing it
        facts.update(answer if isinstance(answer, dict) else {})
    return facts, str(facts.pop("stage", ""))


def _signal_of(return_code: int) -> signal.Signals | None:
    if return_code < 0 and -return_code in set(signal.Signals):
        return signal.Signals(-return_code)
    return _NTSTATUS.get(return_code & 0xFFFFFFFF) if return_code > 255 or return_code < 0 else None


# --- what it means -----------------------------------------------------------------------------------------


def failure_finding(report: ProbeReport, flags: frozenset[str]) -> Finding | None:
    """Why the probe did not get to its end; None when it did."""
    if report.is_complete:
        return None
    where = _STAGES.get(report.stage, "before it began")
    figures = {"stage": report.stage, "exit_code": report.exit_code}
    if report.died_of is signal.SIGILL:
        return Finding("problem", f"{_illegal_instruction(report, flags)}, {where}.", _REBUILD, figures)
    if report.died_of is not None:
        name = report.died_of.name
        killed = " It may have run out of memory." if name == "SIGKILL" else ""
        return Finding("problem", f"The runtime died of {name} {where}.{killed}", _REBUILD, figures)
    if report.timed_out:
        return Finding(
            "problem", f"The runtime gave no answer {where}.", "Try again with the machine idle.", figures
        )
    message = str(report.facts.get("error") or report.last_words or "The probe ended without a word.")
    return Finding("problem", message, _error_remedy(message, str(report.facts.get("hint", ""))), figures)


def _illegal_instruction(report: ProbeReport, flags: frozenset[str]) -> str:
    features = build_features(str(report.facts.get("system_info", ""))) or WHEEL_FEATURES
    missing = ", ".join(missing_features(features, flags))
    which = missing or "which one the system does not tell"
    return f"This build uses instructions that this CPU or virtual machine does not have ({which})"


def _error_remedy(message: str, hint: str) -> str:
    for library, remedy in _LIBRARIES.items():
        if library in message:
            return remedy
    # The runtime's own hint may point here.
    return _REBUILD if "doctor" in hint else hint


def build_finding(report: ProbeReport, version: str) -> Finding | None:
    """Which build it is, once its library has loaded."""
    info = report.facts.get("system_info")
    if not isinstance(info, str):
        return None
    figures = {
        "llama_cpp_python": version,
        "system_info": info,
        "supports_gpu_offload": bool(report.facts.get("supports_gpu_offload")),
        "features": list(build_features(info)),
    }
    return Finding(
        "ok", f"llama-cpp-python {version}, {_backend(report)} build ({_highlights(info)})", "", figures
    )


def _backend(report: ProbeReport) -> str:
    if not report.facts.get("supports_gpu_offload"):
        return "CPU"
    for device in gpu_devices(report):
        name = str(device.get("name", "")).lower()
        for prefix, backend in _BACKENDS.items():
            if name.startswith(prefix):
                return backend
    return "GPU"


def _highlights(system_info: str) -> str:
    features = build_features(system_info)
    if "NEON" in features:
        names = {"DOTPROD": "dot products", "MATMUL_INT8": "I8MM", "SVE": "SVE", "SME": "SME"}
        return ", ".join(["NEON", *(shown for name, shown in names.items() if name in features)])
    widest = next(
        (name for name in ("AVX512", "AVX2", "AVX", "SSSE3") if name in features), "no vector units"
    )
    return f"{widest.replace('AVX512', 'AVX-512')}, {'AMX' if 'AMX_INT8' in features else 'no AMX'}"


def instruction_findings(report: ProbeReport, flags: frozenset[str]) -> list[Finding]:
    """Instruction sets that the build was made with and the kernel does not offer."""
    missing = missing_features(build_features(str(report.facts.get("system_info", ""))), flags)
    figures = {"missing": list(missing)}
    findings = []
    if "AMX_INT8" in missing:
        sentence = "this build has AMX, which this kernel or virtual machine does not let programs use"
        remedy = (
            "edgeserve leaves its AMX buffers off by itself; `make install BACKEND=native` builds without."
        )
        findings.append(Finding("note", sentence, remedy, figures))
    others = [name for name in missing if name != "AMX_INT8"]
    if others and report.is_complete:
        sentence = f"this build was made for instructions that this CPU does not have ({', '.join(others)})"
        findings.append(Finding("problem", sentence, _REBUILD, figures))
    return findings


def gpu_devices(report: ProbeReport) -> list[dict[str, Any]]:
    """ggml's own graphics devices."""
    found = report.facts.get("devices")
    return [
        entry for entry in found or [] if isinstance(entry, dict) and entry.get("type") in ("gpu", "igpu")
    ]


def gpu_findings(report: ProbeReport, gpus: Sequence[Gpu]) -> list[Finding]:
    """Graphics devices that the build uses, and those that it leaves lying."""
    if "supports_gpu_offload" not in report.facts:
        return []
    used = gpu_devices(report)
    if used:
        return [_device_finding(device) for device in used]
    figures = {
        "gpus": [{"vendor": gpu.vendor, "name": gpu.name, "memory_bytes": gpu.memory_bytes} for gpu in gpus]
    }
    if not gpus:
        return []
    present = "; ".join(_describe(gpu) for gpu in gpus)
    if report.facts["supports_gpu_offload"]:
        sentence = f"this build can offload but sees no device: {present} is present"
        return [
            Finding(
                "problem", sentence, "Check the graphics driver; in a container, pass the device in.", figures
            )
        ]
    sentence = f"this build cannot offload, so -ngl has no effect: {present} is present"
    return [Finding("note", sentence, _GPU_REMEDY[gpus[0].vendor], figures)]


def _describe(gpu: Gpu) -> str:
    article = "an AMD" if gpu.vendor == "AMD" else f"an {gpu.vendor}"
    name = gpu.name.removeprefix(f"{gpu.vendor} ").removeprefix("GeForce ")
    memory = [f"{format_gib(gpu.memory_bytes)} GiB"] if gpu.memory_bytes else []
    told = ", ".join(([] if name == "GPU" else [name]) + memory)
    return f"{article} GPU ({told})" if told else f"{article} GPU"


def _device_finding(device: Mapping[str, Any]) -> Finding:
    free, total = int(device.get("memory_free_bytes", 0)), int(device.get("memory_total_bytes", 0))
    memory = f", {format_gib(free)} of {format_gib(total)} GiB free" if total else ""
    return Finding("ok", f"{device.get('name')}: {device.get('description')}{memory}", "", dict(device))


def decode_finding(report: ProbeReport, model: Path | None) -> Finding | None:
    """How the test decode of one token went, if it was reached."""
    if "decode_ms" not in report.facts or model is None:
        return None
    milliseconds, codes = float(report.facts["decode_ms"]), report.facts.get("codes")
    figures = {"decode_ms": milliseconds, "model": model.name, "codes": codes}
    if codes != [0, 0]:
        return Finding(
            "problem", f"the test decode failed (llama_decode returned {codes})", _REBUILD, figures
        )
    return Finding("ok", f"a test decode ran ({significant(milliseconds)} ms, {model.stem})", "", figures)
