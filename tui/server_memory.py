"""A server's memory beside what it tells over HTTP: what was planned for it, and what its process holds.

Planned figures come from the planner, from the settings that the server states and the header of its model
file; real ones from the system. Both need the server to be on this machine. Blocking: call it on a thread.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from urllib.parse import urlsplit

import psutil

from edgeserve.config import EngineConfig
from edgeserve.errors import EdgeserveError
from edgeserve.gguf import read_header
from edgeserve.planner.memory import plan_memory
from edgeserve.planner.report import MemoryReport
from edgeserve.planner.settings import settings_of
from tui.snapshot import ServerFacts

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True)
class PlannedMemory:
    """Bytes as the planner sees them at the server's own settings, all devices together."""

    weights_bytes: int
    kv_bytes: int
    compute_bytes: int
    other_bytes: int
    is_compute_estimated: bool

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes + self.compute_bytes + self.other_bytes


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """What a process holds. `file_bytes` are mapped from files, weights above all, and can be dropped by the
    system; None where the system does not tell them apart."""

    pid: int
    resident_bytes: int
    file_bytes: int | None

    @property
    def private_bytes(self) -> int | None:
        return None if self.file_bytes is None else self.resident_bytes - self.file_bytes


def is_local(url: str) -> bool:
    """Whether the server runs on this machine."""
    return urlsplit(url).hostname in _LOOPBACK


def planned_memory(facts: ServerFacts) -> PlannedMemory | None:
    """None when the settings are not told, the file is not here, or the planner cannot size it."""
    if not facts.engine or not is_local(facts.url):
        return None
    known = {field.name for field in fields(EngineConfig)}
    try:
        config = EngineConfig(**{name: value for name, value in facts.engine.items() if name in known})
        report = plan_memory(read_header(facts.model_path), settings_of(config))
    except (EdgeserveError, OSError, TypeError):
        return None
    return None if report.rejected else _summed(report)


def _summed(report: MemoryReport) -> PlannedMemory:
    other_bytes = sum(line.n_bytes for line in report.extras if line.counted)
    return PlannedMemory(
        report.model_bytes,
        report.context_bytes,
        report.compute_bytes,
        other_bytes,
        report.compute_source == "estimate",
    )


def find_process(url: str) -> int | None:
    """The process that listens at `url`'s port on this machine; None where the system does not say."""
    if not is_local(url):
        return None
    port = urlsplit(url).port or 80
    try:
        connections = psutil.net_connections(kind="tcp")
    except (psutil.Error, OSError, RuntimeError):
        return None
    return next(
        (
            entry.pid
            for entry in connections
            if entry.status == psutil.CONN_LISTEN and entry.laddr and entry.laddr.port == port and entry.pid
        ),
        None,
    )


def process_memory(pid: int) -> ProcessMemory | None:
    """None when the process is gone or belongs to somebody else."""
    try:
        info = psutil.Process(pid).memory_info()
    except psutil.Error:
        return None
    shared = getattr(info, "shared", None)
    return ProcessMemory(pid, info.rss, shared if isinstance(shared, int) else None)
