"""Where a plan is for: devices as placement sees them, memory pools, and what is known of their speed.

Owns the join of a device profile, or of this machine as measured, into one `Target`, and the limits that a
user sets on its memory. Unified memory is one pool that accelerator and processor share. Knows nothing of
models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from edgeserve.errors import UsageError
from edgeserve.host import MemoryBudget, format_gib
from edgeserve.planner.device import DeviceProfile
from edgeserve.planner.device_memory import CARD_MARGIN_BYTES, GPU_MARGIN_BYTES, MemoryPool, usable_memory
from edgeserve.planner.device_search import DeviceChoice
from edgeserve.planner.goals import Goals
from edgeserve.planner.placement import HOST_NAME, Accelerator
from edgeserve.planner.speed_calibration import Calibration
from edgeserve.planner.speed_terms import SpeedDevice, speed_device
from edgeserve.planner.this_machine import ThisMachine
from edgeserve.planner.words import size

# ggml's names of a backend's devices, to which it adds a number.
_DEVICE_PREFIX = {"cuda": "CUDA", "rocm": "ROCm", "vulkan": "Vulkan", "metal": "MTL", "sycl": "SYCL"}
# ggml-metal.cpp: get_alignment. It maps host memory, so weights need no pinned copy, and pads no rows.
_METAL_ALIGNMENT = 32
# ggml-vulkan.cpp takes minStorageBufferOffsetAlignment; 64 bytes is the usual figure of desktop drivers.
_VULKAN_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class PlanPool:
    """One memory and the devices that share it, by their names in a memory report.

    `usable_bytes` is what a plan may fill, after `margin_bytes`; `reason` the sentence on why that is not
    all.
    """

    name: str
    devices: tuple[str, ...]
    total_bytes: int
    usable_bytes: int
    margin_bytes: int
    reason: str

    @property
    def is_host(self) -> bool:
        return HOST_NAME in self.devices


@dataclass(frozen=True, slots=True)
class Target:
    """A machine to plan for. `speeds` and `calibrations` are by device name and by backend.

    `accelerators` empty: everything is computed on the processor. `flash_attn_on_cpu`: a measurement on this
    machine said that it pays there.
    """

    name: str
    profile: DeviceProfile
    backend: str
    accelerators: tuple[Accelerator, ...]
    pools: tuple[PlanPool, ...]
    speeds: Mapping[str, SpeedDevice]
    calibrations: Mapping[str, Calibration]
    is_here: bool = False
    flash_attn_on_cpu: bool = False
    notes: tuple[str, ...] = ()

    @property
    def host_pool(self) -> PlanPool:
        return next(pool for pool in self.pools if pool.is_host)

    @property
    def is_unified(self) -> bool:
        return bool(self.accelerators) and len(self.pools) == 1

    def calibration(self, device: str) -> Calibration | None:
        """What was measured of a device's backend here."""
        return self.calibrations.get(self.speeds[device].backend) if device in self.speeds else None


def described_target(choice: DeviceChoice, goals: Goals | None = None, backend: str = "") -> Target:
    """A machine that is known by its profile only. `backend` "" is the profile's first.

    Raises UsageError for a backend that the device does not have.
    """
    goals, profile = goals or Goals(), choice.profile
    backend = _known_backend(profile, backend)
    pools = usable_memory(profile, choice.memory_gib, choice.host_memory_gib)
    shared = pools[0].kind == "unified"
    accelerators = () if backend == "cpu" else (_accelerator(backend, 0, pools[0].total_bytes, shared),)
    target = Target(
        name=_spoken(choice, pools[0]),
        profile=profile,
        backend=backend,
        accelerators=accelerators,
        pools=_plan_pools(pools, accelerators, _profile_margin(profile)),
        speeds=_speeds(profile, backend, accelerators, profile, None),
        calibrations={},
        notes=_other_variants(choice),
    )
    return limited(target, goals)


def measured_target(
    machine: ThisMachine,
    goals: Goals | None = None,
    calibrations: Mapping[str, Calibration] | None = None,
    backend: str = "",
    *,
    flash_attn_on_cpu: bool = False,
    notes: Sequence[str] = (),
) -> Target:
    """The machine that we run on. `calibrations` by backend, as measured here."""
    goals = goals or Goals()
    backend = _known_backend(machine.profile, backend)
    gpu_pools = [pool for pool in machine.pools if pool.kind != "host"] if backend != "cpu" else []
    accelerators = tuple(
        replace(
            _accelerator(backend, index, pool.total_bytes, pool.kind == "unified"),
            free_bytes=pool.usable_bytes + GPU_MARGIN_BYTES,
        )
        for index, pool in enumerate(gpu_pools)
    )
    host = _host_pool(machine.memory)
    pools = machine.pools if gpu_pools else (host,)
    plan_pools = _plan_pools(pools, accelerators, GPU_MARGIN_BYTES)
    target = Target(
        name=f"this machine ({machine.profile.name})" if machine.profile.name else "this machine",
        profile=machine.profile,
        backend=backend,
        accelerators=accelerators,
        pools=tuple(_with_host_margin(pool, machine.memory) for pool in plan_pools),
        speeds=_speeds(machine.profile, backend, accelerators, machine.host_profile, machine.cpu.n_threads),
        calibrations=calibrations or {},
        is_here=True,
        flash_attn_on_cpu=flash_attn_on_cpu,
        notes=tuple(notes),
    )
    return limited(target, goals)


