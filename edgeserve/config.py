"""How the engine and the server are set up: frozen, validated, in llama.cpp's own words.

The one place for defaults; command line, docs and server read them from here. Nothing is read from the
environment or from files at import.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from edgeserve.errors import UsageError

FlashAttention = Literal["on", "off", "auto"]

CACHE_TYPE_IDS = {
    "f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "iq4_nl": 20, "bf16": 30,
}  # fmt: skip
"""The cache types that llama.cpp accepts, with their ggml_type numbers (ggml.h)."""

CACHE_TYPES = tuple(CACHE_TYPE_IDS)

DEFAULT_N_CTX_SEQ = 4096
"""Tokens per sequence where neither the user nor a plan says more; less when the model was trained for
less."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One model on one context.

    `n_ctx` is the pool: KV cells in all. `n_ctx_seq` is the most that one request may hold, prompt and answer
    together; 0 takes what the cell layout gives (the pool when cells are unified, an equal share when split).
    `n_threads` 0 takes the CPU budget. `n_predict` is the cap on output tokens of a request that names none;
    0 takes a half of `n_ctx_seq`, or of an equal share of the pool where that is less.
    """

    model_path: str
    n_ctx: int = 0
    n_ctx_seq: int = 0
    n_seq_max: int = 4
    n_batch: int = 2048
    n_ubatch: int = 512
    n_gpu_layers: int = -1
    n_cpu_moe: int = 0
    """The first so many layers keep their experts on the CPU."""
    override_tensor: tuple[tuple[str, str], ...] = ()
    """(regular expression of tensor names, buffer type), first match wins; only "CPU" is possible."""
    tensor_split: tuple[float, ...] = ()
    devices: tuple[str, ...] = ()
    n_threads: int = 0
    n_threads_batch: int = 0
    flash_attn: FlashAttention = "auto"
    type_k: str = "f16"
    type_v: str = "f16"
    kv_unified: bool = False
    swa_full: bool = True
    offload_kqv: bool = True
    use_mmap: bool = True
    use_mlock: bool = False
    use_extra_bufts: bool = True
    n_predict: int = 0
    itl_target_ms: float = 0.0
    """The longest gap between two tokens of a stream that steps are planned for; 0 derives it from the
    machine."""
    spec_type: Literal["none", "ngram-simple"] = "none"
    """Where drafts of coming tokens are taken from, to be verified several at once: nowhere, or from earlier
    places of the same text."""
    n_draft_max: int = 16
    """Most drafted tokens in a step, all sequences together."""
    step_samples: tuple[tuple[int, int, float], ...] = ()
    """Steps measured before: decodes, prompt tokens, seconds; the first guesses of what steps cost."""
    prefill_chunk: int = 0
    """Prompt tokens in every step, for experiments; 0 lets the gap target decide."""
    cache_ram_mib: int = 0
    """Host memory for prefixes that lost their slot; 0 keeps none."""
    cache_disk: str = ""
    """A directory for prefixes that outlive the process; "" keeps none."""
    cache_disk_mib: int = 4096
    checkpoint_mib: int = 256
    """Host memory for checkpoints of state, where a model needs them to reuse prefixes; 0 makes none."""
    max_waiting: int = 64
    max_waiting_tokens: int = 0
    """Prompt tokens that may wait in all; 0 leaves it to `max_waiting`."""
    max_queue_s: float = 600.0

    def __post_init__(self) -> None:
        for name in ("cache_ram_mib", "cache_disk_mib", "checkpoint_mib"):
            if getattr(self, name) < 0:
                raise UsageError(f"{name} must not be negative.")
        for name in ("n_ctx", "n_ctx_seq", "n_threads", "n_threads_batch", "n_predict"):
            if getattr(self, name) < 0:
                raise UsageError(f"{name} must not be negative.")
        for name in ("max_waiting", "max_waiting_tokens", "max_queue_s"):
            if getattr(self, name) < 0:
                raise UsageError(f"{name} must not be negative.")
        for name in ("n_seq_max", "n_batch", "n_ubatch", "n_draft_max"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1.")
        if self.n_batch < self.n_seq_max:
            raise UsageError(
                f"A step of {self.n_batch} tokens cannot hold one for each of {self.n_seq_max} sequences.",
                "Use a larger -b or a smaller -np.",
            )
        if not 0 <= self.itl_target_ms < 1e6:
            raise UsageError("itl_target_ms must be between 0 and 1000000.")
        if self.n_seq_max > 256:
            raise UsageError(f"n_seq_max {self.n_seq_max} is more than llama.cpp's 256 sequences.")
        for cache_type in (self.type_k, self.type_v):
            if cache_type not in CACHE_TYPES:
                raise UsageError(f"Unknown cache type {cache_type}.", f"One of: {', '.join(CACHE_TYPES)}.")
        if self.n_draft_max > 256:
            raise UsageError(f"n_draft_max {self.n_draft_max} is more than 256 tokens.")
        if self.type_v not in ("f32", "f16", "bf16") and self.flash_attn == "off":
            raise UsageError(
                f"A quantized V cache ({self.type_v}) needs flash attention.", "Use -fa on, or -ctv f16."
            )

    @property
    def num_draft_rows(self) -> int:
        """Rows of logits that a step may have beyond one a sequence."""
        return 0 if self.spec_type == "none" else self.n_draft_max


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Where and to whom the server answers."""

    host: str = "127.0.0.1"
    port: int = 8080
    api_keys: tuple[str, ...] = ()
    model_alias: str = ""
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    chat_template: str = ""
    """Jinja source used in place of the model's own template."""
    reasoning_format: Literal["deepseek", "none"] = "deepseek"
    max_body_bytes: int = 16 << 20
    sse_ping_s: float = 5.0
    drain_timeout_s: float = 30.0
    sleep_idle_s: float = 0.0
    """Seconds without a request after which the model is freed until the next one; 0 keeps it."""
    request_defaults: dict[str, float | int] = field(default_factory=dict)
    """Sampling defaults of this server, by SamplingParams field."""
