"""Prometheus metrics: histograms of what requests met, and the engine's counters read when scraped.

Owns names, units, buckets and labels. Base units, `_total` for counters, few label values. The same numbers
are also told under llama-server's names, so that dashboards made for it work. Definitions are metrics.py's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from edgeserve.engine.request import EngineStats, RequestTimings, SequenceStatus
from edgeserve.server.stats_view import recent_rates

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_WAIT_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 20, 40, 80, 160, 640)
_TOKEN_BUCKETS = (
    0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5,
)  # fmt: skip
_DURATION_BUCKETS = (0.25, 0.5, 1, 2, 5, 10, 20, 40, 80, 160, 320, 640)
_COUNT_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)

OUTCOMES = ("ok", "length", "cancelled", "rejected", "timeout", "error")


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the info metrics say of what runs."""

    model: str
    arch: str
    version: str
    runtime: str


class Metrics:
    """One server's registry. Updated from the event loop only."""

    def __init__(self, stats: Callable[[], EngineStats | None]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(stats))
        self.requests = Counter(
            "edgeserve_requests", "Requests by outcome", ["endpoint", "outcome"], registry=self.registry
        )
        self.ttft = self._histogram(
            "time_to_first_token",
            "HTTP arrival to first token, by prefix cache hit",
            _WAIT_BUCKETS,
            ["cache"],
        )
        self.queue = self._histogram("request_queue", "HTTP arrival to the first step", _WAIT_BUCKETS)
        self.prefill = self._histogram("request_prefill", "First step to first token", _WAIT_BUCKETS)
        self.decode = self._histogram("request_decode", "First token to last token", _WAIT_BUCKETS)
        self.duration = self._histogram("request_duration", "HTTP arrival to the end", _DURATION_BUCKETS)
        self.itl = self._histogram("inter_token_latency", "Time between two tokens", _TOKEN_BUCKETS)
        self.tpot = self._histogram("time_per_output_token", "Mean gap of one request", _TOKEN_BUCKETS)
        self.prompt_tokens = self._counts("request_prompt_tokens", "Prompt tokens of a request")
        self.generation_tokens = self._counts("request_generation_tokens", "Output tokens of a request")

    def _histogram(
        self, name: str, text: str, buckets: tuple[float, ...], labels: Iterable[str] = ()
    ) -> Histogram:
        full_name = f"edgeserve_{name}_seconds"
        return Histogram(full_name, text, labels, buckets=buckets, registry=self.registry)

    def _counts(self, name: str, text: str) -> Histogram:
        return Histogram(f"edgeserve_{name}", text, buckets=_COUNT_BUCKETS, registry=self.registry)

    def describe(self, info: ModelInfo) -> None:
        """Called once, when the model is there."""
        build = Gauge(
            "edgeserve_build_info", "Versions", ["version", "llama_cpp_python"], registry=self.registry
        )
        build.labels(info.version, info.runtime).set(1)
        model = Gauge("edgeserve_model_info", "The loaded model", ["model", "arch"], registry=self.registry)
        model.labels(info.model, info.arch).set(1)

    def observe_request(self, endpoint: str, outcome: str, duration_s: float) -> None:
        self.requests.labels(endpoint, outcome).inc()
        if outcome in ("ok", "length"):
            self.duration.observe(duration_s)

    def observe_choice(self, timings: RequestTimings, *, is_complete: bool) -> None:
        """One choice's times. What an abandoned one did not reach is left out, not counted as zero."""
        if timings.ttft_s is not None:
            self.ttft.labels(cache_state(timings)).observe(timings.ttft_s)
        for histogram, value in ((self.queue, timings.queue_s), (self.prefill, timings.prefill_s)):
            if value is not None:
                histogram.observe(value)
        if not is_complete:
            return
        self.prompt_tokens.observe(timings.num_prompt_tokens)
        self.generation_tokens.observe(timings.num_output_tokens)
        if timings.decode_s is not None:
            self.decode.observe(timings.decode_s)
            if timings.num_output_tokens > 1:
                self.tpot.observe(timings.decode_s / (timings.num_output_tokens - 1))

    def render(self) -> bytes:
        return generate_latest(self.registry)


def cache_state(timings: RequestTimings) -> str:
    """hit: all but the one token that must be computed came from the cache."""
    if timings.num_cached_tokens == 0:
        return "miss"
    return "hit" if timings.num_cached_tokens >= timings.num_prompt_tokens - 1 else "partial"


