"""What CPU and memory this process may really use, and which limit decides it.

Owns the reading of /proc, sysfs and cgroups (v1, v2 and both at once), with psutil and sysctl where those do
not exist. Knows nothing of models, devices or the runtime. Every root is a parameter, so the answers are a
function of a file tree.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil

_T = TypeVar("_T")

PROC_ROOT = Path("/proc")
SYS_ROOT = Path("/sys")
CGROUP_ROOT = Path("/sys/fs/cgroup")

# cgroup v1 writes "no limit" as LONG_MAX rounded down to a page; no machine has 4 EiB.
_V1_NO_LIMIT_BYTES = 1 << 62
# Cores below half of the fastest core's capacity are left out: a step ends with its slowest thread.
_SLOW_CORE_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class CpuBudget:
    """Threads worth starting for computation, the sentence that says why, and the counts behind it.

    `quota_cpus` is the tightest cgroup quota in CPUs (None: no quota), `num_allowed` the logical processors
    in the affinity mask, `num_physical` and `num_performance` cores of the whole machine.
    """

    n_threads: int
    reason: str
    num_logical: int
    num_allowed: int
    num_physical: int
    num_performance: int
    quota_cpus: float | None = None


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Host memory: physical total, what may still be taken, and the sentence that says which limit decides.

    `limit_bytes` is the cgroup limit with the least room below it, None when no cgroup limits memory. Swap is
    never counted. Page cache that can be dropped counts as available.
    """

    total_bytes: int
    available_bytes: int
    limit_bytes: int | None
    bound_by: str


@dataclass(frozen=True, slots=True)
class _Topology:
    """Logical processors by physical core; `performance` holds the processors of fast cores."""

    core_of: dict[int, str]
    performance: frozenset[int]

    def num_cores(self, cpus: frozenset[int]) -> int:
        return len({self.core_of[cpu] for cpu in cpus if cpu in self.core_of})


def format_gib(num_bytes: float) -> str:
    """Bytes as GiB with one decimal and no unit: 8589934592 -> "8.0"."""
    return f"{num_bytes / 2**30:.1f}"


def processor_name(proc_root: Path = PROC_ROOT) -> str:
    """The processor's marketing name, from where the system keeps it; "" when it does not tell."""
    found = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", _read(proc_root / "cpuinfo") or "", re.MULTILINE)
    return found[1].strip() if found else platform.processor()


# --- CPU ---------------------------------------------------------------------------------------------------


def cpu_budget(
    proc_root: Path = PROC_ROOT,
    cgroup_root: Path = CGROUP_ROOT,
    sys_root: Path = SYS_ROOT,
    affinity: frozenset[int] | None = None,
) -> CpuBudget:
    """Threads = floor(min(cgroup quota, affinity, physical cores, performance cores)), at least 1.

    `affinity` replaces the process's own mask. Two threads on one physical core share its vector units, so
    processors are counted as cores.
    """
    topology = _topology(sys_root)
    everything = frozenset(topology.core_of)
    allowed = (affinity if affinity is not None else _own_affinity(everything)) & everything or everything
    quota = _cpu_quota(proc_root, cgroup_root)
    limits = _cpu_limits(topology, everything, allowed, quota)
    value, reason = min(limits, key=lambda limit: limit[0])
    return CpuBudget(
        n_threads=max(1, int(value)),
        reason=reason,
        num_logical=len(everything),
        num_allowed=len(allowed),
        num_physical=topology.num_cores(everything),
        num_performance=topology.num_cores(topology.performance),
        quota_cpus=quota[0] if quota else None,
    )


def _cpu_limits(
    topology: _Topology,
    everything: frozenset[int],
    allowed: frozenset[int],
    quota: tuple[float, str] | None,
) -> list[tuple[float, str]]:
    """Every limit with its sentence, plainest first: of equal limits the first one is named."""
    cores = topology.num_cores(everything)
    limits: list[tuple[float, str]] = [
        (cores, f"{_count(cores, 'physical core')}, {_count(len(everything), 'logical processor')}.")
    ]
    fast = topology.num_cores(topology.performance)
    if fast < cores:
        limits.append(
            (
                fast,
                f"{_count(fast, 'performance core')}; {cores - fast} slower left out, each step would wait.",
            )
        )
    if allowed != everything:
        # A mask that holds slow cores only must still give threads.
        usable = topology.num_cores(allowed & topology.performance) or topology.num_cores(allowed)
        limits.append(
            (
                usable,
                f"The affinity mask allows {len(allowed)} of {_count(len(everything), 'processor')},"
                f" {_count(usable, 'usable core')}.",
            )
        )
    if quota is not None:
        limits.append((quota[0], f"The cgroup quota allows {quota[0]:.4g} CPUs ({quota[1]})."))
    return limits


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _own_affinity(everything: frozenset[int]) -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    if platform.system() == "Windows":
        return frozenset(psutil.Process().cpu_affinity())
    return everything  # macOS has no affinity masks


