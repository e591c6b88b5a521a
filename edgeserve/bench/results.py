"""Runs of several repeats and servers -> one result: medians with their spread, and the JSON document.

Owns: how repeats are summed up, the capacity point, the schema of summary.json and requests.jsonl.
Does not know: how results are shown.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from edgeserve.bench.figures import BucketFigures, Run, RunFigures
from edgeserve.bench.runner import Record

SUMMARY_SCHEMA = "edgeserve-bench/1"
REQUEST_SCHEMA = "edgeserve-bench-request/1"
MIN_REPEATS_FOR_INTERVAL = 3
NUM_RESAMPLES = 2000


@dataclass(frozen=True)
class Spread:
    """A figure over repeats. From three repeats on, `low` and `high` are a 95 % bootstrap interval of the
    median; below that, the smallest and the largest value."""

    median: float
    low: float
    high: float
    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        if len(values) < MIN_REPEATS_FOR_INTERVAL:
            return cls(median(values), min(values), max(values), tuple(values))
        medians = resampled_medians(values)
        low, high = medians[int(0.025 * len(medians))], medians[int(0.975 * len(medians))]
        return cls(median(values), low, high, tuple(values))


def resampled_medians(values: Sequence[float], seed: int = 0) -> list[float]:
    """Bootstrap: sorted medians of resamples with replacement."""
    rng = random.Random(seed)
    return sorted(median(rng.choices(values, k=len(values))) for _ in range(NUM_RESAMPLES))


@dataclass(frozen=True)
class CaseResult:
    """One case on one server. A figure that any repeat could not measure is left out of `spreads`."""

    label: str
    kind: str
    mode: str
    target: str
    rate_per_s: float | None
    spreads: Mapping[str, Spread]
    repeats: tuple[RunFigures, ...]

    def median(self, name: str) -> float | None:
        spread = self.spreads.get(name)
        return spread.median if spread else None

    @property
    def is_saturated(self) -> bool:
        """In at least half of the repeats."""
        return 2 * sum(run.is_saturated for run in self.repeats) >= len(self.repeats)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Each once, in order."""
        return tuple(dict.fromkeys(warning for run in self.repeats for warning in run.warnings))


@dataclass(frozen=True)
class BenchResult:
    """Everything that one benchmark found. `servers` maps A and B to their addresses."""

    scenario: str
    started_at: str
    command: str
    options: Mapping[str, object]
    environment: Mapping[str, object]
    servers: Mapping[str, str]
    cases: tuple[CaseResult, ...]
    runs: tuple[Run, ...]
    is_partial: bool = False
    warnings: tuple[str, ...] = ()
    attainment_target: float = 0.9
    extra: Mapping[str, object] = field(default_factory=dict)

    def of_target(self, target: str) -> list[CaseResult]:
        return [case for case in self.cases if case.target == target]

    def capacity_per_s(self, target: str = "A") -> float | None:
        """The highest offered rate that keeps the attainment target in a steady run."""
        rates = [
            case.rate_per_s
            for case in self.of_target(target)
            if case.rate_per_s is not None
            and not case.is_saturated
            and (case.median("attainment") or 0.0) >= self.attainment_target
        ]
        return max(rates, default=None)


def sum_up(runs: Sequence[tuple[Run, RunFigures]]) -> tuple[CaseResult, ...]:
    """Repeats of the same case and server become one `CaseResult`, in the order of their first run."""
    groups: dict[tuple[str, str], list[tuple[Run, RunFigures]]] = {}
    for run, figures in runs:
        groups.setdefault((run.case, run.target), []).append((run, figures))
    return tuple(_case_result(group) for group in groups.values())


def _case_result(group: Sequence[tuple[Run, RunFigures]]) -> CaseResult:
    run = group[0][0]
    repeats = tuple(figures for _, figures in group)
    names = dict.fromkeys(name for figures in repeats for name in figures.figures)
    spreads: dict[str, Spread] = {}
    for name in names:
        values = [figures.figures.get(name) for figures in repeats]
        known = [value for value in values if value is not None]
        if len(known) == len(repeats):
            spreads[name] = Spread.of(known)
    return CaseResult(run.case, run.kind, run.mode, run.target, run.rate_per_s, spreads, repeats)


def summary_json(result: BenchResult) -> dict[str, Any]:
    """The document for programs. Every time is in seconds, every share between 0 and 1."""
    return {
        "schema": SUMMARY_SCHEMA,
        "scenario": result.scenario,
        "is_partial": result.is_partial,
        "started_at": result.started_at,
        "command": result.command,
        "servers": dict(result.servers),
        "capacity_per_s": {name: result.capacity_per_s(name) for name in result.servers},
        "warnings": list(result.warnings),
        "cases": [_case_json(case) for case in result.cases],
        "options": dict(result.options),
        "environment": dict(result.environment),
        **result.extra,
    }


def _case_json(case: CaseResult) -> dict[str, Any]:
    return {
        "label": case.label,
        "kind": case.kind,
        "mode": case.mode,
        "server": case.target,
        "rate_per_s": case.rate_per_s,
        "is_saturated": case.is_saturated,
        "figures": {name: asdict(spread) for name, spread in case.spreads.items()},
        "warnings": list(case.warnings),
        "repeats": [_repeat_json(figures) for figures in case.repeats],
    }


def _repeat_json(figures: RunFigures) -> dict[str, Any]:
    return {
        "figures": dict(figures.figures),
        "outcomes": dict(figures.outcomes),
        "finish_reasons": dict(figures.finish_reasons),
        "buckets": [_bucket_json(bucket) for bucket in figures.buckets],
    }


def _bucket_json(bucket: BucketFigures) -> dict[str, Any]:
    named = asdict(bucket)
    return {**named.pop("bucket"), **named}


def request_lines(result: BenchResult) -> Iterator[dict[str, Any]]:
    """One object a request, all repeats and servers, texts left out."""
    for run in result.runs:
        measured = {id(record) for record in run.measured}
        for record in run.records:
            line = {"case": run.case, "server": run.target, "repeat": run.repeat, "mode": run.mode}
            yield {"schema": REQUEST_SCHEMA, **line, **_record_json(record, id(record) in measured)}


def _record_json(record: Record, is_measured: bool) -> dict[str, Any]:
    timeline = record.timeline
    sent = [at_s - record.sent_s for at_s in record.stamps_s[:1]]
    return {
        "index": record.index,
        "label": record.label,
        "is_measured": is_measured,
        "outcome": record.outcome.value,
        "finish_reason": record.finish_reason,
        "status": record.status,
        "code": record.code,
        "message": record.message,
        "scheduled_s": record.scheduled_s,
        "sent_s": record.sent_s,
        "end_s": record.end_s,
        "ttft_s": timeline.ttft_s if timeline else None,
        "ttft_send_s": sent[0] if sent else None,
        "e2e_s": timeline.e2e_s if timeline else None,
        "tpot_s": timeline.tpot_s if timeline else None,
        "max_gap_s": timeline.max_gap_s if timeline else None,
        "planned_prompt_tokens": record.num_planned_prompt_tokens,
        "prompt_tokens": record.num_prompt_tokens,
        "cached_tokens": record.num_cached_tokens,
        "evaluated_tokens": record.num_evaluated_tokens,
        "completion_tokens": record.usage.completion_tokens if record.usage else None,
        "max_tokens": record.max_tokens,
        "timings": asdict(record.timings) if record.timings else None,
        "stamps_s": list(record.stamps_s),
    }