class EngineCollector(Collector):
    """The engine's own counters, read at the moment of the scrape; nothing before the model is loaded."""

    def __init__(self, stats: Callable[[], EngineStats | None]) -> None:
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        stats = self._stats()
        if stats is None:
            return
        rates = recent_rates(stats, time.perf_counter())
        yield from _counters(stats)
        yield from _gauges(stats, rates)
        yield from _llama_server(stats, rates)

    def describe(self) -> Iterable[Metric]:
        return ()


def _counters(stats: EngineStats) -> Iterable[Metric]:
    prompt, cached = stats.num_prompt_tokens_total, stats.num_cached_tokens_total
    for name, text, value in (
        ("prompt_tokens", "Prompt tokens computed; cached ones are not among them", prompt - cached),
        ("prompt_tokens_cached", "Prompt tokens found in the prefix cache", cached),
        ("prefix_cache_query_tokens", "Prompt tokens looked up in the prefix cache", prompt),
        ("prefix_cache_hit_tokens", "Prompt tokens found in the prefix cache", cached),
        ("generation_tokens", "Output tokens", stats.num_output_tokens_total),
        ("decode_calls", "Engine steps: llama_decode calls", stats.num_steps),
        ("prefill_seconds", "Step time spent on prompts", stats.prefill_s_total),
        ("decode_seconds", "Step time spent on output tokens", stats.decode_s_total),
    ):
        yield CounterMetricFamily(f"edgeserve_{name}", text, value=value)
    finished = CounterMetricFamily(
        "edgeserve_sequences_finished", "Sequences by their end", labels=["reason"]
    )
    for reason, count in stats.finished_total.items():
        finished.add_metric([reason], count)
    yield finished


def _gauges(stats: EngineStats, rates: dict[str, float]) -> Iterable[Metric]:
    used = stats.num_used_cells - stats.num_cached_cells
    for name, text, value in (
        ("requests_running", "Sequences in a slot", len(stats.running)),
        ("requests_waiting", "Sequences waiting for a slot or for cells", len(stats.waiting)),
        (
            "kv_cache_usage_ratio",
            "Cells in use, idle prefixes included",
            _share(stats.num_used_cells, stats.n_ctx),
        ),
        ("batch_tokens", "Tokens in the latest step", _batch_tokens(stats)),
        ("prompt_tokens_per_second", "Prompt speed over the last seconds", rates["prompt_tokens_per_s"]),
        ("generation_tokens_per_second", "Output speed over the last seconds", rates["output_tokens_per_s"]),
    ):
        yield GaugeMetricFamily(f"edgeserve_{name}", text, value=value)
    cells = GaugeMetricFamily("edgeserve_kv_cells", "KV cells", labels=["state"])
    for state, count in (("used", used), ("cached", stats.num_cached_cells), ("total", stats.n_ctx)):
        cells.add_metric([state], count)
    yield cells
    sequences = GaugeMetricFamily("edgeserve_sequences", "Sequences by state", labels=["state"])
    everyone = [sequence.status for sequence in (*stats.running, *stats.waiting)]
    for status in (SequenceStatus.WAITING, SequenceStatus.PREFILL, SequenceStatus.DECODE):
        sequences.add_metric([status.value], everyone.count(status))
    yield sequences


def _llama_server(stats: EngineStats, rates: dict[str, float]) -> Iterable[Metric]:
    cached = stats.num_cached_tokens_total
    for name, text, value in (
        ("prompt_tokens", "Prompt tokens processed", stats.num_prompt_tokens_total - cached),
        ("prompt_tokens_cached", "Prompt tokens reused", cached),
        ("prompt_seconds", "Prompt processing time", stats.prefill_s_total),
        ("tokens_predicted", "Generated tokens", stats.num_output_tokens_total),
        ("tokens_predicted_seconds", "Generation time", stats.decode_s_total),
        ("n_decode", "llama_decode calls", stats.num_steps),
    ):
        yield CounterMetricFamily(f"llamacpp:{name}", text, value=value)
    for name, text, value in (
        ("prompt_tokens_seconds", "Prompt tokens a second", rates["prompt_tokens_per_s"]),
        ("predicted_tokens_seconds", "Generated tokens a second", rates["output_tokens_per_s"]),
        ("requests_processing", "Requests in a slot", len(stats.running)),
        ("requests_deferred", "Requests waiting", len(stats.waiting)),
        ("n_busy_slots_per_decode", "Decoding slots a step", rates["decodes_per_step"]),
    ):
        yield GaugeMetricFamily(f"llamacpp:{name}", text, value=value)


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _batch_tokens(stats: EngineStats) -> int:
    step = stats.last_step
    return 0 if step is None else step.num_decode_tokens + step.num_prefill_tokens
