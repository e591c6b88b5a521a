"""What a plan is asked for: goals it may weigh, and settings that it must take as they are.

Owns the two shapes and their checks. Knows nothing of how a plan is found (`search`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from edgeserve.config import CACHE_TYPES, DEFAULT_N_CTX_SEQ, FlashAttention
from edgeserve.errors import UsageError
from edgeserve.planner.settings import MAX_SEQUENCES, Settings

Preference = Literal["balanced", "context", "speed", "quality"]
PREFERENCES: tuple[Preference, ...] = ("balanced", "context", "speed", "quality")

FLOOR_N_CTX_SEQ = DEFAULT_N_CTX_SEQ
"""No plan goes below this many tokens a sequence to keep more layers on the GPU, unless nothing else fits."""

ROOMY_N_CTX_SEQ = 8192
"""A long chat with a few pages of text. A further sequence is only worth it when each keeps this much."""

TARGET_N_CTX_SEQ = 16384
"""Where a plan stops by itself: more cells cost memory whether they are used or not."""

MOST_SEQUENCES = 4
"""Sequences that a plan gives by itself."""


@dataclass(frozen=True, slots=True)
class Goals:
    """What the plan is for.

    `min_ctx`: tokens that one sequence must be able to hold. `parallel`: sequences at once; 0 lets the plan
    choose up to `most_parallel`. `memory_bytes` and `gpu_memory_bytes` bound what may be used of host (or
    unified) memory and of each card; `margin_bytes` is left free of each in place of the usual margin.
    """

    min_ctx: int = 0
    parallel: int = 0
    most_parallel: int = MOST_SEQUENCES
    prefer: Preference = "balanced"
    memory_bytes: int | None = None
    gpu_memory_bytes: int | None = None
    margin_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.prefer not in PREFERENCES:
            raise UsageError(f"A plan cannot prefer {self.prefer}.", f"One of: {', '.join(PREFERENCES)}.")
        if self.min_ctx < 0 or not 0 <= self.parallel <= MAX_SEQUENCES:
            raise UsageError(f"min_ctx must not be negative, parallel is at most {MAX_SEQUENCES}.")
        for name in ("memory_bytes", "gpu_memory_bytes", "margin_bytes"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise UsageError(f"{name} must not be negative.")

    def sequence_counts(self) -> tuple[int, ...]:
        """Numbers of sequences worth trying, the most first."""
        if self.parallel:
            return (self.parallel,)
        return tuple(count for count in (MOST_SEQUENCES, 2, 1) if count <= max(1, self.most_parallel))


@dataclass(frozen=True, slots=True)
class FixedSettings:
    """Settings that the user gave, in llama.cpp's own words; None where the plan may choose.

    They win over every goal, whether they fit or not.
    """

    n_ctx: int | None = None
    n_seq_max: int | None = None
    n_batch: int | None = None
    n_ubatch: int | None = None
    n_outputs_max: int | None = None
    type_k: str | None = None
    type_v: str | None = None
    flash_attn: FlashAttention | None = None
    kv_unified: bool | None = None
    swa_full: bool | None = None
    offload_kqv: bool | None = None
    n_gpu_layers: int | None = None
    n_cpu_moe: int | None = None
    tensor_split: tuple[float, ...] | None = None
    use_mmap: bool | None = None
    use_extra_bufts: bool | None = None

    def __post_init__(self) -> None:
        for cache_type in (self.type_k, self.type_v):
            if cache_type is not None and cache_type not in CACHE_TYPES:
                raise UsageError(f"Unknown cache type {cache_type}.", f"One of: {', '.join(CACHE_TYPES)}.")
        for name in ("n_ctx", "n_seq_max", "n_batch", "n_ubatch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} must be at least 1.")

    def given(self) -> dict[str, Any]:
        """Name and value of what was given."""
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: value for name, value in values if value is not None}

    def apply(self, settings: Settings) -> Settings:
        """`settings` with everything that was given in place of what was chosen."""
        return replace(settings, **self.given())

    def without(self, *names: str) -> FixedSettings:
        """The same, with these left to the plan again."""
        cleared: dict[str, Any] = dict.fromkeys(names)
        return replace(self, **cleared)
