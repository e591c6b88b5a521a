"""What a model takes at given settings on given devices: the one estimator behind every memory figure.

Owns the putting together: weights, cache and state from closed forms (exact, from the header alone, in
milliseconds), scratch buffers from a dry run or an estimate, and the lines beside llama.cpp's account. Knows
nothing of how much memory there is, and nothing of how to choose settings.

    header = read_header("model.gguf")
    report = plan_memory(header, Settings(n_ctx=8192), [Accelerator("CUDA0", free, total)])
    report.devices[1].context_bytes, report.need("CUDA0").high
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgeserve.ggml_types import GGML_TYPES, row_bytes
from edgeserve.gguf_header import GGUFHeader
from edgeserve.planner.compute_estimate import Interval, estimate_compute
from edgeserve.planner.extras import (
    Extras,
    asked_lines,
    device_lines,
    host_lines,
    output_bytes,
    repacked_line,
)
from edgeserve.planner.hparams import HParams, read_hparams
from edgeserve.planner.kv_families import CacheTensor, context_tensors
from edgeserve.planner.library_figures import DryRun, doubt
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

__all__ = ["Extras", "ModelMemory", "kv_bytes_per_token", "plan_memory"]


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
        weights = self._weights(placement, settings.n_cpu_moe)
        case = _Case(self.header, self.hparams, settings, resolved, placement, weights, tensors, dry_run)
        return case.report(extras or Extras())

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
    weights: Weights
    tensors: list[CacheTensor]
    dry_run: DryRun | None

    def report(self, extras: Extras) -> MemoryReport:
        measured = self.dry_run is not None and self.dry_run.exact
        kv_bytes, state_bytes = self._kv_and_state()
        return MemoryReport(
            settings=self.settings,
            resolved=self.resolved,
            devices=self._devices(),
            output_bytes=output_bytes(self.hparams, self.resolved),
            compute_source="dry-run" if self.dry_run is not None and not self._doubt() else "estimate",
            context_source="dry-run" if measured else "exact" if self.hparams.exact else "upper bound",
            context_low_bytes=kv_bytes + state_bytes if self.hparams.exact or measured else 0,
            kv_bytes=kv_bytes,
            state_bytes=state_bytes,
            kv_bytes_per_token=kv_bytes_per_token(self.tensors, self.resolved),
            host_mapped_bytes=self.weights.host_bytes if self.settings.use_mmap else 0,
            extras=tuple(self._extras(extras)),
            flash_attn=self._flash_attn(),
            flash_attn_reason=self.dry_run.flash_attn_reason if self.dry_run is not None else "",
            notes=tuple(self._notes()),
        )

    # --- devices

    def _devices(self) -> tuple[DeviceMemory, ...]:
        names = (HOST_NAME, *(device.name for device in self.placement.devices))
        host_context, device_context = self._context()
        rows = zip(
            names,
            (self.weights.host_bytes, *self.weights.device_bytes),
            (host_context, *device_context),
            self._compute(),
            strict=True,
        )
        planned = tuple(
            DeviceMemory(name, model, context, compute.likely, compute.low, compute.high)
            for name, model, context, compute in rows
        )
        return self._with_measured(planned) if self.dry_run is not None and self.dry_run.exact else planned

    def _with_measured(self, planned: tuple[DeviceMemory, ...]) -> tuple[DeviceMemory, ...]:
        """The library's own weights and cache in place of the closed forms.

        Rearranged weights are a line of their own, so the host's weights stay those of the file then.
        """
        assert self.dry_run is not None
        sums = self.dry_run.by_device(self.placement.devices)
        rearranged = self.dry_run.rearranged_bytes(self.placement.devices)
        return tuple(
            DeviceMemory(
                device.name,
                device.model_bytes
                if rearranged and device.name == HOST_NAME
                else sums[device.name].model_bytes,
                sums[device.name].context_bytes,
                device.compute_bytes,
                device.compute_low_bytes,
                device.compute_high_bytes,
            )
            for device in planned
        )

    def _compute(self) -> list[Interval]:
        """Scratch of the host and each device, in that order."""
        if self.dry_run is not None and not self._doubt():
            return self._logged()
        host, devices = estimate_compute(
            self.header,
            self.hparams,
            self.resolved,
            self.placement,
            self.weights,
            self.settings.op_offload,
        )
        if self.dry_run is None:
            return [host, *devices]
        # Doubtful figures are too low, by less than half wherever they were compared with real loads.
        pairs = zip((host, *devices), self._logged(), strict=True)
        return [
            Interval(min(a.low, b.low), max(a.likely, b.likely), max(a.high, 2 * b.high)) for a, b in pairs
        ]

    def _logged(self) -> list[Interval]:
        assert self.dry_run is not None
        sums = self.dry_run.by_device(self.placement.devices)
        return [Interval(row.compute_bytes, row.compute_bytes, row.compute_bytes) for row in sums.values()]

    def _doubt(self) -> str:
        if self.dry_run is None or self.dry_run.allocated:
            return ""
        return doubt(self.hparams, self.resolved, self.placement)

    def _context(self) -> tuple[int, tuple[int, ...]]:
        return place_context(self.tensors, self.placement, self.resolved.offload_kqv)

    def _kv_and_state(self) -> tuple[int, int]:
        states = [tensor for tensor in self.tensors if tensor.is_state]
        host, devices = place_context(states, self.placement, self.resolved.offload_kqv)
        state_bytes = host + sum(devices)
        host, devices = self._context()
        return host + sum(devices) - state_bytes, state_bytes

    # --- beside the bytes

    def _extras(self, extras: Extras) -> list[ExtraLine]:
        lines = [*host_lines(self.header, self.hparams, self.resolved, self.tensors)]
        lines += device_lines(self.placement)
        repacked = repacked_line(self.settings, self.placement, self.weights, self.dry_run)
        lines += [repacked] if repacked is not None else []
        lines += asked_lines(self.placement, extras)
        return lines

    def _flash_attn(self) -> bool | None:
        if self.dry_run is not None:
            return self.dry_run.flash_attn
        return None if self.resolved.flash_attn == "auto" else self.resolved.flash_attn == "on"

    def _notes(self) -> list[str]:
        notes = []
        if not self.hparams.exact:
            notes.append(
                f"The architecture {self.hparams.name} is unknown here: its cache is sized as full attention"
                " in every layer, an upper bound for most designs. Only a dry run gives the real figure."
            )
        if not self.hparams.exact and not any(self.hparams.n_head_kv):
            notes.append("The header has no attention keys, so no cache could be sized.")
        if self._doubt():
            notes.append(f"Compute is an estimate: {self._doubt()}.")
        if self.dry_run is not None and self.resolved.flash_attn == "auto" and not self.dry_run.flash_attn:
            notes.append(
                "llama.cpp switches flash attention off at these settings"
                f" ({self.dry_run.flash_attn_reason or 'no reason given'}): say -fa on, or take another -ngl."
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


def _row_rejection(tensors: Sequence[CacheTensor]) -> Rejection | None:
    """llama.cpp does not check this one: it would cut the rows and read beyond them."""
    for tensor in tensors:
        ggml_type = GGML_TYPES[tensor.type_id]
        if tensor.row_elements % ggml_type.block:
            return Rejection(
                "row_block",
                f"Cache type {ggml_type.name} stores blocks of {ggml_type.block} values, which do not divide"
                f" this model's cache rows of {tensor.row_elements}.",
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