def _topology(sys_root: Path) -> _Topology:
    cpu_root = sys_root / "devices/system/cpu"
    cpus = _read_parsed(cpu_root / "online", parse_cpu_list) or frozenset(
        int(path.name[3:]) for path in cpu_root.glob("cpu[0-9]*") if path.name[3:].isdigit()
    )
    if not cpus:
        return _topology_without_sysfs()
    core_of = {cpu: _core_name(cpu_root / f"cpu{cpu}", cpu) for cpu in cpus}
    return _Topology(core_of, _performance_cpus(sys_root, cpu_root, cpus))


def _core_name(cpu_dir: Path, cpu: int) -> str:
    """Processors of one core list the same siblings; without topology each processor is its own core."""
    return _read(cpu_dir / "topology/thread_siblings_list") or str(cpu)


def _performance_cpus(sys_root: Path, cpu_root: Path, cpus: frozenset[int]) -> frozenset[int]:
    """Intel hybrids list their P-cores as a PMU; Arm and recent x86 kernels give a capacity per processor."""
    listed = _read_parsed(sys_root / "devices/cpu_core/cpus", parse_cpu_list)
    if listed:
        return listed & cpus or cpus
    capacity = {cpu: _read_parsed(cpu_root / f"cpu{cpu}/cpu_capacity", int) for cpu in cpus}
    known = [value for value in capacity.values() if value]
    if len(known) < len(cpus):
        return cpus
    return frozenset(cpu for cpu, value in capacity.items() if (value or 0) >= _SLOW_CORE_SHARE * max(known))


