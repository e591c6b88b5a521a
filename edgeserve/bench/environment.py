"""What a figure must carry: the machine, its power state, the versions, and what the server says of itself.

Owns: the environment record. Every part is optional: a fact that cannot be had is null, never guessed.
Does not know: the measurements. `client` describes the machine that measures; `servers` is what each server
publishes about itself, since it may run elsewhere.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from edgeserve import host
from edgeserve.bench.lane import Lane
from edgeserve.client import hide_user
from edgeserve.errors import EdgeserveError

HEAD_BYTES = 1024 * 1024
# Another process this busy takes part in the measurement.
BUSY_SHARE = 0.1
# Of /props; the chat template is long and is stood for by its hash.
PROPS_LEFT_OUT = ("chat_template", "media_marker", "ui_settings", "bos_token", "eos_token")
_KEY_OPTION = re.compile(r"^--\S*key$")


def machine() -> dict[str, object]:
    """Facts that do not change during a run."""
    cpu = host.cpu_budget()
    memory = host.memory_budget()
    return {
        "os": platform.platform(),
        "machine": platform.machine(),
        "cpu": cpu_name(),
        "num_physical_cores": cpu.num_physical,
        "num_logical_cpus": cpu.num_logical,
        "num_allowed_cpus": cpu.num_allowed,
        "cpu_quota": cpu.quota_cpus,
        "memory_total_bytes": memory.total_bytes,
        "swap_total_bytes": psutil.swap_memory().total,
        "governor": _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "energy_preference": _read("/sys/devices/system/cpu/cpu0/cpufreq/energy_performance_preference"),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("edgeserve", "httpx2", "numpy")},
    }


def state() -> dict[str, object]:
    """What drifts: taken before and after, so that a throttled run can be told."""
    battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    frequency = psutil.cpu_freq() if hasattr(psutil, "cpu_freq") else None
    load = psutil.getloadavg()
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "load_average": list(load),
        "memory_available_bytes": host.memory_budget().available_bytes,
        "frequency_mhz": round(frequency.current) if frequency else None,
        "temperature_c": _hottest_c(),
        "on_battery": None if battery is None else not battery.power_plugged,
        "battery_percent": None if battery is None else battery.percent,
    }


def busy_processes(interval_s: float = 0.2) -> list[dict[str, object]]:
    """Names and CPU shares of processes that are busy right now. Takes `interval_s`."""
    found = list(psutil.process_iter(["name"]))
    for process in found:
        _cpu_percent(process)
    psutil.cpu_percent(interval=interval_s)
    shares = [(process.info["name"], _cpu_percent(process) / 100) for process in found]
    busy = sorted((share, name) for name, share in shares if share >= BUSY_SHARE and name)
    return [{"name": name, "cpu_share": round(share, 2)} for share, name in reversed(busy)]


async def server_facts(lane: Lane) -> dict[str, object]:
    """What one server says of itself; the hash is added where its model file lies on this machine."""
    props = await _get(lane, "/props")
    models = await _get(lane, "/v1/models")
    facts: dict[str, object] = {
        "url": lane.client.root,
        "model": lane.client.model,
        "models": models.get("data") if isinstance(models, dict) else None,
        "props": _short_props(props) if isinstance(props, dict) else None,
    }
    path = props.get("model_path") if isinstance(props, dict) else None
    facts["model_file"] = model_file(Path(path)) if isinstance(path, str) and path else None
    return facts


def model_file(path: Path) -> dict[str, object] | None:
    """Name, size and the SHA-256 of the first MiB, which holds the GGUF metadata: a whole hash of a large
    file would warm the page cache and take longer than the measurement. None where it cannot be read."""
    try:
        with path.open("rb") as file:
            head = hashlib.sha256(file.read(HEAD_BYTES)).hexdigest()
        return {"name": path.name, "size_bytes": path.stat().st_size, "head_sha256": head}
    except OSError:
        return None


def command_line(arguments: Sequence[str]) -> str:
    """The command as typed, with the values of key options and the users of addresses blotted out."""
    shown: list[str] = []
    hide_next = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        is_key = _KEY_OPTION.match(name) is not None
        shown.append("***" if hide_next else f"{name}=***" if is_key and equals else hide_user(argument))
        hide_next = is_key and not equals
    return shlex.join(shown)


def cpu_name() -> str | None:
    """The processor's marketing name, from where the system keeps it."""
    info = _read("/proc/cpuinfo") or ""
    match = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", info, flags=re.MULTILINE)
    return match[1].strip() if match else platform.processor() or None


async def _get(lane: Lane, path: str) -> Any:
    try:
        return await lane.client.get_json(path)
    except EdgeserveError:
        return None


def _short_props(props: Mapping[str, Any]) -> dict[str, object]:
    short: dict[str, object] = {name: value for name, value in props.items() if name not in PROPS_LEFT_OUT}
    template = props.get("chat_template")
    if isinstance(template, str):
        short["chat_template_sha256"] = hashlib.sha256(template.encode()).hexdigest()
    return short


def _cpu_percent(process: psutil.Process) -> float:
    try:
        return 0.0 if process.pid == os.getpid() else float(process.cpu_percent(interval=None))
    except psutil.Error:
        return 0.0


def _hottest_c() -> float | None:
    sensors = psutil.sensors_temperatures() if hasattr(psutil, "sensors_temperatures") else {}
    return max((entry.current for group in sensors.values() for entry in group), default=None)


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
