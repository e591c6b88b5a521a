"""Which device holds which tensor: llama.cpp's placement over -ngl, tensor split and expert overrides.

Owns the assignment of layers to devices, of weights and cache tensors to layers, and the bytes that a
device's alignment adds. Knows nothing of scratch buffers (`compute_estimate`) and of what fits where.

Source: `load_tensors` in llama-model.cpp, `create_tensor` in llama-model-loader.cpp, the tensor table of
llama-arch.cpp, and `get_alloc_size` of ggml-cuda.cu for the padding of quantized rows.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from edgeserve.ggml_types import GGML_TYPES, row_bytes
from edgeserve.gguf_header import GGUFHeader, TensorInfo
from edgeserve.planner.hparams import HParams
from edgeserve.planner.kv_families import CacheTensor
from edgeserve.planner.settings import Settings, round_up

HOST_NAME = "CPU"
HOST_ALIGNMENT = 32
_QUANTIZED_ROW_STEP = 512

_LAYER_NAME = re.compile(r"(?:^|\.)(?:blk|posnet|convnext)\.(\d+)\.")
_EXPERTS = re.compile(r"\.ffn_(up|down|gate|gate_up)_(ch|)exps")
_ROPE_TENSORS = ("rope_freqs", "rope_factors_long", "rope_factors_short")
_INPUT_TENSORS = ("token_embd", "position_embd", "token_types", "per_layer_token_embd")
# Stored once, but created as part of layer 0.
_FIRST_LAYER_TENSORS = (
    "token_embd_norm", "per_layer_model_proj", "per_layer_proj_norm", "conv1d", "hrm.z_l_init"
)  # fmt: skip
# Tensors that the loader recognises and then leaves in the file.
_UNUSED_TENSORS = ("cross_attn_rel_b", "masked_embd_centroids", "masked_embd_ordering")


@dataclass(frozen=True, slots=True)
class Accelerator:
    """A device beside the CPU, as far as placement sees it.

    `free_bytes` sets its share of the layers when no tensor split is given. The defaults of `alignment`
    (bytes) and `pads_quantized_rows` are those of CUDA. `has_host_buffer`: it offers pinned host memory.
    `attention_copies`: flash attention converts a cache that is not F16. `overhead_bytes` is what driver and
    kernels take beside llama.cpp's buffers, outside of every figure of llama.cpp: 0.3 to 0.6 GiB with CUDA.
    """

    name: str
    free_bytes: int
    total_bytes: int
    alignment: int = 128
    pads_quantized_rows: bool = True
    has_host_buffer: bool = True
    attention_copies: bool = True
    overhead_bytes: int = 512 << 20


@dataclass(frozen=True, slots=True)
class Placement:
    """Device of every layer: an index into `devices`, -1 for the host. The last entry is the output layer."""

    devices: tuple[Accelerator, ...]
    layer_device: tuple[int, ...]

    @property
    def num_gpu_layers(self) -> int:
        """Layers on a device, the output layer counted as one."""
        return sum(device >= 0 for device in self.layer_device)


def place_layers(n_layer_all: int, settings: Settings, devices: Sequence[Accelerator]) -> Placement:
    """Spread the layers as llama.cpp does: the output layer is the first to move, then the last layers.

    Which device a layer goes to is decided in 32-bit floats, as there: rounding moves a layer now and then.
    """
    num_slots = n_layer_all + 1
    n_gpu_layers = settings.n_gpu_layers if settings.n_gpu_layers >= 0 else num_slots
    num_moved = min(n_gpu_layers, num_slots) if devices else 0
    first = num_slots - num_moved
    splits = _split_points(settings.tensor_split, devices)
    layer_device = [-1] * num_slots
    for slot in range(first, num_slots):
        share = _f32((slot - first) / num_moved)
        layer_device[slot] = next(index for index, end in enumerate(splits) if end > share)
    return Placement(tuple(devices), tuple(layer_device))


def _split_points(tensor_split: Sequence[float], devices: Sequence[Accelerator]) -> list[float]:
    """Where each device's share ends, from 0 to 1."""
    given = (*tensor_split, *(0.0,) * len(devices))[: len(devices)]
    shares = given if any(given) else [float(device.free_bytes) for device in devices]
    if devices and not any(shares):
        shares = [1.0] * len(devices)
    points, total = [], 0.0
    for share in shares:
        total = _f32(total + _f32(share))
        points.append(total)
    return [_f32(point / total) for point in points]


def _f32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


# --- weights


@dataclass(frozen=True, slots=True)
class Weights:
    """Bytes of weights: on the host and on each device. `host_tensors` are those on the host, by name."""

    host_bytes: int
    device_bytes: tuple[int, ...]
    host_tensors: tuple[TensorInfo, ...]


