"""What a model takes at given settings on given devices: the one estimator behind every memory figure.

Owns the putting together: weights, cache and state from closed forms (exact, from the header alone, in
milliseconds), scratch buffers from a dry run or an estimate, and the lines that no figure of llama.cpp
contains. Knows nothing of how much memory there is, and nothing of how to choose settings.

    header = read_header("model.gguf")
    report = plan_memory(header, Settings(n_ctx=8192), [Accelerator("CUDA0", free, total)])
    report.devices[1].context_bytes, report.need("CUDA0").high
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgeserve.ggml_types import GGML_TYPES, row_bytes
from edgeserve.gguf_header import GGUFHeader, TensorInfo
from edgeserve.planner.compute_estimate import Interval, estimate_compute
from edgeserve.planner.hparams import HParams, read_hparams
from edgeserve.planner.kv_families import CacheTensor, context_tensors
from edgeserve.planner.placement import (
    HOST_NAME,
    Accelerator,
    Placement,
    Weights,
    place_context,
    place_layers,
    place_weights,
)
from edgeserve.planner.report import DeviceMemory, ExtraLine, MemoryReport
from edgeserve.planner.settings import Rejection, ResolvedSettings, Settings, resolve

# A Python process with llama.cpp, numpy and the HTTP stack loaded, and what the vocabulary's tables take a
# token. Measured: resident bytes that are not a file's, on Linux x86-64.
PROCESS_BYTES = 48 << 20
VOCAB_BYTES_PER_TOKEN = 360
# llama-kv-cells.h: a bitset of sequences, positions and shift of every cell; tree nodes of a used one.
CELL_BYTES = 48 + 90

# Types that some CPU rearranges for its own matrix instructions (repack.cpp, amx.cpp): which, only that CPU
# knows.
_REPACKED_TYPES = frozenset(
    ("q4_0", "q4_1", "q8_0", "q2_K", "q4_K", "q5_K", "q6_K", "iq4_nl", "iq4_xs", "mxfp4")
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class BufferBytes:
    """Bytes in one of llama.cpp's buffer types ("CPU", "CUDA0", "CUDA0_Host", "CPU_REPACK", ...)."""

    name: str
    model_bytes: int
    context_bytes: int
    compute_bytes: int


@dataclass(frozen=True, slots=True)
class DryRun:
    """The library's own figures for one context. `exact` False: compute only, to 5 kB a buffer."""

    buffers: tuple[BufferBytes, ...]
    exact: bool
    flash_attn: bool
    flash_attn_reason: str
    n_ctx: int
    n_ctx_seq: int


@dataclass(frozen=True, slots=True)
class Extras:
    """What the caller knows of memory beside the model: a budget for the prefix cache, a vision projector."""

    prefix_cache_bytes: int = 0
    projector: GGUFHeader | None = None


class ModelMemory:
    """One header, read once, and its figures at any settings. Pure: no file, no runtime, no clock."""

    def __init__(self, header: GGUFHeader) -> None:
        """Raises GGUFError when the header lacks a key that the sizes depend on."""
        self.header = header
        self.hparams = read_hparams(header)
        self._placed: dict[tuple[Placement, int], Weights] = {}

    def report(
        self,
        settings: Settings,
        devices: Sequence[Accelerator] = (),
        dry_run: DryRun | None = None,
        extras: Extras | None = None,
    ) -> MemoryReport:
        """Bytes at `settings` on the host and `devices`; compute from `dry_run` when there is one."""
        resolved = resolve(self.hparams, settings)
        if isinstance(resolved, Rejection):
            return _refused(settings, resolved)
        tensors = context_tensors(self.hparams, resolved)
        if (cut := _row_rejection(tensors)) is not None:
            return _refused(settings, cut)
        placement = place_layers(self.hparams.n_layer_all, settings, devices)
        case = _Case(self.header, self.hparams, settings, resolved, placement, tensors, dry_run)
        return case.report(self._weights(placement, settings.n_cpu_moe), extras or Extras())

    def _weights(self, placement: Placement, n_cpu_moe: int) -> Weights:
        key = (placement, n_cpu_moe)
        if key not in self._placed:
            self._placed[key] = place_weights(self.header, self.hparams, placement, n_cpu_moe)
        return self._placed[key]


def plan_memory(
    header: GGUFHeader,
    settings: Settings,
    devices: Sequence[Accelerator] = (),
    *,
    dry_run: DryRun | None = None,
    extras: Extras | None = None,
) -> MemoryReport:
    """What the model of `header` takes at `settings` on the host and `devices`.

    Weights, cache and state are exact to the byte for the architectures that llama.cpp 0c1e57098 knows;
    compute is an estimate with an interval, or exact when `dry_run` is given. Settings that llama.cpp would
    refuse give a report with `rejected`. Raises GGUFError when the header lacks a key that the sizes depend
    on.
    """
    return ModelMemory(header).report(settings, devices, dry_run, extras)


