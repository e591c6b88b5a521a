"""The machine that we run on, as a device profile with memory pools measured now.

Owns the join of three witnesses: the host's limits (host.py), ggml's own device list, which the caller gets
from a child process, and NVML where there is no such list. Knows nothing of models, never loads the runtime.
"""

from __future__ import annotations

import platform
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from edgeserve.errors import EdgeserveError
from edgeserve.host import CpuBudget, MemoryBudget, cpu_budget, format_gib, memory_budget
from edgeserve.planner.device import DeviceProfile
from edgeserve.planner.device_memory import GIB, GPU_MARGIN_BYTES, MemoryPool
from edgeserve.planner.device_search import find_profile

# What the rest of the process and small allocations of others may take between planning and loading.
_HOST_MARGIN_BYTES = GIB // 2
_BACKEND_OF_PREFIX = {"mtl": "metal", "metal": "metal", "hip": "rocm"}


@dataclass(frozen=True, slots=True)
class GgmlDevice:
    """One entry of ggml's device list. `type` is cpu, gpu, igpu, accel or meta.

    Metal and CUDA give the memory that is free now; Vulkan without the memory-budget extension and the CPU
    give the total as free. Metal counts only what this process has allocated.
    """

    name: str
    description: str
    type: str
    memory_free_bytes: int
    memory_total_bytes: int


@dataclass(frozen=True, slots=True)
class ThisMachine:
    """`profile` (key "this-machine"), the pools that a plan may fill now, and the host's limits.

    `host_profile` is the shipped profile of the processor, whose bandwidth counts for layers left on the CPU;
    None when there is none of that name.
    """

    profile: DeviceProfile
    host_profile: DeviceProfile | None
    pools: tuple[MemoryPool, ...]
    cpu: CpuBudget
    memory: MemoryBudget


def this_machine(
    ggml_devices: Sequence[GgmlDevice] | None = None,
    *,
    cpu: CpuBudget | None = None,
    memory: MemoryBudget | None = None,
    host_name: str | None = None,
) -> ThisMachine:
    """Profile and pools of this machine.

    `ggml_devices` is the runtime's list; None means that there is no runtime to ask, and NVML is tried
    instead. The other arguments replace what would be read from the system.
    """
    cpu = cpu or cpu_budget()
    memory = memory or memory_budget()
    gpus = _one_backend(nvml_devices() if ggml_devices is None else ggml_devices)
    pools = _pools(gpus, memory)
    host_name = _host_name() if host_name is None else host_name
    # Looked up once: a look-up reads every profile.
    host_profile = _known(host_name)
    profile = _profile(gpus, pools, cpu, host_name, host_profile)
    return ThisMachine(profile, host_profile, pools, cpu, memory)


def nvml_devices() -> tuple[GgmlDevice, ...]:
    """NVIDIA cards as the driver reports them; empty without nvidia-ml-py, without a driver or on failure."""
    try:
        import pynvml
    except ImportError:
        return ()
    try:
        pynvml.nvmlInit()
        found = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            name = str(pynvml.nvmlDeviceGetName(handle))
            found.append(GgmlDevice(f"CUDA{index}", name, "gpu", int(memory.free), int(memory.total)))
        return tuple(found)
    except pynvml.NVMLError:
        return ()


def _one_backend(devices: Sequence[GgmlDevice]) -> tuple[GgmlDevice, ...]:
    """Graphics devices of the first backend listed: a build with two backends lists each card twice."""
    gpus = [device for device in devices if device.type in ("gpu", "igpu")]
    return tuple(device for device in gpus if _prefix(device) == _prefix(gpus[0]))


def _prefix(device: GgmlDevice) -> str:
    return re.split(r"[\d\[]", device.name.lower())[0]


def _is_unified(device: GgmlDevice) -> bool:
    """ggml calls Apple's graphics unit a plain gpu, although its memory is the RAM."""
    return device.type == "igpu" or "apple" in device.description.lower()


# --- pools -------------------------------------------------------------------------------------------------


def _pools(gpus: Sequence[GgmlDevice], memory: MemoryBudget) -> tuple[MemoryPool, ...]:
    cards = tuple(_card_pool(gpu) for gpu in gpus if not _is_unified(gpu))
    shared = next((gpu for gpu in gpus if _is_unified(gpu)), None)
    return (*cards, _host_pool(memory) if shared is None else _unified_pool(shared, memory))


