"""Two scrapes of a server's /metrics and /slots -> the figures of the window between them.

Owns the reading of Prometheus text, differences of counters and quantiles of histograms. Understands
edgeserve's names, and what llama-server's tell. Does not know what the figures mean (diagnosis.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from edgeserve.doctor.observed import Observed

Labels = frozenset[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Scrape:
    """One moment: samples by name and labels, tasks that are processing, and /props' engine settings."""

    at_s: float
    samples: Mapping[tuple[str, Labels], float]
    running: frozenset[object] = frozenset()
    num_slots: int | None = None
    model_path: str | None = None
    settings: Mapping[str, object] = field(default_factory=dict)


def read_scrape(at_s: float, metrics: str, slots: object = None, props: object = None) -> Scrape:
    """From the texts and documents of the endpoints; None or another shape where one is not there."""
    samples = {
        (sample.name, frozenset(sample.labels.items())): float(sample.value)
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
    }
    found = [slot for slot in slots if isinstance(slot, dict)] if isinstance(slots, list) else []
    told = props if isinstance(props, dict) else {}
    engine, path = told.get("engine"), told.get("model_path")
    return Scrape(
        at_s,
        samples,
        running=frozenset(slot.get("id_task") for slot in found if slot.get("is_processing")),
        num_slots=len(found) or None,
        model_path=path if isinstance(path, str) and path else None,
        settings=engine if isinstance(engine, dict) else {},
    )


@dataclass(frozen=True, slots=True)
class Window:
    """What happened between two scrapes. Every figure is None where the server does not tell it."""

    first: Scrape
    last: Scrape

    @property
    def length_s(self) -> float:
        return self.last.at_s - self.first.at_s

    def grown(self, name: str, **labels: str) -> float | None:
        """By how much a counter grew, over all label sets that contain these."""
        before, after = (_total(scrape, name, labels) for scrape in (self.first, self.last))
        # A counter that appears with its first label was 0 before.
        return None if after is None else after - (before or 0.0)

    def now(self, name: str, **labels: str) -> float | None:
        return _total(self.last, name, labels)

    def mean(self, histogram: str, **labels: str) -> float | None:
        count = self.grown(f"{histogram}_count", **labels)
        total = self.grown(f"{histogram}_sum", **labels)
        return total / count if count and total is not None else None

    def quantile(self, histogram: str, q: float) -> float | None:
        """As Prometheus computes it: linear within the bucket that holds the rank."""
        bounds = set(_bounds(self.last, histogram))
        counts = [
            (bound, self.grown(f"{histogram}_bucket", le=text) or 0.0) for bound, text in sorted(bounds)
        ]
        return quantile_of(counts, q)


def quantile_of(cumulative: Sequence[tuple[float, float]], q: float) -> float | None:
    """`cumulative` holds (upper bound, count up to it), rising, the last bound infinite. A rank in the last
    bucket gives the bound below it: more is not known."""
    if not cumulative or not cumulative[-1][1]:
        return None
    rank = q * cumulative[-1][1]
    low, before = 0.0, 0.0
    for bound, count in cumulative:
        if count >= rank:
            if bound == float("inf"):
                return low
            return low + (bound - low) * (rank - before) / (count - before) if count > before else bound
        low, before = bound, count
    return low


