"""The lines of a memory report that no figure of llama.cpp contains.

Owns what the output buffer, the process, the vocabulary, the cells' bookkeeping, rearranged weights, drivers,
the prefix cache and a vision projector take, each with how sure the figure is. Knows nothing of weights,
caches and scratch buffers, which are llama.cpp's own account.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from edgeserve.ggml_types import GGML_TYPES
from edgeserve.gguf_header import ArrayLength, GGUFHeader, TensorInfo
from edgeserve.planner.hparams import HParams
from edgeserve.planner.kv_families import CacheTensor
from edgeserve.planner.library_figures import DryRun
from edgeserve.planner.placement import HOST_NAME, Placement, Weights
from edgeserve.planner.report import ExtraLine
from edgeserve.planner.settings import ResolvedSettings, Settings

# Private memory, measured on Linux x86-64: 32 MiB after importing llama.cpp's bindings, numpy and the HTTP
# stack (the rest is room for requests); vocabularies of 32,000 to 256,000 tokens with and without merges.
PROCESS_BYTES = 48 << 20
BYTES_PER_TOKEN, BYTES_PER_MERGE = 150, 190
# llama-kv-cells.h: a bitset of sequences, positions and shift of every cell; tree nodes of a used one.
CELL_BYTES = 48 + 90

# Types that some CPU rearranges for its own matrix instructions (repack.cpp, amx.cpp): which, only it knows.
_REPACKED_TYPES = frozenset(
    ("q4_0", "q4_1", "q8_0", "q2_K", "q4_K", "q5_K", "q6_K", "iq4_nl", "iq4_xs", "mxfp4")
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Extras:
    """What the caller knows of memory beside the model: a budget for the prefix cache, a vision projector."""

    prefix_cache_bytes: int = 0
    projector: GGUFHeader | None = None


def output_bytes(hparams: HParams, resolved: ResolvedSettings) -> int:
    """Logits (and embeddings) that llama.cpp hands back, one row a sequence (`output_reserve`)."""
    width = hparams.n_vocab + (hparams.n_embd_out if resolved.embeddings else 0)
    return 4 * resolved.n_seq_max * width


def host_lines(
    header: GGUFHeader, hparams: HParams, resolved: ResolvedSettings, tensors: Sequence[CacheTensor]
) -> Iterator[ExtraLine]:
    """What every process with this model and context holds in host memory besides."""
    cells = max((tensor.rows for tensor in tensors if not tensor.is_state), default=0)
    yield ExtraLine(
        "output buffer", HOST_NAME, output_bytes(hparams, resolved), "exact", "one row of logits a sequence"
    )
    yield ExtraLine("process", HOST_NAME, PROCESS_BYTES, "estimate", "Python and libraries")
    yield ExtraLine("vocabulary", HOST_NAME, _vocabulary_bytes(header, hparams), "estimate")
    yield ExtraLine("cell bookkeeping", HOST_NAME, CELL_BYTES * cells, "estimate")


def _vocabulary_bytes(header: GGUFHeader, hparams: HParams) -> int:
    merges = header.get("tokenizer.ggml.merges")
    num_merges = len(merges) if isinstance(merges, ArrayLength) else 0
    return BYTES_PER_TOKEN * hparams.n_vocab + BYTES_PER_MERGE * num_merges


def device_lines(placement: Placement) -> Iterator[ExtraLine]:
    """What drivers take on every device that holds layers."""
    note = "driver context, kernels, memory pools"
    for index, device in enumerate(placement.devices):
        if index in placement.layer_device and device.overhead_bytes:
            yield ExtraLine("backend overhead", device.name, device.overhead_bytes, "estimate", note)


def asked_lines(placement: Placement, extras: Extras) -> Iterator[ExtraLine]:
    """What the caller asked for besides."""
    if extras.prefix_cache_bytes:
        yield ExtraLine("prefix cache", HOST_NAME, extras.prefix_cache_bytes, "budget")
    if extras.projector is not None:
        where = placement.devices[0].name if placement.num_gpu_layers else HOST_NAME
        n_bytes = extras.projector.tensor_bytes
        yield ExtraLine("vision projector", where, n_bytes, "exact", "its weights; its buffers are not known")


def repacked_line(
    settings: Settings, placement: Placement, weights: Weights, dry_run: DryRun | None
) -> ExtraLine | None:
    """Weights that the CPU keeps a second time in an order of its own; the mapped originals can be
    dropped."""
    if not settings.use_extra_bufts or any(device.has_host_buffer for device in placement.devices):
        return None
    name = "repacked weights"
    note = "copies in the order of this CPU's matrix instructions; the originals can be dropped"
    if dry_run is not None and dry_run.exact:
        n_bytes = dry_run.rearranged_bytes(placement.devices)
        return ExtraLine(name, HOST_NAME, n_bytes, "dry-run", note, counted=False) if n_bytes else None
    n_bytes = sum(tensor.n_bytes for tensor in weights.host_tensors if _may_be_repacked(tensor))
    return ExtraLine(name, HOST_NAME, n_bytes, "upper bound", note, counted=False) if n_bytes else None


def _may_be_repacked(tensor: TensorInfo) -> bool:
    is_matrix = "blk." in tensor.name or tensor.name == "output.weight"
    return is_matrix and tensor.ne[1] > 1 and GGML_TYPES[tensor.type_id].name in _REPACKED_TYPES