@dataclass(frozen=True, slots=True)
class _Case:
    """One model at one choice of settings and devices."""

    header: GGUFHeader
    hparams: HParams
    settings: Settings
    resolved: ResolvedSettings
    placement: Placement
    tensors: list[CacheTensor]
    dry_run: DryRun | None

    def report(self, weights: Weights, extras: Extras) -> MemoryReport:
        measured = self.dry_run is not None and self.dry_run.exact
        devices = self._measured_devices(weights) if measured else self._planned_devices(weights)
        kv_bytes, state_bytes = self._kv_and_state()
        return MemoryReport(
            settings=self.settings,
            resolved=self.resolved,
            devices=devices,
            output_bytes=self._output_bytes(),
            compute_source="dry-run" if self.dry_run is not None else "estimate",
            context_source="dry-run" if measured else "exact" if self.hparams.exact else "upper bound",
            context_low_bytes=kv_bytes + state_bytes if self.hparams.exact or measured else 0,
            kv_bytes=kv_bytes,
            state_bytes=state_bytes,
            kv_bytes_per_token=kv_bytes_per_token(self.tensors, self.resolved),
            host_mapped_bytes=weights.host_bytes if self.settings.use_mmap else 0,
            extras=tuple(self._extras(weights, extras)),
            flash_attn=self._flash_attn(),
            flash_attn_reason=self.dry_run.flash_attn_reason if self.dry_run is not None else "",
            notes=tuple(self._notes()),
        )

    # --- devices

    def _planned_devices(self, weights: Weights) -> tuple[DeviceMemory, ...]:
        host_context, device_context = self._context()
        host, accelerators = self._compute(weights)
        rows = zip(
            (HOST_NAME, *(device.name for device in self.placement.devices)),
            (weights.host_bytes, *weights.device_bytes),
            (host_context, *device_context),
            (host, *accelerators),
            strict=True,
        )
        return tuple(
            DeviceMemory(name, model, context, compute.likely, compute.low, compute.high)
            for name, model, context, compute in rows
        )

    def _compute(self, weights: Weights) -> tuple[Interval, tuple[Interval, ...]]:
        if self.dry_run is None:
            return estimate_compute(
                self.header, self.hparams, self.resolved, self.placement, weights, self.settings.op_offload
            )
        by_device = [self._logged_compute(device.name) for device in self.placement.devices]
        total = sum(buffer.compute_bytes for buffer in self.dry_run.buffers)
        return _exactly(total - sum(by_device)), tuple(_exactly(n_bytes) for n_bytes in by_device)

    def _logged_compute(self, name: str) -> int:
        assert self.dry_run is not None
        return sum(buffer.compute_bytes for buffer in self.dry_run.buffers if buffer.name == name)

    def _measured_devices(self, weights: Weights) -> tuple[DeviceMemory, ...]:
        """Sums by device: the host has several buffer types (plain, pinned, rearranged), and so may a
        device."""
        assert self.dry_run is not None
        names = [device.name for device in self.placement.devices]
        sums = {name: [0, 0, 0] for name in (HOST_NAME, *names)}
        for buffer in self.dry_run.buffers:
            row = sums[buffer.name if buffer.name in names else HOST_NAME]
            for index, value in enumerate((buffer.model_bytes, buffer.context_bytes, buffer.compute_bytes)):
                row[index] += value
        if self._rearranged_bytes():
            sums[HOST_NAME][0] = weights.host_bytes
        return tuple(
            DeviceMemory(name, model, context, compute, compute, compute)
            for name, (model, context, compute) in sums.items()
        )

    def _context(self) -> tuple[int, tuple[int, ...]]:
        return place_context(self.tensors, self.placement, self.resolved.offload_kqv)

    def _kv_and_state(self) -> tuple[int, int]:
        states = [tensor for tensor in self.tensors if tensor.is_state]
        host, accelerators = place_context(states, self.placement, self.resolved.offload_kqv)
        state_bytes = host + sum(accelerators)
        host, accelerators = self._context()
        return host + sum(accelerators) - state_bytes, state_bytes

    # --- lines beside llama.cpp's breakdown

    def _output_bytes(self) -> int:
        """Logits (and embeddings) that llama.cpp hands back, one row a sequence (`output_reserve`)."""
        width = self.hparams.n_vocab + (self.hparams.n_embd_out if self.resolved.embeddings else 0)
        return 4 * self.resolved.n_seq_max * width

    def _extras(self, weights: Weights, extras: Extras) -> list[ExtraLine]:
        lines = [
            ExtraLine(
                "output buffer", HOST_NAME, self._output_bytes(), "exact", "one row of logits a sequence"
            ),
            ExtraLine("process", HOST_NAME, PROCESS_BYTES, "estimate", "Python and libraries"),
            ExtraLine("vocabulary", HOST_NAME, VOCAB_BYTES_PER_TOKEN * self.hparams.n_vocab, "estimate"),
            ExtraLine("cell bookkeeping", HOST_NAME, CELL_BYTES * self._num_cells(), "estimate"),
        ]
        lines += [
            ExtraLine(
                "backend overhead",
                device.name,
                device.overhead_bytes,
                "estimate",
                "driver context, kernels, pools",
            )
            for device in self.placement.devices
            if device.overhead_bytes
        ]
        if (repacked := self._repacked(weights)) is not None:
            lines.append(repacked)
        if extras.prefix_cache_bytes:
            lines.append(ExtraLine("prefix cache", HOST_NAME, extras.prefix_cache_bytes, "budget"))
        if extras.projector is not None:
            where = self.placement.devices[0].name if self.placement.num_gpu_layers else HOST_NAME
            lines.append(
                ExtraLine("vision projector", where, extras.projector.tensor_bytes, "exact", "weights")
            )
        return lines

    def _num_cells(self) -> int:
        return max((tensor.rows for tensor in self.tensors if not tensor.is_state), default=0)

    def _repacked(self, weights: Weights) -> ExtraLine | None:
        """Weights that the CPU keeps a second time in an order of its own; the mapped originals can be
        dropped."""
        if not self.settings.use_extra_bufts or any(d.has_host_buffer for d in self.placement.devices):
            return None
        name, note = (
            "repacked weights",
            "copies for this CPU's matrix instructions; the originals can be dropped",
        )
        if self.dry_run is not None and self.dry_run.exact:
            n_bytes = self._rearranged_bytes()
            return ExtraLine(name, HOST_NAME, n_bytes, "dry-run", note, counted=False) if n_bytes else None
        n_bytes = sum(t.n_bytes for t in weights.host_tensors if _may_be_repacked(t))
        return ExtraLine(name, HOST_NAME, n_bytes, "upper bound", note, counted=False) if n_bytes else None

    def _rearranged_bytes(self) -> int:
        """Weights in buffer types that are neither a device's, nor plain, nor pinned host memory."""
        assert self.dry_run is not None
        ordinary = {HOST_NAME}
        for device in self.placement.devices:
            ordinary |= {device.name, f"{device.name}_Host", device.name.rstrip("0123456789") + "_Host"}
        return sum(buffer.model_bytes for buffer in self.dry_run.buffers if buffer.name not in ordinary)

    # --- words

    def _flash_attn(self) -> bool | None:
        if self.dry_run is not None:
            return self.dry_run.flash_attn
        return None if self.resolved.flash_attn == "auto" else self.resolved.flash_attn == "on"

    def _notes(self) -> list[str]:
        notes = []
        if not self.hparams.exact:
            notes.append(
                f"The architecture {self.hparams.name} is unknown here: its cache is sized as full attention in"
                " every layer, an upper bound for most designs. A dry run gives the real figure."
            )
        if not any(self.hparams.n_head_kv) and not self.hparams.exact:
            notes.append("The header has no attention keys, so no cache could be sized.")
        if self.dry_run is not None and self.resolved.flash_attn == "auto" and not self.dry_run.flash_attn:
            notes.append(
                "llama.cpp switches flash attention off at these settings"
                f" ({self.dry_run.flash_attn_reason or 'no reason given'}); say -fa on, or choose another -ngl."
            )
        return notes