def _card_pool(gpu: GgmlDevice) -> MemoryPool:
    usable = max(0, gpu.memory_free_bytes - GPU_MARGIN_BYTES)
    reason = f"{_free_of(gpu.memory_free_bytes, gpu.memory_total_bytes)}, less a margin of 0.5 GiB."
    return MemoryPool(gpu.description, "gpu", gpu.memory_total_bytes, usable, reason)


def _unified_pool(gpu: GgmlDevice, memory: MemoryBudget) -> MemoryPool:
    """One pool: neither more than the graphics unit may allocate nor more than the system has left."""
    usable = max(0, min(gpu.memory_free_bytes, memory.available_bytes) - GPU_MARGIN_BYTES)
    reason = (
        f"{gpu.description} may take {format_gib(gpu.memory_total_bytes)} of"
        f" {format_gib(memory.total_bytes)} GiB unified memory. {_host_inputs(memory)}"
        " A margin of 0.5 GiB is left."
    )
    return MemoryPool("unified memory", "unified", memory.total_bytes, usable, reason)


def _host_pool(memory: MemoryBudget) -> MemoryPool:
    margin = min(_HOST_MARGIN_BYTES, memory.available_bytes // 8)
    reason = f"{_host_inputs(memory)} A margin of {format_gib(margin)} GiB is left."
    return MemoryPool("host RAM", "host", memory.total_bytes, memory.available_bytes - margin, reason)


def _host_inputs(memory: MemoryBudget) -> str:
    if memory.limit_bytes is not None:
        return memory.bound_by
    return f"{_free_of(memory.available_bytes, memory.total_bytes)}."


def _free_of(free: int, total: int) -> str:
    """The inputs of a budget, so that nobody has to guess what was detected."""
    used = format_gib(total - free)
    return f"{format_gib(free)} GiB free of {format_gib(total)} ({used} used by other programs)"


# --- profile -----------------------------------------------------------------------------------------------


def _profile(
    gpus: Sequence[GgmlDevice],
    pools: Sequence[MemoryPool],
    cpu: CpuBudget,
    host_name: str,
    host_profile: DeviceProfile | None,
) -> DeviceProfile:
    """The shipped profile of that name with the measured memory; without one, a profile without figures."""
    name = gpus[0].description if gpus else host_name
    unified = not gpus or _is_unified(gpus[0])
    # The processor's memory bandwidth is a card's least of all.
    known = _known(name) if gpus else None
    known = known or (host_profile if unified else None)
    base = known or DeviceProfile("", "", "unknown", "unknown", "unknown", (), "unified", (), "host", "")
    backends = (*dict.fromkeys(_backend(gpu) for gpu in gpus), "cpu")
    told = f"bandwidth and compute from the profile {known.key}" if known else "bandwidth and compute unknown"
    return replace(
        base,
        key="this-machine",
        name=name or "this machine",
        aliases=(),
        backends=backends,
        memory_type="unified" if unified else "discrete",
        memory_options_gib=(round(pools[0].total_bytes / GIB, 1) or 0.1,),
        memory_rule=base.memory_rule
        if known and known.backends == backends
        else "host"
        if unified
        else "vram",
        memory_source="measured on this machine",
        cores=f"{cpu.num_performance} of {cpu.num_physical} physical",
        performance_cores=cpu.num_performance,
        cpu_source="measured on this machine",
        confidence=f"memory and cores measured; {told}",
    )


def _known(text: str) -> DeviceProfile | None:
    """Drivers add marks and chip names to a product's name: "AMD Radeon RX 7900 XTX (RADV NAVI31)"."""
    plain = re.sub(r"\((r|tm)\)", " ", text.lower())
    plain = re.sub(r"\([^)]*\)|@.*|\brev .*|\b\d+-core( processor)?\b|\bmodel b\b", " ", plain)
    try:
        return find_profile(plain).profile if plain.strip() else None
    except EdgeserveError:
        return None


def _backend(gpu: GgmlDevice) -> str:
    prefix = _prefix(gpu)
    return _BACKEND_OF_PREFIX.get(prefix, prefix or "gpu")


def _host_name() -> str:
    """The board's or processor's name; empty when the system does not tell."""
    for path in (Path("/proc/device-tree/model"), Path("/proc/cpuinfo")):
        try:
            text = path.read_text(encoding="utf-8", errors="replace").strip("\0\n ")
        except OSError:
            continue
        if path.name == "model":
            return text
        found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
        if found:
            return found.group(1)
    return _apple_name() if platform.system() == "Darwin" else platform.processor()


def _apple_name() -> str:
    command = ["sysctl", "-n", "machdep.cpu.brand_string"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
