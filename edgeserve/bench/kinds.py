"""Figures that belong to one kind of case: gaps of a stalled stream, turns of a chat, streams at once.

Owns: their names and the spans of time that they cover. Does not know: repeats, files, tables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from edgeserve import metrics
from edgeserve.bench.figures import Figures, Run, RunFigures, median_of, run_figures, timelines
from edgeserve.bench.runner import Record
from edgeserve.metrics import SLO


def figures_of(run: Run, slo: SLO) -> RunFigures:
    """The general figures of a run, and those of its kind."""
    general = run_figures(run, slo)
    special: Mapping[str, Callable[[Run], tuple[Figures, Sequence[str]]]] = {
        "decode": _decode,
        "stall": _stall,
        "turns": _turns,
        "probe": _probe,
    }
    if run.kind not in special:
        return general
    figures, warnings = special[run.kind](run)
    return replace(
        general,
        figures={**general.figures, **figures},
        warnings=(*general.warnings, *warnings),
    )


def _decode(run: Run) -> tuple[Figures, Sequence[str]]:
    """Throughput while all streams decode: from the last first token to the first last token."""
    lines = timelines(record for record in run.records if record.is_ok)
    if not lines or len(lines) < len(run.records):
        return {"output_tok_s": None}, ["Not every stream ended well; no throughput of all together."]
    start_s = max(line.events[0].at_s for line in lines)
    end_s = min(line.events[-1].at_s for line in lines)
    if end_s <= start_s:
        return {"output_tok_s": None}, ["The streams never decoded all at once; give them longer answers."]
    return {"output_tok_s": metrics.output_tokens_per_s(lines, start_s, end_s)}, []


def _labelled(run: Run, label: str) -> list[Record]:
    return [record for record in run.records if record.label == label]


def _first_token_s(records: Sequence[Record]) -> float | None:
    return records[0].stamps_s[0] if records and records[0].stamps_s else None


def gaps_in(records: Sequence[Record], start_s: float, end_s: float) -> list[float]:
    """Gaps between events that overlap the span, so that a gap around it counts whole."""
    lines = timelines(records)
    stamps = [[event.at_s for event in line.events] for line in lines]
    return [b - a for line in stamps for a, b in pairwise(line) if a < end_s and b > start_s]


def _stall(run: Run) -> tuple[Figures, Sequence[str]]:
    """A's gaps before and during B's prefill, and what B waits, alone and against A."""
    streams, intruder, alone = _labelled(run, "A"), _labelled(run, "B"), _labelled(run, "B alone")
    b_first_s = _first_token_s(intruder)
    b_ttft = [line.ttft_s for line in timelines(intruder)]
    alone_ttft = [line.ttft_s for line in timelines(alone)]
    b_sent_s = intruder[0].sent_s if intruder else None
    figures: dict[str, float | None] = {
        "b_ttft_s": median_of(b_ttft),
        "b_alone_ttft_s": median_of(alone_ttft),
    }
    if b_sent_s is None or b_first_s is None:
        return figures, ["B had no first token; the stall could not be measured."]
    before = [gap for record in streams for gap in _gaps_before(record, b_sent_s)]
    during = metrics.summarize(gaps_in(streams, b_sent_s, b_first_s))
    figures |= {
        "a_gap_before_p50_s": metrics.percentile(before, 50),
        "a_gap_before_max_s": max(before, default=None),
        "a_gap_p50_s": during.p50,
        "a_gap_p95_s": during.p95,
        "a_gap_p99_s": during.p99,
        "a_gap_max_s": during.max,
        "a_gaps": float(during.n),
    }
    ends = [record.stamps_s[-1] for record in streams if record.stamps_s]
    if not ends or min(ends) < b_first_s:
        return figures, ["A ended before B's first token: give A a longer answer or B a shorter prompt."]
    return figures, []


def _gaps_before(record: Record, end_s: float) -> list[float]:
    return [b - a for a, b in pairwise(record.stamps_s) if b <= end_s and b > a]


def _turns(run: Run) -> tuple[Figures, Sequence[str]]:
    """The first turn of a chat is cold; the later ones show what the prefix cache is worth."""
    answered = [record for record in run.records if record.is_ok]
    first = [record for record in answered if record.label == "turn 1"]
    later = answered[len(first) :]
    evaluated = [record.num_evaluated_tokens for record in later]
    known = [record for record in later if record.num_evaluated_tokens is not None]
    prompt = sum(record.num_prompt_tokens or 0 for record in known)
    figures: dict[str, float | None] = {
        "turns": float(len(answered)),
        "first_ttft_s": median_of(line.ttft_s for line in timelines(first)),
        "later_ttft_p50_s": median_of(line.ttft_s for line in timelines(later)),
        "last_ttft_s": median_of(line.ttft_s for line in timelines(later[-1:])),
        "later_evaluated_tokens": median_of(evaluated),
        "later_evaluated_share": sum(record.num_evaluated_tokens or 0 for record in known) / prompt
        if prompt
        else None,
    }
    return figures, []


def _probe(run: Run) -> tuple[Figures, Sequence[str]]:
    """What a short request waits on the idle server, and while B's prompt is computed."""
    probes, intruder = _labelled(run, "probe"), _labelled(run, "B")
    figures: dict[str, float | None] = {"b_ttft_s": median_of(line.ttft_s for line in timelines(intruder))}
    b_first_s = _first_token_s(intruder)
    if b_first_s is None:
        return figures, ["B had no first token; what it does to others could not be measured."]
    alone = [record for record in probes if record.end_s <= intruder[0].sent_s]
    during = [record for record in probes if intruder[0].sent_s <= record.arrival_s < b_first_s]
    for name, records in (("alone", alone), ("during", during)):
        found = metrics.summarize(line.ttft_s for line in timelines(records))
        figures |= {
            f"probes_{name}": float(len(records)),
            f"probe_{name}_p50_s": found.p50,
            f"probe_{name}_max_s": found.max,
        }
    if not during:
        return figures, ["No probe fell into B's prefill: give B a longer prompt or raise the probe rate."]
    return figures, []
