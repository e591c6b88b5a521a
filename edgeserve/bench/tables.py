"""Results as rows of text: which figures a kind of case shows, in which words and units.

Owns: the columns of each kind, the writing of figures with their spread, the ratios of two servers.
Does not know: how a table is drawn (report.py), colours, files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from edgeserve.bench.compare import ratio_of
from edgeserve.bench.results import BenchResult, CaseResult, Spread
from edgeserve.bench.runner import Record
from edgeserve.ink import format_ms, significant
from edgeserve.metrics import Summary

UNDEFINED = "n/a"
Cells = tuple[str, ...]


@dataclass(frozen=True)
class Table:
    title: str
    columns: Cells
    rows: tuple[Cells, ...]
    note: str = ""


def count(value: float) -> str:
    return f"{value:,.0f}"


def share(value: float) -> str:
    return f"{100 * value:.0f} %"


def per_second(value: float) -> str:
    return f"{significant(value)}/s"


def token_rate(value: float) -> str:
    return f"{significant(value)} tok/s"


def joules(value: float) -> str:
    return f"{significant(value)} J"


@dataclass(frozen=True)
class Column:
    title: str
    figure: str
    write: Callable[[float], str]


_TTFT = (Column("ttft p50", "ttft_p50_s", format_ms), Column("p95", "ttft_p95_s", format_ms))
_TPOT = Column("per token p50", "tpot_p50_s", format_ms)
_GAPS = (
    Column("gap p95", "gap_p95_s", format_ms),
    Column("p99", "gap_p99_s", format_ms),
    Column("max", "gap_max_s", format_ms),
)
_OUTPUT = Column("output", "output_tok_s", token_rate)
_COUNTS = (
    Column("offered", "offered", count),
    Column("ok", "ok", count),
    Column("rejected", "rejected", count),
    Column("failed", "failed", count),
)
_CACHED = Column("cached", "cached_share", share)
_GOODPUT = (
    Column("within objective", "attainment", share),
    Column("goodput", "goodput_per_s", per_second),
)

_ENERGY = Column("energy per token", "energy_per_token_j", joules)
"""Shown where the machine counts it."""

COLUMNS: Mapping[str, tuple[Column, ...]] = {
    "decode": (_OUTPUT, _TPOT, *_GAPS, _TTFT[0]),
    "depth": (
        _TPOT,
        Column("decode", "decode_tok_s", token_rate),
        *_GAPS,
        Column("ttft", "ttft_p50_s", format_ms),
        Column("prefill", "prefill_tok_s", token_rate),
    ),
    "stall": (
        Column("A's gap before", "a_gap_before_p50_s", format_ms),
        Column("during p50", "a_gap_p50_s", format_ms),
        Column("p95", "a_gap_p95_s", format_ms),
        Column("p99", "a_gap_p99_s", format_ms),
        Column("max", "a_gap_max_s", format_ms),
        Column("gaps", "a_gaps", count),
        Column("B's ttft", "b_ttft_s", format_ms),
        Column("B alone", "b_alone_ttft_s", format_ms),
    ),
    "probe": (
        Column("alone p50", "probe_alone_p50_s", format_ms),
        Column("max", "probe_alone_max_s", format_ms),
        Column("beside B p50", "probe_during_p50_s", format_ms),
        Column("max", "probe_during_max_s", format_ms),
        Column("probes", "probes_during", count),
        Column("B's ttft", "b_ttft_s", format_ms),
    ),
    "turns": (
        Column("first ttft", "first_ttft_s", format_ms),
        Column("later p50", "later_ttft_p50_s", format_ms),
        Column("last", "last_ttft_s", format_ms),
        Column("evaluated a turn", "later_evaluated_tokens", count),
        Column("of the prompt", "later_evaluated_share", share),
    ),
    "load": (*_COUNTS, _CACHED, *_TTFT, _TPOT, *_GAPS, _OUTPUT, *_GOODPUT),
    "closed": (*_COUNTS, _CACHED, *_TTFT, _TPOT, *_GAPS, _OUTPUT, *_GOODPUT),
}


def spread_text(spread: Spread | None, write: Callable[[float], str]) -> str:
    """`13.1 ms (12.9–13.4)`; the median alone where repeats agree or there was one."""
    if spread is None:
        return UNDEFINED
    middle, low, high = write(spread.median), write(spread.low), write(spread.high)
    if low == high:
        return middle
    unit = middle.partition(" ")[2]
    if unit and low.endswith(f" {unit}") and high.endswith(f" {unit}"):
        low, high = low.removesuffix(f" {unit}"), high.removesuffix(f" {unit}")
    return f"{middle} ({low}–{high})"


def case_tables(result: BenchResult) -> list[Table]:
    """One table a kind; with two servers, each case has a row a server and one of ratios."""
    kinds = dict.fromkeys(case.kind for case in result.cases)
    return [_kind_table(result, kind) for kind in kinds]


def _kind_table(result: BenchResult, kind: str) -> Table:
    cases = sorted(
        (case for case in result.cases if case.kind == kind), key=lambda case: case.rate_per_s or 0.0
    )
    has_energy = any(_ENERGY.figure in case.spreads for case in cases)
    columns = (*COLUMNS[kind], *((_ENERGY,) if has_energy else ()))
    has_two = len(result.servers) > 1
    rows: list[Cells] = []
    for label in dict.fromkeys(case.label for case in cases):
        same = [case for case in cases if case.label == label]
        rows += [_case_row(case, columns, has_two) for case in same]
        if len(same) == 2:
            rows.append(_ratio_row(same[0], same[1], columns))
    modes = ", ".join(dict.fromkeys(case.mode for case in cases))
    heads = ("case", *(("server",) if has_two else ()), *(column.title for column in columns))
    return Table(f"{kind} ({modes})", heads, tuple(rows))


def _case_row(case: CaseResult, columns: Sequence[Column], has_two: bool) -> Cells:
    start = (case.label, *((case.target,) if has_two else ()))
    return (*start, *(_cell(case, column) for column in columns))


def _cell(case: CaseResult, column: Column) -> str:
    # Percentiles of a run whose queue grew depend on how long it was run.
    if case.is_saturated and column.figure.startswith(("ttft_", "gap_", "tpot_", "e2e_")):
        return "saturated"
    return spread_text(case.spreads.get(column.figure), column.write)


def _ratio_row(a: CaseResult, b: CaseResult, columns: Sequence[Column]) -> Cells:
    cells = []
    for column in columns:
        ratio = ratio_of(a.spreads.get(column.figure), b.spreads.get(column.figure))
        cells.append(ratio.text if ratio else "")
    return ("", f"{b.target}/{a.target}", *cells)


def turn_table(result: BenchResult) -> Table | None:
    """What each turn of a chat cost: medians over the repeats, on the first server."""
    runs = [run for run in result.runs if run.kind == "turns" and run.target == "A"]
    if not runs:
        return None
    labels = dict.fromkeys(record.label for run in runs for record in run.records)
    rows = []
    for label in labels:
        records = [record for run in runs for record in run.records if record.label == label]
        rows.append((label, *_turn_cells(records)))
    heads = ("turn", "prompt", "cached", "evaluated", "ttft", "per token")
    return Table("turns, one by one", heads, tuple(rows), "evaluated = prompt − cached, as the server counts")


def _turn_cells(records: Sequence[Record]) -> Cells:
    lines = [line for record in records if (line := record.timeline) is not None]
    return (
        _middle([record.num_prompt_tokens for record in records], count),
        _middle([record.num_cached_tokens for record in records], count),
        _middle([record.num_evaluated_tokens for record in records], count),
        _middle([line.ttft_s for line in lines], format_ms),
        _middle([line.tpot_s for line in lines], format_ms),
    )


def _middle(values: Sequence[float | None], write: Callable[[float], str]) -> str:
    known = [value for value in values if value is not None]
    return write(median(known)) if known else UNDEFINED


def bucket_table(result: BenchResult) -> Table | None:
    """Percentiles of each bucket with their counts, where a run had more than one. The first repeat stands
    for the case: repeats are not pooled."""
    rows: list[Cells] = []
    has_two = len(result.servers) > 1
    for case in result.cases:
        buckets = case.repeats[0].buckets
        if len(buckets) > 1 and not case.is_saturated:
            for found in buckets:
                server = (case.target,) if has_two else ()
                start = (case.label, *server, str(found.bucket), count(found.ttft_s.n))
                rows.append((*start, *_summary(found.ttft_s), *_summary(found.tpot_s)))
    heads = ("case", *(("server",) if has_two else ()), "bucket", "n", "ttft p50", "p90", "p95", "p99")
    heads = (*heads, "per token p50", "p90", "p95", "p99")
    return Table("by prompt length and cache state", heads, tuple(rows)) if rows else None


def _summary(summary: Summary) -> Cells:
    values = (summary.p50, summary.p90, summary.p95, summary.p99)
    return tuple(UNDEFINED if value is None else format_ms(value) for value in values)