def limited(target: Target, goals: Goals) -> Target:
    """The same machine with the limits that the user set on its memory.

    What there is stays a limit on this machine; of a machine that is only described, the user knows best.
    """
    pools = tuple(_limited_pool(pool, target, goals) for pool in target.pools)
    free = {name: pool.usable_bytes for pool in pools for name in pool.devices}
    accelerators = tuple(
        replace(device, free_bytes=min(device.free_bytes, free[device.name]))
        if goals.gpu_memory_bytes is not None or goals.margin_bytes is not None
        else device
        for device in target.accelerators
    )
    return replace(target, pools=pools, accelerators=accelerators)


def _limited_pool(pool: PlanPool, target: Target, goals: Goals) -> PlanPool:
    margin = pool.margin_bytes if goals.margin_bytes is None else goals.margin_bytes
    available = pool.usable_bytes + pool.margin_bytes
    usable, reason = max(0, available - margin), pool.reason
    if goals.margin_bytes is not None:
        reason += f" The margin asked for is {size(margin)}."
    limit = _limit_of(pool, goals)
    if limit is not None and (limit < usable or not target.is_here):
        usable = limit
        reason = f"Limited to {size(limit)} as asked. {pool.reason}"
    return replace(pool, usable_bytes=usable, margin_bytes=margin, reason=reason)


def _limit_of(pool: PlanPool, goals: Goals) -> int | None:
    """The limit asked for on this pool; both may speak of unified memory, and the smaller counts."""
    limits = [goals.memory_bytes] if pool.is_host else []
    if any(name != HOST_NAME for name in pool.devices):
        limits.append(goals.gpu_memory_bytes)
    return min((limit for limit in limits if limit is not None), default=None)


def _plan_pools(
    pools: Sequence[MemoryPool], accelerators: Sequence[Accelerator], margin_bytes: int
) -> tuple[PlanPool, ...]:
    """Pools in their order, cards first; a single pool serves the processor and all accelerators."""
    found = []
    names = [device.name for device in accelerators]
    for pool in pools:
        if pool.kind == "gpu" and names:
            devices: tuple[str, ...] = (names.pop(0),)
        elif pool.kind == "gpu":
            continue
        else:
            devices = (*names, HOST_NAME)
        margin = margin_bytes if pool.kind != "host" else 0
        found.append(PlanPool(pool.name, devices, pool.total_bytes, pool.usable_bytes, margin, pool.reason))
    return tuple(found)


def _profile_margin(profile: DeviceProfile) -> int:
    """What device_memory.py has left free of a described device's pool."""
    if profile.memory_rule == "vram":
        return CARD_MARGIN_BYTES
    return 0 if profile.memory_rule == "host" else GPU_MARGIN_BYTES


def _host_pool(memory: MemoryBudget) -> MemoryPool:
    """All of the host's memory, for planning without the graphics unit that shares it."""
    return MemoryPool("host RAM", "host", memory.total_bytes, memory.available_bytes, "")


def _with_host_margin(pool: PlanPool, memory: MemoryBudget) -> PlanPool:
    """The host's pool with its margin told apart from what is free, and the limit that bound named."""
    if not pool.is_host or len(pool.devices) > 1:
        return pool
    margin = min(GPU_MARGIN_BYTES, memory.available_bytes // 8)
    usable = memory.available_bytes - margin
    reason = f"{host_limit(memory)}, less a margin of {format_gib(margin)} GiB."
    return replace(pool, usable_bytes=usable, margin_bytes=margin, reason=reason)


def host_limit(memory: MemoryBudget) -> str:
    """The limit that decides how much host memory there is, with its figures and without a full stop."""
    if memory.limit_bytes is not None:
        return memory.bound_by.rstrip(".")
    free, total = memory.available_bytes, memory.total_bytes
    used = format_gib(total - free)
    return f"{format_gib(free)} GiB free of {format_gib(total)} ({used} used by other programs)"


# --- devices and speeds


def _known_backend(profile: DeviceProfile, backend: str) -> str:
    if backend and backend not in (*profile.backends, "cpu"):
        known = ", ".join(dict.fromkeys((*profile.backends, "cpu")))
        raise UsageError(f"{profile.name} has no backend {backend}.", f"One of: {known}.")
    return backend or (profile.backends[0] if profile.backends else "cpu")


def _accelerator(backend: str, index: int, total_bytes: int, shared: bool) -> Accelerator:
    """How the backend counts bytes. What a driver takes beside them is the margin's matter in shared
    memory."""
    name = f"{_DEVICE_PREFIX.get(backend, backend.upper())}{index}"
    device = Accelerator(name, total_bytes, total_bytes)
    if backend == "metal":
        device = replace(device, alignment=_METAL_ALIGNMENT, pads_quantized_rows=False, has_host_buffer=False)
    if backend == "vulkan":
        device = replace(device, alignment=_VULKAN_ALIGNMENT, pads_quantized_rows=False)
    return replace(device, overhead_bytes=0) if shared else device


def _speeds(
    profile: DeviceProfile,
    backend: str,
    accelerators: Sequence[Accelerator],
    host_profile: DeviceProfile | None,
    n_threads: int | None,
) -> dict[str, SpeedDevice]:
    speeds = {device.name: speed_device(profile, backend) for device in accelerators}
    speeds[HOST_NAME] = speed_device(host_profile or profile, "cpu", n_threads)
    return speeds


def _spoken(choice: DeviceChoice, pool: MemoryPool) -> str:
    return f"{choice.profile.name}, {pool.total_bytes / (1 << 30):g} GiB"


def _other_variants(choice: DeviceChoice) -> tuple[str, ...]:
    if not choice.others:
        return ()
    names = ", ".join(choice.others[:4])
    return (f"The name also fits {names}; the slowest of them is planned for.",)
