"""How much memory of a device may be planned with: one pool for each memory that exists.

Owns the rules for machines that are described but not present, and the margins. Unified memory is one pool
and is never added to host memory a second time. Knows nothing of models. A measured limit (this_machine.py)
is better than these rules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from edgeserve.errors import UsageError
from edgeserve.host import format_gib
from edgeserve.planner.device import DeviceProfile

PoolKind = Literal["host", "gpu", "unified"]

GIB = 1 << 30
# The driver keeps 0.1 to 0.3 GiB of a card for itself; a desktop on the same card takes about as much again.
CARD_MARGIN_BYTES = 3 * GIB // 4
# Below the limit of a GPU allocator: fragmentation, and buffers that the plan does not name.
GPU_MARGIN_BYTES = GIB // 2
# A GPU without word on the host it sits in: the planner needs some host memory to count with.
ASSUMED_HOST_GIB = 16.0
# Where firmware or driver give the graphics unit a share of RAM and nobody has said which.
ASSUMED_GPU_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class MemoryPool:
    """One memory. `usable_bytes` is what a plan may fill, `reason` the sentence on why that is not all."""

    name: str
    kind: PoolKind
    total_bytes: int
    usable_bytes: int
    reason: str


def usable_memory(
    profile: DeviceProfile, memory_gib: float | None = None, host_memory_gib: float | None = None
) -> tuple[MemoryPool, ...]:
    """The device's pools, the fastest first: (unified,), (host,) or (gpu, host).

    `memory_gib` is the device's own memory (a card's VRAM), by default the smallest that is sold;
    `host_memory_gib` the RAM beside a card. Raises UsageError for sizes that are not positive.
    """
    size_gib = profile.memory_options_gib[0] if memory_gib is None else memory_gib
    beside_gib = ASSUMED_HOST_GIB if host_memory_gib is None else host_memory_gib
    if size_gib <= 0 or beside_gib <= 0:
        raise UsageError("Memory sizes must be above 0 GiB.")
    sizes = profile.memory_options_gib
    said = (
        "" if memory_gib is not None or len(sizes) == 1 else f" {size_gib:g} GiB assumed, the smallest sold."
    )
    pool = _device_pool(profile, round(size_gib * GIB), said)
    if profile.memory_type == "unified":
        return (pool,)
    host_said = "" if host_memory_gib is not None else f" {beside_gib:g} GiB of host RAM assumed."
    return (pool, _host_pool("host RAM", round(beside_gib * GIB), None, host_said))


def _device_pool(profile: DeviceProfile, total: int, said: str) -> MemoryPool:
    if profile.memory_rule == "apple-working-set":
        return _apple_pool(total, said)
    if profile.memory_rule == "vram":
        usable = max(0, total - CARD_MARGIN_BYTES)
        reason = f"{_gib(CARD_MARGIN_BYTES)} of {_gib(total)} left to the driver and the display.{said}"
        return MemoryPool(profile.name, "gpu", total, usable, reason)
    if profile.memory_rule == "gpu-share":
        return _shared_pool(profile.name, total, profile.usable_share or ASSUMED_GPU_SHARE, said)
    kind: PoolKind = "host" if profile.backends == ("cpu",) else "unified"
    return _host_pool(profile.name, total, profile.usable_share, said, kind)


def apple_working_set_bytes(ram_bytes: int) -> int:
    """Metal's recommendedMaxWorkingSetSize by RAM: 2/3 up to 36 GiB, 3/4 above.

    Observed up to macOS 15: 11453.25 MB of 16 GiB, 22906.50 MB of 32 GiB, 51539.61 MB of 64 GiB. macOS 26
    gives 74 % of 16 and 18 GiB, 78 % of 32 and 36, 81 % of 64, 84 % of 128: the older figures are safer.
    """
    return ram_bytes * 2 // 3 if ram_bytes <= 36 * GIB else ram_bytes * 3 // 4


def _apple_pool(total: int, said: str) -> MemoryPool:
    limit = apple_working_set_bytes(total)
    share = "two thirds" if total <= 36 * GIB else "three quarters"
    reason = (
        f"Metal's working-set limit is about {_gib(limit)} of {_gib(total)} ({share} of the RAM;"
        f" macOS 26 gives more), less a margin of {_gib(GPU_MARGIN_BYTES)}."
        f" sysctl iogpu.wired_limit_mb can raise it.{said}"
    )
    return MemoryPool("unified memory", "unified", total, max(0, limit - GPU_MARGIN_BYTES), reason)


def _shared_pool(name: str, total: int, share: float, said: str) -> MemoryPool:
    limit = int(total * share)
    reason = (
        f"The graphics unit may take about {_gib(limit)} of {_gib(total)} shared memory by default, less a"
        f" margin of {_gib(GPU_MARGIN_BYTES)}; firmware or driver settings can raise it.{said}"
    )
    return MemoryPool(name, "unified", total, max(0, limit - GPU_MARGIN_BYTES), reason)


def _host_pool(name: str, total: int, share: float | None, said: str, kind: PoolKind = "host") -> MemoryPool:
    """RAM less what the system and other programs take: a stated share, or a quarter of it up to 4 GiB."""
    usable = int(total * share) if share else total - min(total // 4, 4 * GIB)
    reason = f"{_gib(total - usable)} of {_gib(total)} left to the system and other programs.{said}"
    return MemoryPool(name, kind, total, usable, reason)


def _gib(num_bytes: int) -> str:
    return f"{format_gib(num_bytes)} GiB"
