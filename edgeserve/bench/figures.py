"""Records of one run -> named figures.

Owns: the measured window, the outcome table, buckets by prompt length and observed cache state, and the names
of all figures (units last). The definitions themselves are in edgeserve/metrics.py.
Does not know: files, tables, or how the requests were sent.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from edgeserve import metrics
from edgeserve.bench.runner import Outcome, Record
from edgeserve.bench.steadiness import Steadiness, steadiness
from edgeserve.metrics import SLO, TEMPLATE_TOKENS, LittlesLaw, Summary, Timeline

_CACHE_WORDS = {"miss": "cold", "partial": "partial", "hit": "warm"}
SENT_TOO_LATE_S = 0.005
SENT_TOO_LATE_OF_TTFT = 0.02
WARN_CACHED_SHARE = 0.01
MIN_MEASURED = 10
WARN_LITTLE_GAP = 0.05

FAILURES = (Outcome.ERROR, Outcome.TIMEOUT, Outcome.EMPTY)

Figures = Mapping[str, float | None]


@dataclass(frozen=True)
class Run:
    """One case, sent once to one server. `window_s` bounds what is measured, by arrival.

    `mode` is "open loop", "closed loop" or "script" (requests that follow each other by a fixed rule).
    `is_cold_meant`: nothing of the prompts should be cached, so that a cached share is worth a warning.
    """

    case: str
    kind: str
    mode: str
    target: str
    repeat: int
    window_s: tuple[float, float]
    records: tuple[Record, ...]
    rate_per_s: float | None = None
    is_cold_meant: bool = True
    client_cpu_share: float | None = None
    energy_j: float | None = None  # of the whole machine, where it counts it
    server_tokens: float | None = None  # the server's own counter of generated tokens, over this run
    is_cut_short: bool = False  # ended early because the objective was out of reach

    @property
    def measured(self) -> tuple[Record, ...]:
        """What the benchmark broke off is nobody's failure, unless it did so because of the waiting."""
        start_s, end_s = self.window_s
        left_out = () if self.is_cut_short else (Outcome.CANCELLED,)
        kept = (record for record in self.records if record.outcome not in left_out)
        return tuple(record for record in kept if start_s <= record.arrival_s < end_s)


@dataclass(frozen=True)
class Bucket:
    """Requests that may be averaged together. `prompt_tokens` is the nearest power of two."""

    prompt_tokens: int | None
    cache: str  # cold, partial, warm, unknown: as observed, not as meant

    def __str__(self) -> str:
        length = f"{self.prompt_tokens:,}" if self.prompt_tokens is not None else "n/a"
        return f"about {length} tokens, {self.cache}"


def bucket_of(record: Record) -> Bucket:
    prompt, cached = record.num_prompt_tokens, record.num_cached_tokens
    length = 2 ** round(math.log2(prompt)) if prompt else None
    if prompt is None or cached is None:
        return Bucket(length, "unknown")
    return Bucket(length, _CACHE_WORDS[metrics.cache_state(prompt, cached)])


@dataclass(frozen=True)
class BucketFigures:
    bucket: Bucket
    ttft_s: Summary
    tpot_s: Summary
    gap_s: Summary
    e2e_s: Summary


@dataclass(frozen=True)
class RunFigures:
    """`figures` are the headline values; percentiles among them come from the largest bucket alone."""

    figures: Figures
    buckets: tuple[BucketFigures, ...] = ()
    outcomes: Mapping[str, int] = field(default_factory=dict)
    finish_reasons: Mapping[str, int] = field(default_factory=dict)
    steadiness: Steadiness | None = None
    is_cut_short: bool = False
    warnings: tuple[str, ...] = ()

    @property
    def is_saturated(self) -> bool:
        return self.is_cut_short or bool(self.steadiness and self.steadiness.is_saturated)


def timelines(records: Iterable[Record]) -> list[Timeline]:
    return [timeline for record in records if (timeline := record.timeline) is not None]


def by_bucket(records: Iterable[Record]) -> tuple[BucketFigures, ...]:
    """Largest bucket first."""
    groups: dict[Bucket, list[Timeline]] = {}
    for record in records:
        if record.is_ok and (timeline := record.timeline) is not None:
            groups.setdefault(bucket_of(record), []).append(timeline)
    ordered = sorted(groups.items(), key=lambda item: -len(item[1]))
    return tuple(_bucket_figures(bucket, group) for bucket, group in ordered)


