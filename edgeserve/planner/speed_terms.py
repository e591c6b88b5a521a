"""What a step costs: the sum of a few terms, each the time that one resource would take at its peak.

Owns the equations and the names of the factors by which real machines miss the peak. The factors' values are
learned elsewhere (benchmarks/fit_speed.py); this file knows none of them, no clock and no runtime.

Sources: weights are read once a step and 2 FLOPs are done per parameter and token (the roofline argument of
Williams, Waterman and Patterson, 2009); attention does 4 * n_head * head_dim FLOPs per pair of tokens (scores
and weighted values, a multiply-add counted as 2); with experts a step of B tokens touches
1 - (1 - active share)^B of the weights when tokens choose experts independently.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from edgeserve.planner.device import DeviceProfile

StepKind = Literal["decode", "prefill"]

# The cost that dominates, and so the one that classes of devices and kernels can be told apart by.
MAIN_TERM: dict[StepKind, str] = {"decode": "weights", "prefill": "matmul"}

# Matrix kernels read weights again for every tile of this many prompt tokens.
_TILE_TOKENS = 128
# Generations without a published figure: the last published one per graphics core (M4).
_APPLE_TFLOPS_PER_CORE = 0.426
# Unit in which a processor core's compute is counted; the fitted factor says what a core really does.
_CORE_TFLOPS = 0.05
# A host that nobody described: dual-channel DDR4-3200.
_ASSUMED_HOST_GB_S = 51.2
_ASSUMED_CORES = 4


@dataclass(frozen=True, slots=True)
class ModelWork:
    """What one model asks of a machine, per token.

    `weight_bytes`: all weights that steps read (token embeddings are looked up, not read, unless they are
    also the output matrix). `active_weight_bytes` and `active_params`: those one token uses, fewer only with
    experts; `active_params` without embeddings and output matrix, whose `output_params` count only where
    logits are asked for. `kv_bytes_per_token`: cache bytes of one resident token in layers that see all of
    them, `window_…` in layers that see `n_swa` only. `pair_flops`: attention FLOPs for one new and one
    resident token. `state_bytes`: recurrent state of a sequence, read and written each step.
    """

    n_layer: int
    weight_bytes: float
    active_weight_bytes: float
    active_params: float
    quant_class: str
    output_params: float = 0.0
    kv_bytes_per_token: float = 0.0
    pair_flops: float = 0.0
    window_kv_bytes_per_token: float = 0.0
    window_pair_flops: float = 0.0
    n_swa: int = 0
    state_bytes: float = 0.0

    @property
    def has_experts(self) -> bool:
        return self.active_weight_bytes < self.weight_bytes

    def share(self, fraction: float) -> ModelWork:
        """The part of the work that `fraction` of the layers does."""
        return replace(
            self,
            n_layer=max(1, round(self.n_layer * fraction)),
            weight_bytes=self.weight_bytes * fraction,
            active_weight_bytes=self.active_weight_bytes * fraction,
            active_params=self.active_params * fraction,
            output_params=self.output_params * fraction,
            kv_bytes_per_token=self.kv_bytes_per_token * fraction,
            pair_flops=self.pair_flops * fraction,
            window_kv_bytes_per_token=self.window_kv_bytes_per_token * fraction,
            window_pair_flops=self.window_pair_flops * fraction,
            state_bytes=self.state_bytes * fraction,
        )

    def weights_read_bytes(self, num_tokens: float) -> float:
        """Bytes of weights that a step of `num_tokens` tokens reads once."""
        if not self.has_experts:
            return self.weight_bytes
        untouched = math.pow(1.0 - self.active_weight_bytes / self.weight_bytes, num_tokens)
        return self.weight_bytes * (1.0 - untouched)

    def context_bytes(self, num_resident: float) -> float:
        """Cache and state bytes that one decoded token moves with `num_resident` tokens before it."""
        window = self.window_kv_bytes_per_token * min(num_resident, self.n_swa)
        return self.kv_bytes_per_token * num_resident + window + 2.0 * self.state_bytes

    def attention_flops(self, n_prompt: float, num_resident: float) -> float:
        """Causal attention of `n_prompt` tokens: n(n+1)/2 pairs, and n for each resident token before."""
        pairs = n_prompt * (n_prompt + 1.0) / 2.0 + n_prompt * num_resident
        window_pairs = min(pairs, n_prompt * self.n_swa)
        return self.pair_flops * pairs + self.window_pair_flops * window_pairs


@dataclass(frozen=True, slots=True)
class SpeedDevice:
    """The side of a device that decides speed: peaks (None: not known) and the classes that have factors.

    `workstation`: a card with a lower power limit than its gaming twin. `assumed`: the bandwidth is a guess.
    """

    backend: str
    architecture: str
    bandwidth_gb_s: float | None
    tflops: float | None
    workstation: bool = False
    assumed: bool = False


@dataclass(frozen=True, slots=True)
class SpeedSettings:
    """What is asked: `num_sequences` that each hold `num_resident` tokens, a prompt of `n_prompt` tokens."""

    n_prompt: int = 512
    num_resident: int = 0
    num_sequences: int = 1
    n_ubatch: int = 512
    flash_attn: bool = True


@dataclass(frozen=True, slots=True)
class Term:
    """One cost: seconds at peak, and the names of the factors that multiply it, the general one first."""

    name: str
    peak_s: float
    factors: tuple[str, ...]


def speed_device(profile: DeviceProfile, backend: str, n_threads: int | None = None) -> SpeedDevice:
    """The device as `backend` uses it. On "cpu" compute is counted in cores: `n_threads`, or the profile's.

    A card's profile says nothing about its host: on "cpu" it gives a host whose bandwidth is assumed.
    """
    if backend == "cpu":
        return _processor(profile, n_threads)
    cores = profile.gpu_cores if profile.vendor == "Apple" else None
    estimate = cores * _APPLE_TFLOPS_PER_CORE if cores else None
    return SpeedDevice(
        backend,
        profile.architecture,
        profile.bandwidth_gb_s,
        profile.fp32_tflops or estimate,
        workstation=profile.kind == "workstation-card",
    )


def _processor(profile: DeviceProfile, n_threads: int | None) -> SpeedDevice:
    fast = profile.performance_cores
    cores = min(n_threads, fast or n_threads) if n_threads else (fast or _ASSUMED_CORES)
    small = profile.kind in ("board", "phone") or fast is None
    known = profile.memory_type == "unified" and profile.bandwidth_gb_s is not None
    bandwidth = profile.bandwidth_gb_s if known else _ASSUMED_HOST_GB_S
    return SpeedDevice("cpu", "small" if small else "big", bandwidth, cores * _CORE_TFLOPS, assumed=not known)


def quant_class(quant: str) -> str:
    """Kernels come in families: "f16", "k" (Q4_K_M, ...), "iq" and "q" (Q4_0, Q8_0, MXFP4, ...)."""
    name = quant.upper()
    if name.startswith("IQ"):
        return "iq"
    if name.startswith(("F16", "BF16", "F32")):
        return "f16"
    return "k" if "_K" in name else "q"


def terms(
    kind: StepKind, work: ModelWork, device: SpeedDevice, settings: SpeedSettings, *, old_build: bool = False
) -> tuple[Term, ...] | None:
    """The costs of one decode step (`num_sequences` tokens) or of a whole prompt; None without the peaks.

    Decode needs the bandwidth, prefill compute as well. `old_build` marks measurements with kernels of 2024.
    """
    if device.bandwidth_gb_s is None or (kind == "prefill" and device.tflops is None):
        return None
    bandwidth, flops = device.bandwidth_gb_s * 1e9, (device.tflops or math.inf) * 1e12
    if kind == "prefill":
        peaks = _prefill_costs(work, settings, bandwidth, flops)
    else:
        peaks = _decode_costs(work, settings, bandwidth, flops)
        if device.backend == "cpu":
            # An accelerator's scores hide behind the cache reads; a processor's do not.
            pairs = work.attention_flops(1, settings.num_resident)
            peaks["attention"] = settings.num_sequences * pairs / flops
    classes = _Classes(kind, work, device, settings, old_build)
    return tuple(Term(name, seconds, classes.factors(name)) for name, seconds in peaks.items() if seconds > 0)


def _decode_costs(
    work: ModelWork, settings: SpeedSettings, bandwidth: float, flops: float
) -> dict[str, float]:
    num = settings.num_sequences
    return {
        "weights": work.weights_read_bytes(num) / bandwidth,
        "kv": num * work.context_bytes(settings.num_resident) / bandwidth,
        # The first token's arithmetic hides behind its weight reads.
        "batch": (num - 1) * 2.0 * (work.active_params + work.output_params) / flops,
        "fixed": work.n_layer * 1e-6,
    }


def _prefill_costs(
    work: ModelWork, settings: SpeedSettings, bandwidth: float, flops: float
) -> dict[str, float]:
    n = settings.n_prompt
    steps = -(-n // settings.n_ubatch)
    read = work.weights_read_bytes(min(n, settings.n_ubatch))
    return {
        "matmul": 2.0 * (work.active_params * n + work.output_params) / flops,
        "tiles": work.active_weight_bytes * n / _TILE_TOKENS / bandwidth,
        "attention": work.attention_flops(n, settings.num_resident) / flops,
        "weights": steps * read / bandwidth,
        "fixed": steps * work.n_layer * 1e-6,
    }


@dataclass(frozen=True, slots=True)
class _Classes:
    kind: StepKind
    work: ModelWork
    device: SpeedDevice
    settings: SpeedSettings
    old_build: bool

    def factors(self, term: str) -> tuple[str, ...]:
        return tuple(self._names(term))

    def _names(self, term: str) -> Iterator[str]:
        if self.device.backend == "cpu" and self.kind == "decode" and term in ("batch", "attention"):
            # A processor does these with the kernels, and at the rate, of prompts.
            yield from replace(self, kind="prefill").factors("matmul" if term == "batch" else term)
            return
        base = f"{self.device.backend}.{self.kind}.{term}"
        yield base
        main = term == MAIN_TERM[self.kind]
        if main or (self.kind == "decode" and term == "fixed"):
            yield f"{base}.arch={self.device.architecture}"
        if main and self.work.quant_class != "q":
            yield f"{base}.quant={self.work.quant_class}"
            if self.old_build:
                yield f"{base}.quant={self.work.quant_class}.old_build"
        if main and self.work.has_experts:
            # Few devices were measured with experts: the backends learn this one together.
            yield f"any.{self.kind}.{term}.experts"
        if main and self.device.workstation:
            yield f"{base}.workstation"
        if term in ("matmul", "attention", "kv") and self.settings.flash_attn:
            yield f"{base}.flash_attn"
        if self.old_build and term in ("matmul", "attention", "fixed", "kv"):
            yield f"{base}.old_build"
