"""How large the scratch buffers of a graph are, without asking llama.cpp: an estimate with its interval.

Owns a closed form for what only the library knows exactly: the peak of its graph allocator. The largest of a
few moments decides (logits, feed-forward, experts, attention, indexer, recurrent scan), each in bytes for a
batch of n_ubatch tokens. Knows nothing of weights or caches; a dry run (`measure`) replaces it wherever it
can run.

The shape of each moment follows the graph builders (llama-graph.cpp, src/models); the spread of each was
taken from llama.cpp's own figures for 984 contexts of 100 models on a CPU, and is checked against them in the
tests.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from edgeserve.gguf_header import GGUFHeader
from edgeserve.planner.architectures import Memory
from edgeserve.planner.hparams import HParams
from edgeserve.planner.kv_families import window_cells
from edgeserve.planner.placement import Placement, Weights
from edgeserve.planner.settings import ResolvedSettings

_F32, _F16 = 4, 2
_OFFLOAD_BATCH = 32
# Small inputs and gaps between tensors that no moment counts; they matter in models of a few million weights.
_SLACK_BYTES = 512 << 10


@dataclass(frozen=True, slots=True)
class Interval:
    """Bytes: the likely figure, and bounds that it rarely leaves."""

    low: int
    likely: int
    high: int

    def plus(self, n_bytes: int) -> Interval:
        return Interval(self.low + n_bytes, self.likely + n_bytes, self.high + n_bytes)


@dataclass(frozen=True, slots=True)
class _Spread:
    """Real bytes over the closed form: 2nd percentile, median, 98th percentile of the moment that decides."""

    low: float
    likely: float
    high: float


# One line a moment, measured over the contexts in which it is the largest.
_SPREADS = {
    "logits": _Spread(0.98, 1.03, 1.19),
    "attention": _Spread(0.95, 1.04, 1.28),
    "feed_forward": _Spread(0.85, 1.11, 1.45),
    "experts": _Spread(0.62, 1.13, 1.45),
    "state": _Spread(0.67, 1.18, 1.95),
    "indexer": _Spread(1.80, 2.50, 5.70),
    "compressed": _Spread(1.70, 2.35, 3.00),
}


def estimate_compute(
    header: GGUFHeader,
    hparams: HParams,
    settings: ResolvedSettings,
    placement: Placement,
    weights: Weights,
    op_offload: bool = True,
) -> tuple[Interval, tuple[Interval, ...]]:
    """Scratch bytes on the host and on each device."""
    graph = _Graph(header, hparams, settings)
    if not placement.devices:
        return graph.peak(), ()
    # Where "auto" meets a partial offload, llama.cpp may drop flash attention for the whole context.
    partial = 0 < placement.num_gpu_layers < len(placement.layer_device) or not settings.offload_kqv
    unsure = partial and settings.flash_attn == "auto" and hparams.architecture.memory is Memory.HYBRID
    without = _Graph(header, hparams, replace(settings, flash_attn="off")) if unsure else graph
    devices = tuple(
        _device_peak(graph, without, placement, index, weights, op_offload and index == 0)
        for index in range(len(placement.devices))
    )
    attends = -1 in placement.layer_device or not settings.offload_kqv
    return _host_peak(graph, without, attends), devices


def _device_peak(
    graph: _Graph, without: _Graph, placement: Placement, index: int, weights: Weights, op_offload: bool
) -> Interval:
    has_output = placement.layer_device[-1] == index
    has_layers = index in placement.layer_device
    peak = graph.peak(with_logits=has_output) if has_layers else Interval(0, 0, 0)
    high = max(peak.high, without.peak(with_logits=has_output).high) if has_layers else 0
    copied = graph.largest_host_weight(weights) if op_offload and graph.n_tokens >= _OFFLOAD_BATCH else 0
    if copied and not has_layers:
        return Interval(0, copied + graph.peak().likely, 2 * copied + graph.peak().high)
    return Interval(peak.low, peak.likely + copied, high + 2 * copied)


def _host_peak(graph: _Graph, without: _Graph, has_work: bool) -> Interval:
    """The host keeps the graph's inputs, and the scratch of the layers or caches that stay with it."""
    inputs = round(graph.inputs + graph.masks)
    if not has_work:
        return Interval(inputs // 3, inputs, 2 * inputs + _F32 * graph.n_tokens * graph.width)
    return Interval(inputs // 3, 2 * inputs, max(graph.peak().high, without.peak().high, 3 * inputs))


class _Graph:
    """The moments of one context's largest graph, in bytes."""

    def __init__(self, header: GGUFHeader, hparams: HParams, settings: ResolvedSettings) -> None:
        self.header, self.hparams, self.settings = header, hparams, settings
        self.n_tokens = min(settings.n_ctx, settings.n_ubatch)
        self.width = hparams.n_embd
        if hparams.architecture.memory is Memory.DSV4:
            self.width *= self._key("hyper_connection.count", 1)
        self.n_head = max(hparams.n_head)
        self.flash_attn = settings.flash_attn != "off"
        self.full_cells, self.window_cells = self._cells()
        self.inputs = _F32 * hparams.n_embd * self.n_tokens
        mask_bytes = _F16 if self.flash_attn else _F32
        self.masks = mask_bytes * self.n_tokens * (self.full_cells + self.window_cells)

    def peak(self, with_logits: bool = True) -> Interval:
        """Inputs, and on top of them the largest moment with its own spread."""
        moments = self._moments()
        if not with_logits:
            moments.pop("logits")
        name = max(moments, key=lambda moment: moments[moment])
        spread = _SPREADS["compressed" if self.hparams.architecture.memory is Memory.DSV4 else name]
        total = self.inputs + moments[name]
        low, likely, high = (round(total * factor) for factor in (spread.low, spread.likely, spread.high))
        return Interval(max(low - _SLACK_BYTES, 0), likely, high + _SLACK_BYTES)

    def largest_host_weight(self, weights: Weights) -> int:
        """Matrices of host layers that a device copies over to multiply large batches itself."""
        sizes = [t.n_bytes for t in weights.host_tensors if "blk." in t.name and t.ne[1] > 1]
        return max(sizes, default=0)

    def _moments(self) -> dict[str, float]:
        hparams, tokens = self.hparams, self.n_tokens
        moments = {"logits": self._logits(), "feed_forward": self._feed_forward()}
        if self._key("expert_used_count"):
            moments["experts"] = self._experts()
        if self._attends():
            moments["attention"] = self._attention()
        if self._has_indexer():
            moments["indexer"] = 2.0 * _F32 * tokens * self._longest() + self._attention()
        if hparams.n_embd_s or hparams.n_embd_r:
            moments["state"] = self._state()
        return moments

    def _logits(self) -> float:
        rows = min(self.n_tokens, self.settings.n_outputs_max)
        if not self._has_output():
            return _F32 * self.n_tokens * self.hparams.n_embd
        copies = 2 if self.hparams.name == "chameleon" else 1  # image tokens are masked out in a copy
        return copies * _F32 * rows * (self.hparams.n_vocab + self.hparams.n_embd)

    def _feed_forward(self) -> float:
        n_ff = max(self.hparams.n_ff)
        gated = any(
            ".ffn_gate" in tensor.name or (".ffn_up." in tensor.name and tensor.ne[1] == 2 * n_ff)
            for tensor in self.header.tensors
        )
        return self.masks + _F32 * self.n_tokens * ((2 if gated else 1) * n_ff + 2 * self.width)

    def _experts(self) -> float:
        used = self._key("expert_used_count")
        n_ff = self._key("expert_feed_forward_length") or max(self.hparams.n_ff)
        return self.masks + _F32 * self.n_tokens * (used * (self.width + 2 * n_ff) + self.width)

    def _attention(self) -> float:
        head_k, head_v = max(self.hparams.n_embd_head_k), max(self.hparams.n_embd_head_v)
        per_token = self.n_head * (head_k + head_v) + 2 * self.width
        if self.hparams.is_mla:
            per_token = 2 * self.n_head * (head_k + self._key("attention.kv_lora_rank"))
        scores = 0 if self.flash_attn else self._longest() * self.n_head
        return self.masks + _F32 * self.n_tokens * (per_token + scores)

    def _state(self) -> float:
        hparams = self.hparams
        inner = self._key("ssm.inner_size") or hparams.n_embd
        rows = self.settings.n_seq_max * (hparams.n_embd_s + hparams.n_embd_r)
        # These two hold a matrix of decays between all tokens of a sequence.
        decays = self.n_tokens**2 * self.n_head if hparams.name in ("minimax-01", "kimi-linear") else 0
        return self.masks + _F32 * (self.n_tokens * (4 * inner + hparams.n_embd_r // 3) + rows + decays)

    # --- what there is

    def _cells(self) -> tuple[int, int]:
        """Longest cache of the full layers and of the windowed layers, 0 where there are none."""
        hparams = self.hparams
        if not self._attends():
            return 0, 0
        if hparams.architecture.memory is Memory.NONE or hparams.name == "llama-embed":
            return self.n_tokens, self.n_tokens if hparams.has_window else 0
        layers = [il for il in range(hparams.n_layer) if self._attends_in(il)]
        full = self.settings.n_ctx_seq if any(not hparams.is_swa[il] for il in layers) else 0
        window = window_cells(hparams, self.settings, self.settings.kv_unified)
        return full, window if any(hparams.is_swa[il] for il in layers) else 0

    def _longest(self) -> int:
        return max(self.full_cells, self.window_cells)

    def _attends(self) -> bool:
        recurrent = self.hparams.architecture.memory is Memory.RECURRENT
        return not recurrent and any(self._attends_in(il) for il in range(self.hparams.n_layer))

    def _attends_in(self, il: int) -> bool:
        hparams = self.hparams
        return hparams.n_head[il] > 0 and (not hparams.is_recr[il] or hparams.name == "falcon-h1")

    def _has_indexer(self) -> bool:
        hparams = self.hparams
        memory = hparams.architecture.memory
        return memory in (Memory.DSA, Memory.MSA, Memory.DSV4) or hparams.name in ("glm5-next", "qwen4exp")

    def _has_output(self) -> bool:
        arch = self.hparams.architecture
        return (
            arch.tied_copy
            or self.hparams.name == "bitnet"
            or any(tensor.name == "output.weight" for tensor in self.header.tensors)
        )

    def _key(self, key: str, default: int = 0) -> int:
        value = self.header.arch_get(key)
        if isinstance(value, tuple):
            return int(max(value, default=default))
        return int(value) if isinstance(value, int | float) else default