def kv_bytes_per_token(tensors: Sequence[CacheTensor], resolved: ResolvedSettings) -> int:
    """Bytes that one more cell costs; layers whose window is full already cost nothing more."""
    growing = resolved.n_ctx_seq * resolved.n_stream
    return sum(
        row_bytes(tensor.type_id, tensor.row_elements)
        for tensor in tensors
        if not tensor.is_state and tensor.rows == growing
    )


def _exactly(n_bytes: int) -> Interval:
    return Interval(n_bytes, n_bytes, n_bytes)


def _may_be_repacked(tensor: TensorInfo) -> bool:
    is_matrix = "blk." in tensor.name or tensor.name == "output.weight"
    return is_matrix and tensor.ne[1] > 1 and GGML_TYPES[tensor.type_id].name in _REPACKED_TYPES


def _row_rejection(tensors: Sequence[CacheTensor]) -> Rejection | None:
    """llama.cpp does not check this one: it would cut the rows and read beyond them."""
    for tensor in tensors:
        ggml_type = GGML_TYPES[tensor.type_id]
        if tensor.row_elements % ggml_type.block:
            return Rejection(
                "row_block",
                f"Cache type {ggml_type.name} stores blocks of {ggml_type.block} values, which do not divide this"
                f" model's cache rows of {tensor.row_elements}.",
            )
    return None


def _refused(settings: Settings, rejection: Rejection) -> MemoryReport:
    return MemoryReport(
        settings=settings,
        resolved=None,
        devices=(),
        output_bytes=0,
        compute_source="estimate",
        context_source="exact",
        context_low_bytes=0,
        kv_bytes=0,
        state_bytes=0,
        kv_bytes_per_token=0,
        host_mapped_bytes=0,
        extras=(),
        flash_attn=None,
        rejected=rejection.message,
        rejection_code=rejection.code,
    )
