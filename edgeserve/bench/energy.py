"""What a run cost in energy, where the machine counts it: RAPL packages (Linux) and NVIDIA cards.

Owns: the counters, their units and their wrapping. The figures are the whole machine's, idle draw and this
client included, so they mean something only when nothing else runs, and only for a server on this machine.
Does not know: runs or tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

# Linux' powercap tree: energy_uj counts microjoules and wraps at max_energy_range_uj. Top-level zones are the
# packages; their subzones (core, uncore, dram) are parts of the same energy or, for dram, beside it.
POWERCAP = Path("/sys/class/powercap")


@dataclass(frozen=True)
class Counter:
    """One counter as it stood: joules since some beginning, and where it starts again from zero."""

    joules: float
    range_j: float | None = None


def read_counters(powercap: Path = POWERCAP) -> dict[str, Counter]:
    """Every counter that can be read, by name; empty where there is none (or it is root's alone to read)."""
    return {**_rapl(powercap), **_nvidia()}


def joules_between(before: Mapping[str, Counter], after: Mapping[str, Counter]) -> float | None:
    """Energy of all counters present both times, each wrapped at most once; None without any."""
    names = before.keys() & after.keys()
    return sum(_difference(before[name], after[name]) for name in names) if names else None


def _difference(before: Counter, after: Counter) -> float:
    joules = after.joules - before.joules
    return joules + after.range_j if joules < 0 and after.range_j else max(0.0, joules)


def _rapl(powercap: Path) -> dict[str, Counter]:
    found: dict[str, Counter] = {}
    for zone in sorted(powercap.glob("intel-rapl:*")):
        if zone.name.count(":") == 1 or _text(zone / "name") == "dram":
            energy, limit = _number(zone / "energy_uj"), _number(zone / "max_energy_range_uj")
            if energy is not None:
                found[zone.name] = Counter(energy / 1e6, None if limit is None else limit / 1e6)
    return found


def _nvidia() -> dict[str, Counter]:
    """Total energy since the driver was loaded (Volta and newer), in the library's millijoules."""
    try:
        import pynvml
    except ImportError:
        return {}
    found: dict[str, Counter] = {}
    try:
        pynvml.nvmlInit()
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            found[f"nvidia:{index}"] = Counter(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3)
    except pynvml.NVMLError:
        return found
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _number(path: Path) -> float | None:
    text = _text(path)
    return float(text) if text.isdigit() else None
