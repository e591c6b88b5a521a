"""What a memory report says: bytes by device and kind, further lines by name, and how sure each figure is.

Owns the shape of the answer and its sums. Knows nothing of how any figure was found.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from edgeserve.planner.compute_estimate import Interval
from edgeserve.planner.settings import ResolvedSettings, Settings

Source = Literal["exact", "dry-run", "estimate", "upper bound", "budget"]


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes on one device, in the three kinds of llama.cpp's own breakdown.

    `compute_low_bytes` and `compute_high_bytes` bound an estimate; they are `compute_bytes` after a dry run.
    """

    name: str
    model_bytes: int
    context_bytes: int
    compute_bytes: int
    compute_low_bytes: int
    compute_high_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.model_bytes + self.context_bytes + self.compute_bytes


@dataclass(frozen=True, slots=True)
class ExtraLine:
    """Memory that llama.cpp's breakdown leaves out. `counted` False: not part of the need, only worth
    knowing."""

    name: str
    device: str
    n_bytes: int
    source: Source
    note: str = ""
    counted: bool = True


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """What a model takes at `settings`.

    `devices` starts with the host, named "CPU". `resolved` is None when llama.cpp would refuse the settings:
    then `rejected` says why and there are no figures. `flash_attn` None: left to llama.cpp, which decides
    when it builds the graph. `host_mapped_bytes` is the part of the host's weights that is file-backed and
    can be dropped; the rest is private. `context_low_bytes` is below the context's sum for an unknown
    architecture only.
    """

    settings: Settings
    resolved: ResolvedSettings | None
    devices: tuple[DeviceMemory, ...]
    output_bytes: int
    compute_source: Literal["dry-run", "estimate"]
    context_source: Literal["exact", "dry-run", "upper bound"]
    context_low_bytes: int
    kv_bytes: int
    state_bytes: int
    kv_bytes_per_token: int
    host_mapped_bytes: int
    extras: tuple[ExtraLine, ...]
    flash_attn: bool | None
    flash_attn_reason: str = ""
    rejected: str | None = None
    rejection_code: str = ""
    notes: tuple[str, ...] = ()

    @property
    def model_bytes(self) -> int:
        return sum(device.model_bytes for device in self.devices)

    @property
    def context_bytes(self) -> int:
        return sum(device.context_bytes for device in self.devices)

    @property
    def compute_bytes(self) -> int:
        return sum(device.compute_bytes for device in self.devices)

    def device(self, name: str) -> DeviceMemory:
        """The device called `name`; KeyError if it is not in the report."""
        for device in self.devices:
            if device.name == name:
                return device
        raise KeyError(name)

    def need(self, name: str) -> Interval:
        """All that device `name` must hold, extras included."""
        device = self.device(name)
        fixed = device.model_bytes + device.context_bytes
        fixed += sum(line.n_bytes for line in self.extras if line.device == name and line.counted)
        compute = Interval(device.compute_low_bytes, device.compute_bytes, device.compute_high_bytes)
        return compute.plus(fixed)