def _bucket_figures(bucket: Bucket, group: Sequence[Timeline]) -> BucketFigures:
    return BucketFigures(
        bucket,
        ttft_s=metrics.summarize(timeline.ttft_s for timeline in group),
        tpot_s=metrics.summarize(timeline.tpot_s for timeline in group),
        gap_s=metrics.summarize(gap for timeline in group for gap in timeline.gaps_s),
        e2e_s=metrics.summarize(timeline.e2e_s for timeline in group),
    )


def run_figures(run: Run, slo: SLO) -> RunFigures:
    """Everything that one run tells, whatever its kind."""
    measured = run.measured
    # A script's requests differ on purpose (turns of a chat, a stream and its intruder): nothing to average.
    buckets = by_bucket(measured) if run.mode != "script" else ()
    steady = steadiness(run.records, run.window_s) if run.mode == "open loop" else None
    figures: dict[str, float | None] = {
        **_counts(measured, slo, run.window_s),
        **(_percentiles(buckets) if buckets else {}),
        **(_all_offered(measured, buckets) if buckets else {}),
        **_rates(run, measured),
        **_quality(run, measured),
    }
    return RunFigures(
        figures=figures,
        buckets=buckets,
        outcomes=dict(Counter(record.outcome.value for record in measured)),
        finish_reasons=dict(Counter(record.finish_reason or "none" for record in measured if record.is_ok)),
        steadiness=steady,
        is_cut_short=run.is_cut_short,
        warnings=tuple(_warnings(run, figures, buckets, steady)),
    )


def is_good(record: Record, slo: SLO) -> bool:
    timeline = record.timeline
    num_prompt_tokens = record.num_prompt_tokens or record.num_planned_prompt_tokens
    return record.is_ok and timeline is not None and slo.is_met_by(timeline, num_prompt_tokens)


def _counts(measured: Sequence[Record], slo: SLO, window_s: tuple[float, float]) -> Figures:
    num_good = sum(is_good(record, slo) for record in measured)
    return {
        "offered": len(measured),
        "ok": sum(record.is_ok for record in measured),
        "rejected": sum(record.outcome is Outcome.REJECTED for record in measured),
        "failed": sum(
            record.outcome in (Outcome.ERROR, Outcome.TIMEOUT, Outcome.EMPTY) for record in measured
        ),
        "attainment": metrics.attainment(num_good, len(measured)),
        "goodput_per_s": metrics.goodput_per_s(num_good, window_s[1] - window_s[0]),
    }


def _percentiles(buckets: Sequence[BucketFigures]) -> Figures:
    found: dict[str, float | None] = {}
    for name in ("ttft", "tpot", "gap", "e2e"):
        summary: Summary = getattr(buckets[0], f"{name}_s")
        for part in ("mean", "p50", "p90", "p95", "p99", "max"):
            found[f"{name}_{part}_s"] = getattr(summary, part)
    return found


def _all_offered(measured: Sequence[Record], buckets: Sequence[BucketFigures]) -> Figures:
    """TTFT percentiles in which a request without an answer is slower than any with one. Only where all
    answers fall into one bucket: the failed ones tell nothing of theirs."""
    if len(buckets) != 1:
        return {"ttft_all_p50_s": None, "ttft_all_p95_s": None}
    ok = [timeline.ttft_s for timeline in timelines(record for record in measured if record.is_ok)]
    num_failed = len(measured) - len(ok)
    return {f"ttft_all_p{q}_s": metrics.percentile(ok, q, num_failed) for q in (50, 95)}


def _rates(run: Run, measured: Sequence[Record]) -> Figures:
    start_s, end_s = run.window_s
    lines = timelines(run.records)
    ended = [record.end_s for record in run.records if record.is_ok]
    started = sum(record.num_evaluated_tokens or 0 for record in measured if record.is_ok)
    prefill = [
        metrics.tokens_per_s(record.timings.prompt_n, record.timings.prompt_ms / 1000)
        for record in measured
        if record.timings
    ]
    # The server's own time per token, first token to last: what a client sees beyond it is the way there.
    server_tpots = [
        record.timings.predicted_ms / 1000 / (record.timings.predicted_n - 1)
        for record in measured
        if record.timings and record.timings.predicted_n > 1
    ]
    tpots = [timeline.tpot_s for timeline in timelines(measured) if timeline.tpot_s]
    return {
        "output_tok_s": metrics.output_tokens_per_s(lines, start_s, end_s),
        "evaluated_tok_s": started / (end_s - start_s) if end_s > start_s else None,
        "requests_per_s": metrics.requests_per_s(ended, start_s, end_s),
        "prefill_tok_s": median_of(prefill),
        "decode_tok_s": median_of([1 / tpot for tpot in tpots]),
        "server_tpot_s": median_of(server_tpots),
    }