def place_weights(header: GGUFHeader, hparams: HParams, placement: Placement, n_cpu_moe: int = 0) -> Weights:
    """Where every tensor of the file goes, copies included and unused tensors left out."""
    host: dict[str, TensorInfo] = {}
    device_bytes = [0] * len(placement.devices)
    for tensor in header.tensors:
        for device in _homes(tensor, hparams, placement, n_cpu_moe):
            if device < 0:
                host[tensor.name] = tensor
            else:
                accelerator = placement.devices[device]
                device_bytes[device] += tensor_bytes_on(
                    accelerator, tensor.type_id, tensor.ne[0], tensor.n_bytes
                )
    tied = _tied_output(header, hparams)
    output_device = placement.layer_device[-1]
    if tied is not None and output_device >= 0:
        accelerator = placement.devices[output_device]
        device_bytes[output_device] += tensor_bytes_on(accelerator, tied.type_id, tied.ne[0], tied.n_bytes)
    host_bytes = sum(round_up(tensor.n_bytes, HOST_ALIGNMENT) for tensor in host.values())
    return Weights(host_bytes, tuple(device_bytes), tuple(host.values()))


def tensor_bytes_on(device: Accelerator, type_id: int, row_elements: int, n_bytes: int) -> int:
    """What a tensor takes in a buffer of `device`: CUDA pads rows of quantized types, and all is aligned."""
    if device.pads_quantized_rows and GGML_TYPES[type_id].block > 1 and row_elements % _QUANTIZED_ROW_STEP:
        n_bytes += row_bytes(type_id, _QUANTIZED_ROW_STEP - row_elements % _QUANTIZED_ROW_STEP)
    return round_up(n_bytes, device.alignment)


def _homes(tensor: TensorInfo, hparams: HParams, placement: Placement, n_cpu_moe: int) -> Iterable[int]:
    """Devices that get this tensor; none for one that is not loaded."""
    layer = _LAYER_NAME.search(tensor.name)
    if layer is not None:
        return _layer_homes(tensor.name, int(layer[1]), hparams, placement, n_cpu_moe)
    stem = re.sub(r"\.(weight|bias|scale|input_scale)$", "", tensor.name)
    if stem in _UNUSED_TENSORS:
        return ()
    if stem in _ROPE_TENSORS:
        return _rope_homes(hparams, placement)
    if stem in _INPUT_TENSORS:
        return (-1,)
    # lfm2 calls its output norm by the name of an input norm.
    if stem in _FIRST_LAYER_TENSORS and not hparams.name.startswith("lfm2"):
        return (placement.layer_device[0],)
    return (placement.layer_device[-1],)


def _layer_homes(name: str, il: int, hparams: HParams, placement: Placement, n_cpu_moe: int) -> Iterable[int]:
    if any(unused in name for unused in _UNUSED_TENSORS):
        return ()
    if hparams.n_layer <= il < hparams.n_layer_all and not _is_loaded_draft(name, hparams):
        return ()
    if il < n_cpu_moe and _EXPERTS.search(name):
        return (-1,)
    return (placement.layer_device[min(il, hparams.n_layer_all - 1)],)


def _is_loaded_draft(name: str, hparams: HParams) -> bool:
    part = name.split(".", 2)[2]
    loaded = hparams.architecture.mtp_tensors_loaded
    return any(part == name or part.startswith(name + ".") for name in loaded)


def _rope_homes(hparams: HParams, placement: Placement) -> Iterable[int]:
    """Rope factors are read by every layer: each device holds a copy, the host one if it holds a layer.

    gemma4 needs them in its full layers only.
    """
    layers = range(hparams.n_layer)
    if hparams.name == "gemma4":
        layers_in_need = [il for il in layers if not hparams.is_swa[il]]
    else:
        layers_in_need = list(layers)
    return sorted({placement.layer_device[il] for il in layers_in_need})


def _tied_output(header: GGUFHeader, hparams: HParams) -> TensorInfo | None:
    """The token embeddings, where they stand in for a missing output matrix."""
    if not hparams.architecture.tied_copy:
        return None
    by_name = {tensor.name: tensor for tensor in header.tensors if "blk." not in tensor.name}
    return None if "output.weight" in by_name else by_name.get("token_embd.weight")


# --- context


def place_context(
    tensors: Iterable[CacheTensor], placement: Placement, offload_kqv: bool = True
) -> tuple[int, tuple[int, ...]]:
    """Bytes of cache and state on the host and on each device."""
    host_bytes, device_bytes = 0, [0] * len(placement.devices)
    for tensor in tensors:
        n_bytes = row_bytes(tensor.type_id, tensor.row_elements) * tensor.rows
        device = placement.layer_device[tensor.il] if offload_kqv else -1
        if device < 0:
            host_bytes += round_up(n_bytes, HOST_ALIGNMENT)
        else:
            device_bytes[device] += tensor_bytes_on(
                placement.devices[device], tensor.type_id, tensor.row_elements, n_bytes
            )
    return host_bytes, tuple(device_bytes)
