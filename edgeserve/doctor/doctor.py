"""`edgeserve doctor`: what this installation and this machine can do, what is in the way, and the remedy.

Owns the order of the examination and how its findings are shown. The runtime runs in a child process only,
so that an illegal instruction or a missing library becomes a sentence instead of a dead terminal.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from edgeserve.doctor.hardware import Gpu, cpu_flags, find_gpus
from edgeserve.doctor.runtime import (
    Finding,
    ProbeReport,
    build_finding,
    decode_finding,
    failure_finding,
    gpu_findings,
    instruction_findings,
    probe_command,
    run_probe,
)
from edgeserve.errors import RuntimeUnavailableError
from edgeserve.host import CpuBudget, MemoryBudget, cpu_budget, format_gib, memory_budget
from edgeserve.ink import Ink, ink_for
from edgeserve.llama import check_version

RUNTIME = "llama-cpp-python"
_LEVEL_COLUMNS = 9


@dataclass(frozen=True, slots=True)
class Machine:
    """What the examination reads of the machine, gathered beforehand."""

    cpu: CpuBudget
    memory: MemoryBudget
    gpus: tuple[Gpu, ...]
    flags: frozenset[str]


def read_machine() -> Machine:
    return Machine(cpu_budget(), memory_budget(), find_gpus(), cpu_flags())


def run_doctor(model: Path | None = None, *, as_json: bool = False) -> int:
    """Examine, print to standard output, and return the exit code: 1 when something is broken.

    `model` is a GGUF file for a test decode; without one only the runtime's start is tried.
    """
    findings = examine(model)
    if as_json:
        print(findings_json(findings))
    else:
        columns = shutil.get_terminal_size().columns
        print("\n".join(finding_lines(findings, ink_for(sys.stdout, os.environ), columns)))
    return int(any(finding.level == "problem" for finding in findings))


def examine(
    model: Path | None = None,
    *,
    machine: Machine | None = None,
    runtime_version: str | None = None,
    probe: Callable[[Sequence[str]], ProbeReport] = run_probe,
) -> list[Finding]:
    """All findings, in the order in which one looks for a fault. The arguments replace what would be read."""
    machine = machine or read_machine()
    installed = runtime_version if runtime_version is not None else _version_of(RUNTIME)
    report = probe(probe_command(model, machine.cpu.n_threads))
    found = [
        _own_versions(),
        _tested_finding(installed),
        build_finding(report, installed),
        failure_finding(report, machine.flags),
        _without_repack(report, model, machine, probe),
        *instruction_findings(report, machine.flags),
        *gpu_findings(report, machine.gpus),
        _cpu_finding(machine.cpu),
        _memory_finding(machine.memory),
        decode_finding(report, model),
    ]
    # The child refuses an untested release with the very sentence that stands here already.
    return list({finding.sentence: finding for finding in found if finding is not None}.values())


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _own_versions() -> Finding:
    own = _version_of("edgeserve") or "from its source tree"
    python = platform.python_version()
    figures = {"edgeserve": own, "python": python, "system": platform.platform()}
    return Finding(
        "ok", f"edgeserve {own}, Python {python} on {platform.system()} {platform.machine()}", "", figures
    )


def _tested_finding(installed: str) -> Finding | None:
    """Only a release outside the tested range is worth a line; a missing one shows in the probe."""
    if not installed:
        return None
    try:
        check_version(installed)
    except RuntimeUnavailableError as error:
        return Finding("problem", error.message, error.hint, {"llama_cpp_python": installed})
    return None


def _without_repack(
    report: ProbeReport,
    model: Path | None,
    machine: Machine,
    probe: Callable[[Sequence[str]], ProbeReport],
) -> Finding | None:
    """After a crash in the decode: whether it runs when weights are left as they are in the file."""
    if report.stage != "decode" or report.died_of is None:
        return None
    second = probe(probe_command(model, machine.cpu.n_threads, repack=False))
    ran = decode_finding(second, model)
    if ran is None or ran.level != "ok":
        return None
    return Finding(
        "note", f"without rearranged weights {ran.sentence}", "Until then: --no-repack", ran.figures
    )


def _cpu_finding(cpu: CpuBudget) -> Finding:
    is_limited = cpu.n_threads < min(cpu.num_physical, cpu.num_performance)
    threads = "1 thread" if cpu.n_threads == 1 else f"{cpu.n_threads} threads"
    reason = cpu.reason[:1].lower() + cpu.reason[1:].rstrip(".")
    return Finding("note" if is_limited else "ok", f"{threads}: {reason}", "", asdict(cpu))


def _memory_finding(memory: MemoryBudget) -> Finding:
    is_limited = memory.limit_bytes is not None and memory.limit_bytes < memory.total_bytes
    reason = memory.bound_by[:1].lower() + memory.bound_by[1:].rstrip(".")
    if not is_limited:
        return Finding("ok", reason, "", asdict(memory))
    shown = format_gib(memory.available_bytes)
    return Finding("note", f"{reason}; models and their contexts have {shown} GiB", "", asdict(memory))


# --- showing -----------------------------------------------------------------------------------------------


def findings_json(findings: Sequence[Finding]) -> str:
    """One JSON document: `ok` and the findings with the figures that they rest on."""
    is_ok = all(finding.level != "problem" for finding in findings)
    return json.dumps({"ok": is_ok, "findings": [asdict(finding) for finding in findings]}, indent=1)


def finding_lines(findings: Sequence[Finding], ink: Ink, columns: int) -> list[str]:
    """A line a finding; the remedy goes below where it does not fit beside."""
    lines = []
    for finding in findings:
        first = f" {_level(finding, ink)}{finding.sentence}"
        size = 1 + _LEVEL_COLUMNS + len(finding.sentence)
        if finding.remedy and size + 2 + len(finding.remedy) <= columns:
            lines.append(f"{first}  {finding.remedy}")
            continue
        lines.append(first)
        if finding.remedy:
            lines.append(" " * (1 + _LEVEL_COLUMNS) + finding.remedy)
    return lines


def _level(finding: Finding, ink: Ink) -> str:
    styles = {"ok": ("dim",), "note": ("bold",), "problem": ("stalled",)}
    space = " " * (_LEVEL_COLUMNS - len(finding.level))
    return ink(finding.level, *styles[finding.level]) + space