def _quality(run: Run, measured: Sequence[Record]) -> Figures:
    lags = [record.send_lag_s for record in measured]
    events = sum(len(timeline.events) for timeline in timelines(measured))
    tokens = sum(timeline.num_tokens for timeline in timelines(measured))
    law = _littles_law(run)
    known = [record for record in measured if record.num_evaluated_tokens is not None]
    prompt = sum(record.num_prompt_tokens or 0 for record in known)
    cached = sum(record.num_cached_tokens or 0 for record in known)
    return {
        "send_lag_p99_s": metrics.percentile([lag for lag in lags if lag is not None], 99),
        "tokens_per_event": tokens / events if events else None,
        "little_gap": law.relative_gap if law else None,
        "cached_share": cached / prompt if prompt else None,
        "client_cpu_share": run.client_cpu_share,
        "energy_per_token_j": _energy_per_token_j(run),
    }


def _energy_per_token_j(run: Run) -> float | None:
    """The run's energy by its output tokens: prompts are a part of what an answer costs."""
    num_tokens = sum(timeline.num_tokens for timeline in timelines(run.records))
    return run.energy_j / num_tokens if run.energy_j is not None and num_tokens else None


def _unmeant_cached_share(run: Run) -> float:
    if not run.is_cold_meant:
        return 0.0
    prompt = sum(record.num_prompt_tokens or 0 for record in run.measured)
    cached = sum(max(0, (record.num_cached_tokens or 0) - TEMPLATE_TOKENS) for record in run.measured)
    return cached / prompt if prompt else 0.0


def _littles_law(run: Run) -> LittlesLaw | None:
    """Only of an open loop: a closed one keeps the number in flight by its own construction."""
    if run.mode != "open loop":
        return None
    return metrics.littles_law([(record.arrival_s, record.end_s) for record in run.records], *run.window_s)


def _surprising_little_gap(run: Run) -> float | None:
    """Requests that reach over the window's ends count in part: about one latency's worth is allowed for."""
    law = _littles_law(run)
    gap = law.relative_gap if law else None
    if law is None or gap is None or run.is_cut_short:
        return None
    tolerance = WARN_LITTLE_GAP + law.mean_time_s / (run.window_s[1] - run.window_s[0])
    return gap if abs(gap) > tolerance else None


def _warnings(
    run: Run, figures: Figures, buckets: Sequence[BucketFigures], steady: Steadiness | None
) -> Iterable[str]:
    lag, ttft = figures.get("send_lag_p99_s"), figures.get("ttft_p50_s")
    if lag is not None and (lag > SENT_TOO_LATE_S or (ttft and lag > SENT_TOO_LATE_OF_TTFT * ttft)):
        against = f" with a ttft of {1000 * ttft:.0f} ms" if ttft else ""
        yield f"Not valid: the client sent late (p99 {1000 * lag:.1f} ms{against})."
    cached = _unmeant_cached_share(run)
    if cached > WARN_CACHED_SHARE:
        yield f"{cached:.0%} of the prompt tokens were cached although cold prompts were meant."
    if run.kind in ("load", "closed") and len(run.measured) < MIN_MEASURED:
        yield f"Only {len(run.measured)} requests fell into the window: too few for percentiles."
    if run.is_cut_short:
        yield "Ended early: the objective was out of reach at this rate."
    elif steady is not None and steady.is_saturated:
        yield f"Not steady: {steady.reason}. Percentiles of such a run depend on its length."
    if (gap := _surprising_little_gap(run)) is not None:
        yield f"In flight differs from rate times latency by {gap:.0%}: not steady, or too short a window."
    if len(buckets) > 1:
        first = buckets[0]
        num_all = sum(found.ttft_s.n for found in buckets)
        yield f"Percentiles are those of the largest bucket: {first.bucket}, {first.ttft_s.n} of {num_all}."
    counted = sum(record.usage.completion_tokens for record in run.records if record.usage)
    if run.server_tokens is not None and abs(run.server_tokens - counted) > max(1.0, 0.01 * counted):
        yield f"The server counted {run.server_tokens:.0f} output tokens, the answers say {counted}."


def median_of(values: Iterable[float | None]) -> float | None:
    """Of the defined ones; None when there are none."""
    known = [value for value in values if value is not None]
    return median(known) if known else None
