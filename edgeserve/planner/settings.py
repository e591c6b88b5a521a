"""The settings that decide how much memory a model takes, resolved as llama.cpp resolves them.

Owns the rounding of n_ctx, the limits between n_ctx, n_batch and n_ubatch, and the combinations that
llama.cpp refuses, each with the reason. Knows nothing of bytes or devices.

Source: `llama_context::llama_context` and `llama_init_from_model` in llama-context.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgeserve.config import EngineConfig, FlashAttention
from edgeserve.ggml_types import GGML_TYPES, type_id_of
from edgeserve.planner.hparams import HParams

CELL_STEP = 256
"""llama.cpp rounds the cells of a sequence up to a multiple of this."""

MAX_SEQUENCES = 256
_UNQUANTIZED = ("f32", "f16", "bf16")


@dataclass(frozen=True, slots=True)
class Settings:
    """What a user may choose, in llama.cpp's own words.

    `n_ctx` 0 is the trained context. `n_outputs_max` None is edgeserve's choice, one row of logits a
    sequence; 0 is llama.cpp's own default, one a token of the batch. `n_gpu_layers` negative is all;
    `n_cpu_moe` is the number of first layers whose experts stay in host memory; `tensor_split` the shares of
    the devices (empty: by their free memory). `n_rs_seq` keeps that many earlier recurrent states for taking
    tokens back.
    """

    n_ctx: int = 0
    n_seq_max: int = 1
    n_batch: int = 2048
    n_ubatch: int = 512
    n_outputs_max: int | None = None
    type_k: str = "f16"
    type_v: str = "f16"
    flash_attn: FlashAttention = "auto"
    kv_unified: bool = False
    swa_full: bool = True
    offload_kqv: bool = True
    op_offload: bool = True
    embeddings: bool = False
    n_rs_seq: int = 0
    n_gpu_layers: int = -1
    n_cpu_moe: int = 0
    tensor_split: tuple[float, ...] = ()
    use_mmap: bool = True
    use_extra_bufts: bool = True


def settings_of(config: EngineConfig) -> Settings:
    """The part of an engine's configuration that decides its memory."""
    return Settings(
        n_ctx=config.n_ctx,
        n_seq_max=config.n_seq_max,
        n_batch=config.n_batch,
        n_ubatch=config.n_ubatch,
        type_k=config.type_k,
        type_v=config.type_v,
        flash_attn=config.flash_attn,
        kv_unified=config.kv_unified,
        swa_full=config.swa_full,
        offload_kqv=config.offload_kqv,
        n_gpu_layers=config.n_gpu_layers,
        use_mmap=config.use_mmap,
        use_extra_bufts=config.use_extra_bufts,
    )


