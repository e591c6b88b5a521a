"""The engine's own counters as Prometheus metrics, read at the moment of a scrape; llama-server's names too.

Owns names, units and labels of what the engine counts. What requests met is in metrics_export.py. Dashboards
made for llama-server find its names with the same numbers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from edgeserve.engine.request import EngineStats, SequenceStatus
from edgeserve.engine.saved_prefix import PrefixCacheStats
from edgeserve.server.stats_view import recent_rates

STEP_KINDS = ("decode", "prefill", "mixed")


class EngineCollector(Collector):
    """Nothing before the model is loaded."""

    def __init__(self, stats: Callable[[], EngineStats | None]) -> None:
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        stats = self._stats()
        if stats is None:
            return
        rates = recent_rates(stats, time.perf_counter())
        yield from _counters(stats)
        yield from _labelled_counters(stats)
        yield from _prefix_tiers(stats.prefix_cache)
        yield from _gauges(stats, rates)
        yield from _labelled_gauges(stats)
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
        (
            "prefix_cache_evicted_tokens",
            "Cached tokens given up to make room",
            stats.num_evicted_tokens_total,
        ),
        (
            "prefix_unsaved",
            "Prefixes given up for good: copying them would have kept streams waiting",
            stats.prefix_cache.num_unsaved_total,
        ),
        ("generation_tokens", "Output tokens", stats.num_output_tokens_total),
        ("decode_calls", "Engine steps: llama_decode calls", stats.num_steps),
        ("prefill_seconds", "Step time spent on prompts", stats.prefill_s_total),
        ("decode_seconds", "Step time spent on output tokens", stats.decode_s_total),
        ("sample_seconds", "Of the step time, spent on drawing tokens", stats.sample_s_total),
    ):
        yield CounterMetricFamily(f"edgeserve_{name}", text, value=value)


def _labelled_counters(stats: EngineStats) -> Iterable[Metric]:
    finished = CounterMetricFamily(
        "edgeserve_sequences_finished", "Sequences by their end", labels=["reason"]
    )
    for reason, count in stats.finished_total.items():
        finished.add_metric([reason], count)
    yield finished
    steps = CounterMetricFamily("edgeserve_steps", "Steps by what they carried", labels=["kind"])
    seconds = CounterMetricFamily("edgeserve_step_seconds", "Their time", labels=["kind"])
    for kind in STEP_KINDS:
        steps.add_metric([kind], stats.steps_total.get(kind, 0))
        seconds.add_metric([kind], stats.step_s_total.get(kind, 0.0))
    yield steps
    yield seconds


def _prefix_tiers(cache: PrefixCacheStats) -> Iterable[Metric]:
    held = {"checkpoint": cache.checkpoints, "ram": cache.ram, "disk": cache.disk}
    for name, text, values in (
        ("items", "Prefixes or checkpoints kept", {tier: item.num_items for tier, item in held.items()}),
        ("bytes", "Their size", {tier: item.num_bytes for tier, item in held.items()}),
        ("limit_bytes", "The most they may take", {tier: item.limit_bytes for tier, item in held.items()}),
    ):
        gauge = GaugeMetricFamily(f"edgeserve_prefix_tier_{name}", text, labels=["tier"])
        for tier, value in values.items():
            gauge.add_metric([tier], value)
        yield gauge
    for name, text, counts in (
        ("hits", "Prompts that took a prefix over from there", cache.hits_total),
        ("hit_tokens", "The tokens of these prefixes", cache.hit_tokens_total),
    ):
        counter = CounterMetricFamily(f"edgeserve_prefix_tier_{name}", text, labels=["tier"])
        for tier in held:
            counter.add_metric([tier], counts.get(tier, 0))
        yield counter


def _gauges(stats: EngineStats, rates: dict[str, float]) -> Iterable[Metric]:
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


def _labelled_gauges(stats: EngineStats) -> Iterable[Metric]:
    cells = GaugeMetricFamily("edgeserve_kv_cells", "KV cells", labels=["state"])
    used = stats.num_used_cells - stats.num_cached_cells
    for state, count in (("used", used), ("cached", stats.num_cached_cells), ("total", stats.n_ctx)):
        cells.add_metric([state], count)
    yield cells
    slots = GaugeMetricFamily("edgeserve_slots", "Sequences that can run at once", value=stats.num_slots)
    yield slots
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
        ("spec_decode_num_draft_tokens", "Draft tokens", stats.num_draft_tokens_total),
        ("spec_decode_num_accepted_tokens", "Accepted draft tokens", stats.num_accepted_tokens_total),
        ("spec_decode_num_drafts", "Drafts", stats.num_drafts_total),
    ):
        yield CounterMetricFamily(f"llamacpp:{name}", text, value=value)
    # A counter without _total, as llama-server writes it, is a gauge in this format.
    for name, text, value in (
        ("n_tokens_max", "The longest sequence so far, in tokens", stats.n_tokens_max),
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
