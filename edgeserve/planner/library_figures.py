"""What llama.cpp itself said a context takes, and when not to believe it.

Owns the figures of one dry run by buffer type, their sums by device, and the known cases in which the
library's own dry run is wrong. Knows nothing of the child process that asked (`measure`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgeserve.planner.hparams import HParams
from edgeserve.planner.placement import HOST_NAME, Accelerator, Placement
from edgeserve.planner.settings import ResolvedSettings


@dataclass(frozen=True, slots=True)
class BufferBytes:
    """Bytes in one of llama.cpp's buffer types ("CPU", "CUDA0", "CUDA0_Host", "CPU_REPACK", ...)."""

    name: str
    model_bytes: int
    context_bytes: int
    compute_bytes: int


@dataclass(frozen=True, slots=True)
class DryRun:
    """The library's figures for one context. `exact` False: compute only, to 5 kB a buffer.

    `allocated`: not a dry run but a real load, so there is nothing to doubt.
    """

    buffers: tuple[BufferBytes, ...]
    exact: bool
    flash_attn: bool
    flash_attn_reason: str
    n_ctx: int
    n_ctx_seq: int
    allocated: bool = False

    def by_device(self, devices: Sequence[Accelerator]) -> dict[str, BufferBytes]:
        """Sums for the host and each device: the host has several buffer types, and so may a device."""
        sums = {name: BufferBytes(name, 0, 0, 0) for name in (HOST_NAME, *(d.name for d in devices))}
        for buffer in self.buffers:
            name = buffer.name if buffer.name in sums else HOST_NAME
            sums[name] = BufferBytes(
                name,
                sums[name].model_bytes + buffer.model_bytes,
                sums[name].context_bytes + buffer.context_bytes,
                sums[name].compute_bytes + buffer.compute_bytes,
            )
        return sums

    def rearranged_bytes(self, devices: Sequence[Accelerator]) -> int:
        """Weights in buffer types that are neither a device's, nor plain, nor pinned host memory."""
        ordinary = {HOST_NAME}
        for device in devices:
            ordinary |= {device.name, f"{device.name}_Host", device.name.rstrip("0123456789") + "_Host"}
        return sum(buffer.model_bytes for buffer in self.buffers if buffer.name not in ordinary)


def doubt(hparams: HParams, settings: ResolvedSettings, placement: Placement) -> str:
    """Why the compute figures of a dry run are too low at these settings; "" when they are exact.

    Both cases were found by comparing dry runs with real loads of the same models.
    """
    if placement.num_gpu_layers and not settings.offload_kqv and settings.flash_attn == "off":
        # ggml_backend_sched_reserve_size resets the scheduler, and the pin of attention to the CPU is lost.
        return "llama.cpp's dry run loses track of attention on the CPU without flash attention"
    if hparams.name in ("minimax-01", "kimi-linear") and settings.n_seq_max > 1:
        # sched_reserve reserves once more for a single sequence, and does not count it.
        return "llama.cpp's dry run leaves out the largest graph of this architecture"
    return ""