def _topology_without_sysfs() -> _Topology:
    """macOS and Windows: counts only; the processors of one core are numbered next to each other."""
    num_logical = os.cpu_count() or 1
    num_physical = min(psutil.cpu_count(logical=False) or num_logical, num_logical)
    core_of = {cpu: str(cpu * num_physical // num_logical) for cpu in range(num_logical)}
    num_fast = _apple_performance_cores() or num_physical
    return _Topology(core_of, frozenset(cpu for cpu, core in core_of.items() if int(core) < num_fast))


def _apple_performance_cores() -> int | None:
    """sysctl hw.perflevel0.physicalcpu; None on Intel Macs and elsewhere."""
    if platform.system() != "Darwin":
        return None
    command = ["sysctl", "-n", "hw.perflevel0.physicalcpu"]
    try:
        return int(subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def _cpu_quota(proc_root: Path, cgroup_root: Path) -> tuple[float, str] | None:
    """The tightest quota from the process's own cgroup up to the root, in CPUs, and the file that says so."""
    quotas: list[tuple[float, str]] = []
    for directory in _cgroup_directories(proc_root, cgroup_root, "cpu"):
        v2 = _read_parsed(directory / "cpu.max", _parse_cpu_max)
        if v2 is not None:
            quotas.append((v2, "cpu.max"))
        v1_quota = _read_parsed(directory / "cpu.cfs_quota_us", int)
        v1_period = _read_parsed(directory / "cpu.cfs_period_us", int)
        if v1_quota is not None and v1_period and v1_quota > 0:
            quotas.append((v1_quota / v1_period, "cpu.cfs_quota_us"))
    return min(quotas, default=None)


def _parse_cpu_max(text: str) -> float | None:
    """cpu.max holds "QUOTA PERIOD" in microseconds, or "max PERIOD"."""
    quota, _, period = text.partition(" ")
    return None if quota == "max" else int(quota) / int(period or "100000")


def parse_cpu_list(text: str) -> frozenset[int]:
    """The kernel's list format: "0-3,8,10-11"."""
    cpus: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


# --- memory ------------------------------------------------------------------------------------------------


def memory_budget(proc_root: Path = PROC_ROOT, cgroup_root: Path = CGROUP_ROOT) -> MemoryBudget:
    """min(MemAvailable, room under the tightest cgroup limit).

    MemFree is not asked: page cache fills a healthy machine and is dropped when memory is wanted.
    """
    total, available = _system_memory(proc_root)
    sentence = f"{format_gib(available)} GiB available of {format_gib(total)} GiB RAM."
    rooms = list(_cgroup_rooms(proc_root, cgroup_root))
    if not rooms:
        return MemoryBudget(total, available, None, sentence)
    room, limit, name = min(rooms)
    if room < available:
        available = room
        sentence = f"The cgroup limit of {format_gib(limit)} GiB ({name}) leaves {format_gib(room)} GiB."
    return MemoryBudget(total, available, limit, sentence)


def _system_memory(proc_root: Path) -> tuple[int, int]:
    fields = dict(_meminfo_fields(_read(proc_root / "meminfo") or ""))
    if "MemTotal" not in fields:
        memory = psutil.virtual_memory()
        return int(memory.total), int(memory.available)
    return fields["MemTotal"], fields.get("MemAvailable", fields.get("MemFree", 0))


def _meminfo_fields(text: str) -> Iterator[tuple[str, int]]:
    for line in text.splitlines():
        words = line.replace(":", " ").split()
        if len(words) >= 2 and words[1].isdigit():
            yield words[0], int(words[1]) * 1024


def _cgroup_rooms(proc_root: Path, cgroup_root: Path) -> Iterator[tuple[int, int, str]]:
    """(room, limit, file) for every memory limit on this process; inactive page cache does not fill one."""
    for directory in _cgroup_directories(proc_root, cgroup_root, "memory"):
        for limit_name, usage_name in (
            ("memory.max", "memory.current"),
            ("memory.high", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit = _read_parsed(directory / limit_name, _parse_limit)
            usage = _read_parsed(directory / usage_name, int)
            if limit is not None and usage is not None:
                used = max(0, usage - _inactive_file_bytes(directory))
                yield max(0, limit - used), limit, limit_name


def _parse_limit(text: str) -> int | None:
    limit = None if text == "max" else int(text)
    return None if limit is None or limit >= _V1_NO_LIMIT_BYTES else limit


def _inactive_file_bytes(directory: Path) -> int:
    """v1 counts a group without its children under the plain name, with them under total_."""
    lines = (line.split() for line in (_read(directory / "memory.stat") or "").splitlines())
    stat = {words[0]: int(words[1]) for words in lines if len(words) == 2 and words[1].isdigit()}
    return stat.get("total_inactive_file", stat.get("inactive_file", 0))


# --- cgroup directories and files --------------------------------------------------------------------------


def _cgroup_directories(proc_root: Path, cgroup_root: Path, controller: str) -> Iterator[Path]:
    """Directories that may limit `controller`, from the process's own group up to the mount, v1 and v2."""
    for line in (_read(proc_root / "self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            mounts = [cgroup_root, cgroup_root / "unified"]
        elif controller in controllers.split(","):
            mounts = [cgroup_root / controllers, cgroup_root / controller]
        else:
            continue
        mount = next((mount for mount in mounts if _is_mount_of(mount, unified=not controllers)), None)
        if mount is not None:
            yield from _walk_up(mount, [part for part in path.split("/") if part not in ("", "..")])


def _is_mount_of(mount: Path, *, unified: bool) -> bool:
    return (mount / "cgroup.controllers").exists() if unified else mount.is_dir()


def _walk_up(mount: Path, parts: Sequence[str]) -> Iterator[Path]:
    """The group's directory and its parents up to the mount.

    A container may see only its own part of the tree at the mount while /proc still tells the host's path, so
    leading parts are dropped until the rest exists.
    """
    skip = next(i for i in range(len(parts) + 1) if mount.joinpath(*parts[i:]).is_dir())
    below = parts[skip:]
    for depth in range(len(below), -1, -1):
        yield mount.joinpath(*below[:depth])


def _read(path: Path) -> str | None:
    """A small kernel file, stripped; None when it is missing, unreadable or not text."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None


def _read_parsed(path: Path, parse: Callable[[str], _T]) -> _T | None:
    """The file's parsed content; a file that does not parse counts as absent, since kernels differ."""
    text = _read(path)
    if not text:
        return None
    try:
        return parse(text)
    except (ValueError, ZeroDivisionError):
        return None
