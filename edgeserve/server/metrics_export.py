"""Prometheus metrics of what requests met: counters by outcome and histograms by prefix cache state.

Owns names, units, buckets and labels. Base units, `_total` for counters, few label values. Every histogram of
a request carries `cache`: a warm prefix and a cold prompt are never averaged together. The engine's own
counters are in engine_collector.py; definitions are metrics.py's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import generate_latest

from edgeserve.engine.request import EngineStats, RequestTimings
from edgeserve.metrics import cache_state
from edgeserve.server.engine_collector import EngineCollector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_WAIT_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 20, 40, 80, 160, 640)
_PART_BUCKETS = (0.001, 0.003, *_WAIT_BUCKETS)
_TOKEN_BUCKETS = (
    0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5,
)  # fmt: skip
_DURATION_BUCKETS = (0.25, 0.5, 1, 2, 5, 10, 20, 40, 80, 160, 320, 640)
_COUNT_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)

OUTCOMES = ("ok", "length", "cancelled", "rejected", "timeout", "error")


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the info metrics say of what runs. `device` names the backend, `load_s` how long loading took."""

    model: str
    arch: str
    version: str
    runtime: str
    quant: str = ""
    n_ctx: int = 0
    device: str = ""
    commit: str = ""
    load_s: float = 0.0


class Metrics:
    """One server's registry. Updated from the event loop only."""

    def __init__(self, stats: Callable[[], EngineStats | None]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(stats))
        # CPU time and memory of this process, where the system tells them (Linux).
        ProcessCollector(registry=self.registry)
        self.requests = Counter(
            "edgeserve_requests", "Requests by outcome", ["endpoint", "outcome"], registry=self.registry
        )
        self.cancelled_in_queue = Counter(
            "edgeserve_requests_cancelled_in_queue",
            "Of the cancelled requests, those that no step was spent on",
            registry=self.registry,
        )
        self.ttft = self._seconds("time_to_first_token", "HTTP arrival to first token", _WAIT_BUCKETS)
        self.front_end = self._part("front_end", "HTTP arrival to the queue")
        self.queue = self._part("queue", "Queue to the first step, without restoring")
        self.restore = self._part("cache_restore", "Copying or loading cached state")
        self.prefill = self._part("prefill", "First step to first token")
        self.decode = self._part("decode", "First token to last token")
        self.own_decode = self._part("own_decode", "Of the decode, without the stalls")
        self.stalled = self._part("stalled", "Of the decode, waiting for prompts of others")
        self.delivery = self._part("delivery", "Last token to the front end")
        self.e2e = self._seconds("request_e2e", "HTTP arrival to last token delivered", _DURATION_BUCKETS)
        self.duration = self._seconds("request_duration", "HTTP arrival to the end", _DURATION_BUCKETS)
        self.itl = self._seconds("inter_token_latency", "Time between two tokens", _TOKEN_BUCKETS)
        self.tpot = self._seconds("time_per_output_token", "Mean gap of one request", _TOKEN_BUCKETS)
        self.prompt_tokens = self._counts("request_prompt_tokens", "Prompt tokens of a request")
        self.cached_tokens = self._counts("request_cached_tokens", "Of these, found in the prefix cache")
        self.generation_tokens = self._counts("request_generation_tokens", "Output tokens of a request")

    def _seconds(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        full_name = f"edgeserve_{name}_seconds"
        return Histogram(full_name, text, ["cache"], buckets=buckets, registry=self.registry)

    def _part(self, name: str, text: str) -> Histogram:
        return self._seconds(f"request_{name}", text, _PART_BUCKETS)

    def _counts(self, name: str, text: str) -> Histogram:
        return Histogram(f"edgeserve_{name}", text, ["cache"], buckets=_COUNT_BUCKETS, registry=self.registry)

    def describe(self, info: ModelInfo) -> None:
        """Called once, when the model is there."""
        build = {"version": info.version, "llama_cpp_python": info.runtime, "ggml_commit": info.commit}
        model = {
            "model": info.model,
            "arch": info.arch,
            "quant": info.quant,
            "n_ctx": str(info.n_ctx),
            "device": info.device,
        }
        for name, text, labels in (
            ("build_info", "Versions", build),
            ("model_info", "The loaded model", model),
        ):
            Gauge(f"edgeserve_{name}", text, list(labels), registry=self.registry).labels(**labels).set(1)
        Gauge(
            "edgeserve_model_load_seconds",
            "From the start to the first served request",
            registry=self.registry,
        ).set(info.load_s)

    def observe_request(self, endpoint: str, outcome: str, duration_s: float, cache: str) -> None:
        self.requests.labels(endpoint, outcome).inc()
        if outcome in ("ok", "length"):
            self.duration.labels(cache).observe(duration_s)

    def observe_gap(self, timings: RequestTimings, gap_s: float) -> None:
        self.itl.labels(cache_state_of(timings)).observe(gap_s)

    def observe_choice(self, timings: RequestTimings, *, is_complete: bool) -> None:
        """One choice's times. What an abandoned one did not reach is left out, not counted as zero."""
        cache = cache_state_of(timings)
        self.front_end.labels(cache).observe(timings.front_end_s)
        for histogram, value in (
            (self.ttft, timings.ttft_s),
            (self.queue, timings.queue_s),
            (self.restore, None if timings.queue_s is None else timings.restore_s),
            (self.prefill, timings.prefill_s),
        ):
            if value is not None:
                histogram.labels(cache).observe(value)
        if is_complete:
            self._observe_whole(timings, cache)

    def _observe_whole(self, timings: RequestTimings, cache: str) -> None:
        self.prompt_tokens.labels(cache).observe(timings.num_prompt_tokens)
        self.cached_tokens.labels(cache).observe(timings.num_cached_tokens)
        self.generation_tokens.labels(cache).observe(timings.num_output_tokens)
        for histogram, value in (
            (self.decode, timings.decode_s),
            (self.own_decode, timings.own_decode_s),
            (self.stalled, timings.stalled_s),
            (self.delivery, timings.delivery_s),
            (self.e2e, timings.e2e_s),
        ):
            if value is not None:
                histogram.labels(cache).observe(value)
        if timings.decode_s is not None and timings.num_output_tokens > 1:
            self.tpot.labels(cache).observe(timings.decode_s / (timings.num_output_tokens - 1))

    def render(self) -> bytes:
        return generate_latest(self.registry)


def cache_state_of(timings: RequestTimings) -> str:
    return cache_state(timings.num_prompt_tokens, timings.num_cached_tokens)