@dataclass(frozen=True, slots=True)
class ResolvedSettings:
    """The figures that a context really gets.

    `n_ctx` is cells in all, `n_ctx_seq` cells of one sequence, `n_stream` how many separate caches there are
    (1 when unified). `flash_attn` is what the context starts with; "auto" may still be switched off by
    llama.cpp when it builds the graph. `v_trans`: values are stored transposed, which is so only with flash
    attention off by choice, since the cache is made before "auto" is decided. `type_k`/`type_v` are ggml type
    numbers.
    """

    n_ctx: int
    n_ctx_seq: int
    n_stream: int
    n_seq_max: int
    n_batch: int
    n_ubatch: int
    n_outputs_max: int
    n_rs_seq: int
    type_k: int
    type_v: int
    flash_attn: FlashAttention
    v_trans: bool
    kv_unified: bool
    swa_full: bool
    offload_kqv: bool
    embeddings: bool


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why llama.cpp would not make this context: a code for programs, a sentence for people."""

    code: str
    message: str


def resolve(hparams: HParams, settings: Settings) -> ResolvedSettings | Rejection:
    """Settle every figure of a context as llama.cpp does, or say why it would refuse."""
    flash_attn = _flash_attn(hparams, settings)
    refused = _range_rejection(hparams, settings) or _type_rejection(hparams, settings, flash_attn)
    if refused is not None:
        return refused
    n_ctx = settings.n_ctx or hparams.n_ctx_train
    n_batch = min(n_ctx, settings.n_batch) if hparams.causal else settings.n_batch
    n_ubatch = min(n_batch, settings.n_ubatch or settings.n_batch)
    n_ctx, n_ctx_seq = _cells(n_ctx, settings)
    return ResolvedSettings(
        n_ctx=n_ctx,
        n_ctx_seq=n_ctx_seq,
        n_stream=1 if settings.kv_unified else settings.n_seq_max,
        n_seq_max=settings.n_seq_max,
        n_batch=n_batch,
        n_ubatch=n_ubatch,
        n_outputs_max=_n_outputs_max(hparams, settings, n_batch),
        n_rs_seq=settings.n_rs_seq if hparams.architecture.rollback else 0,
        type_k=type_id_of(settings.type_k),
        type_v=type_id_of(settings.type_v),
        flash_attn=flash_attn,
        v_trans=flash_attn == "off",
        kv_unified=settings.kv_unified,
        swa_full=settings.swa_full,
        offload_kqv=settings.offload_kqv,
        embeddings=settings.embeddings or hparams.name == "t5",
    )


def _cells(n_ctx: int, settings: Settings) -> tuple[int, int]:
    """Cells in all and of one sequence. llama.cpp's log says "rounding down" where it in fact rounds up."""
    n_ctx = round_up(n_ctx, CELL_STEP)
    if settings.kv_unified:
        return n_ctx, n_ctx
    n_ctx_seq = round_up(n_ctx // settings.n_seq_max, CELL_STEP)
    return n_ctx_seq * settings.n_seq_max, n_ctx_seq


def _n_outputs_max(hparams: HParams, settings: Settings, n_batch: int) -> int:
    if hparams.architecture.encoder or settings.n_outputs_max == 0:
        return n_batch
    return settings.n_seq_max if settings.n_outputs_max is None else settings.n_outputs_max


def _flash_attn(hparams: HParams, settings: Settings) -> FlashAttention:
    if hparams.name == "grok":
        return "off"
    if settings.flash_attn == "auto" and settings.type_v not in _UNQUANTIZED:
        return "on"
    return settings.flash_attn


def _range_rejection(hparams: HParams, settings: Settings) -> Rejection | None:
    if settings.n_batch == 0 and settings.n_ubatch == 0:
        return Rejection("no_batch", "n_batch and n_ubatch are both 0.")
    if settings.n_ctx == 0 and hparams.n_ctx_train == 0:
        return Rejection(
            "no_context", "n_ctx is 0 and the model does not say what context it was trained for."
        )
    if not 1 <= settings.n_seq_max <= MAX_SEQUENCES:
        return Rejection(
            "n_seq_max", f"n_seq_max is {settings.n_seq_max}; llama.cpp takes 1 to {MAX_SEQUENCES}."
        )
    return None


def _type_rejection(hparams: HParams, settings: Settings, flash_attn: FlashAttention) -> Rejection | None:
    one_type = hparams.is_mla or hparams.name == "deepseek4"
    if one_type and settings.type_k != settings.type_v:
        return Rejection(
            "kv_types_differ",
            f"{hparams.name} keeps keys and values in one vector, so they need one cache type"
            f" (K is {settings.type_k}, V is {settings.type_v}).",
        )
    if settings.type_v not in _UNQUANTIZED and flash_attn == "off":
        return Rejection(
            "quantized_v_without_flash_attn",
            f"A quantized V cache ({settings.type_v}) needs flash attention, which is off.",
        )
    if flash_attn == "off":
        return None
    return _block_rejection(hparams, settings.type_k, "K") or _block_rejection(hparams, settings.type_v, "V")


def _block_rejection(hparams: HParams, type_name: str, what: str) -> Rejection | None:
    block = GGML_TYPES[type_id_of(type_name)].block
    sizes = hparams.n_embd_head_k if what == "K" else hparams.n_embd_head_v
    for size in sizes[: hparams.n_layer]:
        if size % block:
            return Rejection(
                f"{what.lower()}_block",
                f"{what} cache type {type_name} stores blocks of {block} values,"
                f" which do not divide this model's head size of {size}.",
            )
    return None


def round_up(value: int, step: int) -> int:
    """`value`, rounded up to a multiple of `step`."""
    return -(-value // step) * step
