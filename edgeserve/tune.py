"""Measure which settings are fastest for a model on this machine: flash attention, thread counts.

Owns the measurements, the choice and its reasons. The choice is for one user's ordinary request beside
others: a prompt of a thousand tokens computed in the small chunks that keep other streams fluent, and two
hundred tokens of answer behind it. Cell layouts and chunk sizes need no choosing here: the engine learns
chunk costs as it runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from statistics import median

from edgeserve.config import EngineConfig, FlashAttention
from edgeserve.engine.resolve import resolve
from edgeserve.engine.tuning import Tuning
from edgeserve.llama import Model
from edgeserve.llama_context import Batch, Context

PROMPT_TOKENS, ANSWER_TOKENS = 1000, 200
"""The request that settings are chosen for."""

SMALL_CHUNK, LARGE_CHUNK = 32, 256
DEPTH = 768
_STEPS = 12
_N_CTX = 1280


@dataclass(frozen=True, slots=True)
class Measurement:
    """One setting's speeds on this machine. Decode in ms per token, prompts in tokens per second."""

    flash_attn: FlashAttention
    n_threads: int
    decode_ms: float
    decode_deep_ms: float
    prefill_small_tok_s: float
    prefill_large_tok_s: float

    @property
    def request_s(self) -> float:
        """Expected seconds of the request that settings are chosen for."""
        return PROMPT_TOKENS / self.prefill_small_tok_s + ANSWER_TOKENS * self.decode_deep_ms / 1e3

    def row(self) -> dict[str, object]:
        return {**asdict(self), "request_s": self.request_s}


@dataclass(frozen=True, slots=True)
class TuneResult:
    tuning: Tuning
    reason: str
    measurements: tuple[Measurement, ...]


def tune(
    model: Model, config: EngineConfig, on_progress: Callable[[str], None] = lambda text: None
) -> TuneResult:
    """Measure and choose. A setting that cannot be had (flash attention off with a quantized V cache) is left
    out."""
    base = resolve(config, model)
    measured: list[Measurement] = []
    for flash_attn, n_threads in _candidates(base):
        on_progress(f"flash attention {flash_attn}, {n_threads} threads")
        measured.append(measure(model, base, flash_attn, n_threads))
    best = min(measured, key=lambda item: item.request_s)
    alike = [item for item in measured if item.flash_attn == best.flash_attn]
    fastest_prompt = max(alike, key=lambda item: item.prefill_small_tok_s)
    tuning = Tuning(best.flash_attn, best.n_threads, fastest_prompt.n_threads)
    return TuneResult(tuning, _reason(best, measured), tuple(measured))


def _candidates(config: EngineConfig) -> Iterator[tuple[FlashAttention, int]]:
    quantized_v = config.type_v not in ("f32", "f16", "bf16")
    fewer = config.n_threads // 2
    kinds: tuple[FlashAttention, ...] = ("on",) if quantized_v else ("off", "on")
    for flash_attn in kinds:
        yield flash_attn, config.n_threads
        if fewer:
            yield flash_attn, fewer


def _reason(best: Measurement, measured: list[Measurement]) -> str:
    others = [item for item in measured if item.flash_attn != best.flash_attn]
    chosen = f"flash attention {best.flash_attn} with {best.n_threads} threads"
    request = f"{PROMPT_TOKENS:,} prompt tokens in small steps and {ANSWER_TOKENS} tokens of answer"
    if not others:
        return f"{chosen}: {request} take {best.request_s:.1f} s."
    rival = min(others, key=lambda item: item.request_s)
    return f"{chosen}: {request} take {best.request_s:.1f} s, against {rival.request_s:.1f} s the other way."


def measure(model: Model, base: EngineConfig, flash_attn: FlashAttention, n_threads: int) -> Measurement:
    """The speeds of one setting, each the median of a few steps on a context of its own."""
    config = EngineConfig(
        base.model_path,
        n_ctx=_N_CTX,
        n_seq_max=1,
        n_batch=LARGE_CHUNK,
        n_ubatch=LARGE_CHUNK,
        n_threads=n_threads,
        n_threads_batch=n_threads,
        flash_attn=flash_attn,
        type_k=base.type_k,
        type_v=base.type_v,
        offload_kqv=base.offload_kqv,
    )
    context = Context(model, config)
    try:
        return _measure(_Probe(context), flash_attn, n_threads)
    finally:
        context.close()


def _measure(probe: _Probe, flash_attn: FlashAttention, n_threads: int) -> Measurement:
    probe.step(LARGE_CHUNK)  # the first touches memory for the first time
    probe.clear()
    small_s = median(probe.step(SMALL_CHUNK) for _ in range(4))
    decode_s = median(probe.step(1) for _ in range(_STEPS))
    large_s = median(probe.step(LARGE_CHUNK) for _ in range(2))
    while probe.depth < DEPTH - SMALL_CHUNK:
        probe.step(SMALL_CHUNK)
    deep_s = median(probe.step(1) for _ in range(_STEPS))
    return Measurement(
        flash_attn,
        n_threads,
        decode_ms=decode_s * 1e3,
        decode_deep_ms=deep_s * 1e3,
        prefill_small_tok_s=SMALL_CHUNK / small_s,
        prefill_large_tok_s=LARGE_CHUNK / large_s,
    )


class _Probe:
    """One sequence that grows by steps, each timed."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._batch = Batch(LARGE_CHUNK)
        self.depth = 0

    def step(self, num_tokens: int) -> float:
        """Seconds of a step of so many tokens."""
        n_vocab = self._context.model.n_vocab
        # Spread over the vocabulary: a mixture of experts should not always take the same ones.
        tokens = [(self.depth + index) * 7919 % n_vocab for index in range(num_tokens)]
        self._batch.clear()
        row = self._batch.add(tokens, self.depth, 0, last_logits=True)
        start = time.perf_counter()
        code = self._context.decode(self._batch)
        self._context.logits(row)
        duration = time.perf_counter() - start
        assert code == 0, "the context holds all steps of a measurement"
        self.depth += num_tokens
        return duration

    def clear(self) -> None:
        self._context.clear()
        self.depth = 0