def observe(first: Scrape, last: Scrape) -> Observed:
    """The figures of the window, as far as this server tells them."""
    window = Window(first, last)
    ttft, queue = "edgeserve_time_to_first_token_seconds", "edgeserve_request_queue_seconds"
    ttft_s, queue_s = window.mean(ttft), window.mean(queue)
    step_s = window.grown("edgeserve_step_seconds_total")
    evaluated = _first_known(window, "edgeserve_prompt_tokens_total", "llamacpp:prompt_tokens_total")
    prefill_s = _first_known(window, "edgeserve_prefill_seconds_total", "llamacpp:prompt_seconds_total")
    output = _first_known(window, "edgeserve_generation_tokens_total", "llamacpp:tokens_predicted_total")
    target_ms = last.settings.get("itl_target_ms")
    return Observed(
        window_s=window.length_s,
        num_requests=_whole(window.grown(f"{ttft}_count")),
        num_rejected=_whole(window.grown("edgeserve_requests_total", outcome="rejected")),
        num_waiting_first=_whole(_waiting(first)),
        num_waiting_last=_whole(_waiting(last)),
        num_running=float(len(first.running & last.running)) if last.num_slots else None,
        num_slots=last.num_slots,
        ttft_s=ttft_s,
        queue_s=queue_s,
        queue_share=_over(queue_s, ttft_s),
        ttft_miss_s=window.mean(ttft, cache="miss"),
        num_misses=_whole(window.grown(f"{ttft}_count", cache="miss")),
        ttft_hit_s=window.mean(ttft, cache="hit"),
        num_hits=_whole(window.grown(f"{ttft}_count", cache="hit")),
        hit_prompt_tokens=window.mean("edgeserve_request_prompt_tokens", cache="hit"),
        hit_cached_tokens=window.mean("edgeserve_request_cached_tokens", cache="hit"),
        prefill_tok_s=_over(evaluated, prefill_s),
        mean_prompt_tokens=window.mean("edgeserve_request_prompt_tokens"),
        mean_output_tokens=window.mean("edgeserve_request_generation_tokens"),
        num_gaps=_whole(window.grown("edgeserve_inter_token_latency_seconds_count")),
        gap_p50_s=window.quantile("edgeserve_inter_token_latency_seconds", 0.5),
        gap_p99_s=window.quantile("edgeserve_inter_token_latency_seconds", 0.99),
        gap_mean_s=window.mean("edgeserve_inter_token_latency_seconds"),
        stalled_share=_over(
            window.grown("edgeserve_request_stalled_seconds_sum"),
            window.grown("edgeserve_request_decode_seconds_sum"),
        ),
        # A step that began before the window is booked in it as a whole.
        busy_share=None if step_s is None else min(1.0, step_s / window.length_s),
        decodes_per_step=_over(output, _decoding_steps(window)),
        decode_step_s=_over(window.grown("edgeserve_decode_seconds_total"), _decoding_steps(window)),
        sample_share=_over(window.grown("edgeserve_sample_seconds_total"), step_s),
        output_tok_s=_over(output, window.length_s),
        cells_total=_whole(window.now("edgeserve_kv_cells", state="total")),
        cells_used=_whole(window.now("edgeserve_kv_cells", state="used")),
        cells_cached=_whole(window.now("edgeserve_kv_cells", state="cached")),
        num_evicted_tokens=_whole(window.grown("edgeserve_prefix_cache_evicted_tokens_total")),
        num_looked_up_tokens=_whole(window.grown("edgeserve_prefix_cache_query_tokens_total")),
        itl_target_s=target_ms / 1e3 if isinstance(target_ms, int | float) and target_ms else None,
        model_path=last.model_path,
        settings=last.settings,
    )


def _decoding_steps(window: Window) -> float | None:
    kinds = [window.grown("edgeserve_steps_total", kind=kind) for kind in ("decode", "mixed")]
    return sum(count or 0.0 for count in kinds) if any(count is not None for count in kinds) else None


def _waiting(scrape: Scrape) -> float | None:
    own = _total(scrape, "edgeserve_requests_waiting", {})
    return own if own is not None else _total(scrape, "llamacpp:requests_deferred", {})


def _total(scrape: Scrape, name: str, labels: Mapping[str, str]) -> float | None:
    wanted = set(labels.items())
    found = [value for (known, given), value in scrape.samples.items() if known == name and wanted <= given]
    return sum(found) if found else None


def _bounds(scrape: Scrape, histogram: str) -> Iterable[tuple[float, str]]:
    for name, labels in scrape.samples:
        if name == f"{histogram}_bucket":
            text = dict(labels)["le"]
            yield float(text), text


def _first_known(window: Window, *names: str) -> float | None:
    return next((value for name in names if (value := window.grown(name)) is not None), None)


def _over(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)
