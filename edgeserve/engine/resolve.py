"""Settings with nothing left open: what a model and this machine make of an EngineConfig.

Owns the defaults that depend on the model or the machine. Knows nothing of plans (a plan arrives as a
config).
"""

from __future__ import annotations

from dataclasses import replace

from edgeserve.config import DEFAULT_N_CTX_SEQ, EngineConfig, FlashAttention
from edgeserve.errors import UsageError
from edgeserve.ggml import supports_gpu_offload
from edgeserve.host import cpu_budget
from edgeserve.llama import Model


def resolve(config: EngineConfig, model: Model) -> EngineConfig:
    """`config` with threads, context, cap and flash attention filled in; still before llama.cpp's own
    rounding."""
    n_threads = config.n_threads or cpu_budget().n_threads
    n_threads_batch = config.n_threads_batch or n_threads
    n_ctx = config.n_ctx or default_n_ctx(config, model.n_ctx_train)
    return replace(
        config,
        n_ctx=n_ctx,
        n_threads=n_threads,
        n_threads_batch=n_threads_batch,
        n_batch=min(config.n_batch, n_ctx),
        n_ubatch=min(config.n_ubatch, config.n_batch, n_ctx),
        flash_attn=_flash_attn(config),
    )


def default_n_ctx(config: EngineConfig, n_ctx_train: int) -> int:
    """The pool when none is asked for: for each sequence what it may hold, DEFAULT_N_CTX_SEQ at most."""
    per_sequence = config.n_ctx_seq or min(n_ctx_train, DEFAULT_N_CTX_SEQ)
    return per_sequence * config.n_seq_max


def _flash_attn(config: EngineConfig) -> FlashAttention:
    # On a CPU llama.cpp's flash attention has a slow path for the small batches that a steady token stream
    # needs (measured: 32-token chunks prefill at two thirds of the speed), so there auto means off until this
    # machine has been measured. A quantized V cache cannot do without.
    quantized_v = config.type_v not in ("f32", "f16", "bf16")
    if config.flash_attn != "auto" or quantized_v:
        return config.flash_attn
    on_gpu = supports_gpu_offload() and config.n_gpu_layers != 0
    return "auto" if on_gpu else "off"


def with_context_sizes(config: EngineConfig, n_ctx: int, n_ctx_seq: int) -> EngineConfig:
    """`config` with the sizes that the context really has; the per-request limit and the output cap
    follow."""
    limit = min(config.n_ctx_seq or n_ctx_seq, n_ctx_seq)
    if limit < 2:
        raise UsageError(f"A request limit of {limit} tokens leaves no room for an answer.")
    # Half of an equal share of the pool too: room is set aside for whole answers, and with unified cells a
    # few that name no cap would otherwise keep everybody else waiting.
    usual = max(1, min(limit, n_ctx // config.n_seq_max) // 2)
    return replace(config, n_ctx=n_ctx, n_ctx_seq=limit, n_predict=min(config.n_predict or usual, limit - 1))
