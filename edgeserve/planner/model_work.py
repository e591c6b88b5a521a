"""What a model asks of a machine per token, read from its header.

Owns the counting: which tensors a step reads, how many of them a token with experts uses, and what a
resident token costs. Knows nothing of devices or speeds. Sizes of cache and state come from the same rules
as memory figures do.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from edgeserve.errors import UsageError
from edgeserve.ggml_types import row_bytes
from edgeserve.gguf_header import GGUFHeader, TensorInfo
from edgeserve.planner.hparams import HParams, read_hparams
from edgeserve.planner.kv_families import CacheTensor, context_tensors
from edgeserve.planner.settings import Rejection, Settings, resolve
from edgeserve.planner.speed_terms import ModelWork, quant_class

_EXPERTS = re.compile(r"\.ffn_(up|down|gate|gate_up)_(ch|)exps\.")
_LAYER = re.compile(r"^blk\.(\d+)\.")
# Tables that are looked up: a token reads one row.
_TABLES = ("token_embd.weight", "position_embd.weight", "token_types.weight", "per_layer_token_embd.weight")
_N_CTX = 4096


def model_work(header: GGUFHeader, type_k: str = "f16", type_v: str = "f16") -> ModelWork:
    """Work of one token with every layer of the model.

    Raises GGUFError for headers that cannot be sized and UsageError for cache types that the model refuses.
    """
    hparams = read_hparams(header)
    read = [tensor for tensor in header.tensors if _is_read(tensor, hparams)]
    output = _output(header)
    experts = [tensor for tensor in read if _EXPERTS.search(tensor.name)]
    idle = 1.0 - _used_share(header)
    weight_bytes = _sum_bytes(read) + (output.n_bytes if output else 0)
    full, window = _cache_bytes(hparams, type_k, type_v)
    full_pairs, window_pairs = _pair_flops(hparams)
    return ModelWork(
        n_layer=hparams.n_layer,
        weight_bytes=weight_bytes,
        active_weight_bytes=weight_bytes - idle * _sum_bytes(experts),
        active_params=_sum_elements(read) - idle * _sum_elements(experts),
        quant_class=_quant_class(read),
        output_params=output.num_elements if output else 0,
        kv_bytes_per_token=full,
        pair_flops=full_pairs,
        window_kv_bytes_per_token=window,
        window_pair_flops=window_pairs,
        n_swa=hparams.n_swa if window else 0,
        state_bytes=_state_bytes(hparams, type_k, type_v),
    )


def _is_read(tensor: TensorInfo, hparams: HParams) -> bool:
    """Weights that every step reads, the output matrix aside; blocks of draft models are not run."""
    if tensor.name in _TABLES or tensor.name == "output.weight":
        return False
    layer = _LAYER.match(tensor.name)
    return layer is None or int(layer[1]) < hparams.n_layer


def _output(header: GGUFHeader) -> TensorInfo | None:
    """The output matrix; where there is none, the token embeddings take its part."""
    by_name = {tensor.name: tensor for tensor in header.tensors}
    return by_name.get("output.weight") or by_name.get("token_embd.weight")


def _used_share(header: GGUFHeader) -> float:
    count, used = header.arch_get_int("expert_count"), header.arch_get_int("expert_used_count")
    return min(1.0, used / count) if count and used else 1.0


def _sum_bytes(tensors: Iterable[TensorInfo]) -> float:
    return float(sum(tensor.n_bytes for tensor in tensors))


def _sum_elements(tensors: Iterable[TensorInfo]) -> float:
    return float(sum(tensor.num_elements for tensor in tensors))


def _quant_class(tensors: Sequence[TensorInfo]) -> str:
    """The kernel family that reads most bytes."""
    bytes_of: Counter[str] = Counter()
    for tensor in tensors:
        bytes_of[quant_class(tensor.type_name)] += tensor.n_bytes
    return bytes_of.most_common(1)[0][0] if bytes_of else "q"


def _context(hparams: HParams, type_k: str, type_v: str) -> list[CacheTensor]:
    wanted = Settings(n_ctx=_N_CTX, n_seq_max=1, type_k=type_k, type_v=type_v, swa_full=True)
    settings = resolve(hparams, wanted)
    if isinstance(settings, Rejection):
        raise UsageError(settings.message)
    return context_tensors(hparams, settings)


def _cache_bytes(hparams: HParams, type_k: str, type_v: str) -> tuple[float, float]:
    """Bytes of one resident token in layers that see everything, and in layers that see a window.

    Compressed caches have fewer rows than tokens: rows are counted for a full context and spread over it.
    """
    full = window = 0.0
    for tensor in _context(hparams, type_k, type_v):
        if tensor.is_state or tensor.il >= hparams.n_layer:
            continue
        per_token = row_bytes(tensor.type_id, tensor.row_elements) * tensor.rows / _N_CTX
        if hparams.is_swa[tensor.il] and hparams.n_swa:
            window += per_token
        else:
            full += per_token
    return full, window


def _state_bytes(hparams: HParams, type_k: str, type_v: str) -> float:
    states = [tensor for tensor in _context(hparams, type_k, type_v) if tensor.is_state]
    return float(sum(row_bytes(tensor.type_id, tensor.row_elements) * tensor.rows for tensor in states))


def _pair_flops(hparams: HParams) -> tuple[float, float]:
    """2 FLOPs per element of a query's heads for the scores, and as many for the values, by layer."""
    full = window = 0.0
    for il in range(hparams.n_layer):
        if not hparams.has_kv[il] or hparams.is_recr[il]:
            continue
        flops = 2.0 * hparams.n_head[il] * (hparams.n_embd_head_k[il] + hparams.n_embd_head_v[il])
        if hparams.is_swa[il] and hparams.n_swa:
            window += flops
        else:
            full += flops
    return full, window
