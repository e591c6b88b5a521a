"""What a benchmark shows as a picture: which figures over what, and the timeline of one stall.

Owns: the choice of charts for each kind of case. Does not know: how they are drawn (svg.py for files,
text_plot.py for a terminal).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from edgeserve.bench import svg
from edgeserve.bench.figures import Run, timelines
from edgeserve.bench.results import BenchResult, CaseResult
from edgeserve.bench.runner import Record
from edgeserve.bench.svg import Chart, Mark, Series
from edgeserve.ink import significant

# A gap this many times the usual one is drawn as a stall.
STALL_FACTOR = 3.0
MAX_DISTRIBUTIONS = 4


def plot_files(result: BenchResult) -> dict[str, str]:
    """File name -> SVG, for everything that this result can show."""
    files: dict[str, str] = {}
    panels = [chart for chart in curve_charts(result) if not chart.is_empty]
    if panels:
        files["curves.svg"] = svg.charts(f"{result.scenario}: figures over the cases", panels)
    distribution = ttft_distribution(result)
    if not distribution.is_empty:
        files["ttft.svg"] = svg.charts(f"{result.scenario}: distribution", [distribution])
    for target in result.servers:
        stalled = next((run for run in result.runs if run.kind == "stall" and run.target == target), None)
        if stalled is not None and (drawing := stall_svg(stalled, has_others=len(result.servers) > 1)):
            files["stall.svg" if target == "A" else f"stall-{target}.svg"] = drawing
    return files


def curve_charts(result: BenchResult) -> list[Chart]:
    """Figures over the rate, the number of clients or streams, the depth, or the turn; most telling first."""
    kinds = {case.kind for case in result.cases}
    if "load" in kinds or "closed" in kinds:
        return _load_charts(result, "load" if "load" in kinds else "closed")
    if "decode" in kinds:
        throughput = _curve(result, "decode", "output_tok_s", 1.0, "together", "decode")
        gap = _curve(result, "decode", "tpot_p50_s", 1000.0, "per token p50", "decode")
        return [
            Chart("throughput", "streams", "tok/s", throughput),
            Chart("time per token", "streams", "ms", gap),
        ]
    if "depth" in kinds:
        per_token = _curve(result, "depth", "tpot_p50_s", 1000.0, "per token", "decode")
        prefill = _curve(result, "depth", "ttft_p50_s", 1.0, "ttft", "prefill")
        return [
            Chart("decode behind a long context", "prompt tokens", "ms/token", per_token),
            Chart("time to first token", "prompt tokens", "s", prefill),
        ]
    return _turn_charts(result) if "turns" in kinds else []


def _load_charts(result: BenchResult, kind: str) -> list[Chart]:
    x_label = "offered requests/s" if kind == "load" else "clients (closed loop)"

    def lines(*wanted: tuple[str, str, float, str]) -> tuple[Series, ...]:
        return tuple(
            series
            for figure, label, factor, role in wanted
            for series in _curve(result, kind, figure, factor, label, role)
        )

    ttft = lines(("ttft_p50_s", "p50", 1.0, "prefill"), ("ttft_p95_s", "p95", 1.0, "prefill"))
    gaps = lines(("gap_p50_s", "p50", 1000.0, "decode"), ("gap_p95_s", "p95", 1000.0, "decode"))
    output = lines(("output_tok_s", "output", 1.0, "decode"))
    good = lines(("goodput_per_s", "goodput", 1.0, "decode"), ("requests_per_s", "completed", 1.0, "queue"))
    x_top = max((x for series in (*good, *output) for x, _ in series.points), default=0.0)
    marks = tuple(_marks(result)) if kind == "load" else ()
    charts = [
        Chart("goodput: requests within the objective", x_label, "requests/s", good),
        Chart("throughput", x_label, "tok/s", output),
        Chart("time to first token", x_label, "s", ttft),
        Chart("gaps between tokens", x_label, "ms", gaps),
    ]
    return [replace(chart, x_top=x_top, marks=marks) for chart in charts]


def _marks(result: BenchResult) -> Iterator[Mark]:
    """Of the first server: the capacity, and the rate from which its queue grew."""
    cases = [case for case in result.of_target("A") if case.rate_per_s is not None]
    capacity = result.capacity_per_s("A")
    if len(cases) < 2:
        return
    whose = "" if len(result.servers) == 1 else " of A"
    if capacity is not None:
        yield Mark(f"capacity{whose} {significant(capacity)}/s", "decode", capacity)
    saturated = [case.rate_per_s for case in cases if case.is_saturated and case.rate_per_s is not None]
    beyond = [rate for rate in saturated if capacity is None or rate > capacity]
    if beyond:
        yield Mark(f"saturated{whose} from {significant(min(beyond))}/s", "stalled", min(beyond))


def _curve(
    result: BenchResult, kind: str, figure: str, factor: float, label: str, role: str
) -> tuple[Series, ...]:
    """One line a server; a saturated case has no percentile to draw."""
    found = []
    for target in result.servers:
        cases = [case for case in result.of_target(target) if case.kind == kind]
        points = sorted(_points(cases, figure, factor))
        name = label if len(result.servers) == 1 else f"{target} {label}"
        found.append(Series(name, role_of(role, target), tuple(points)))
    return tuple(found)


def role_of(role: str, target: str) -> str:
    """The second server is grey, whatever is drawn of it."""
    return role if target == "A" else "queue"


def _points(cases: Sequence[CaseResult], figure: str, factor: float) -> Iterator[tuple[float, float]]:
    for case in cases:
        x, y = _position(case), case.median(figure)
        hidden = case.is_saturated and figure.startswith(("ttft_", "gap_"))
        if x is not None and y is not None and not hidden:
            yield x, factor * y


def _position(case: CaseResult) -> float | None:
    """Where a case stands on its axis: its rate, or the one number in its label."""
    if case.rate_per_s is not None:
        return case.rate_per_s
    digits = [word.replace(",", "") for word in case.label.split()]
    return next((float(word) for word in digits if word.isdecimal()), None)


def _turn_charts(result: BenchResult) -> list[Chart]:
    runs = [run for run in result.runs if run.kind == "turns"]
    by_server: Mapping[str, list[Run]] = {
        name: [run for run in runs if run.target == name] for name in result.servers
    }
    first = {name: found[0].records for name, found in by_server.items() if found}

    def lines(what: str) -> tuple[Series, ...]:
        return tuple(
            Series(name, role_of("prefill", name), tuple(_by_turn(records, what)))
            for name, records in first.items()
        )

    ttft, tokens = lines("ttft"), lines("evaluated")
    return [
        Chart("time to first token", "turn", "s", ttft),
        Chart("prompt tokens evaluated", "turn", "tokens", tokens),
    ]


def _by_turn(records: Sequence[Record], what: str) -> Iterator[tuple[float, float]]:
    for record in records:
        timeline, evaluated = record.timeline, record.num_evaluated_tokens
        if what == "ttft" and timeline is not None:
            yield record.index + 1, timeline.ttft_s
        if what == "evaluated" and evaluated is not None:
            yield record.index + 1, evaluated


def ttft_distribution(result: BenchResult) -> Chart:
    """Share of all offered requests with a first token within x: a line that ends below 1 had failures.
    Where a queue grew, the times say how long the run was: steady cases are shown if there are any."""
    offered = [case for case in result.cases if case.kind in ("load", "closed")]
    steady = [case for case in offered if not case.is_saturated]
    cases = sorted(steady or offered, key=lambda case: case.rate_per_s or 0.0)[-MAX_DISTRIBUTIONS:]
    series = []
    for case in cases:
        runs = [run for run in result.runs if run.case == case.label and run.target == case.target]
        measured = [record for run in runs for record in run.measured]
        times = sorted(line.ttft_s for line in timelines(record for record in measured if record.is_ok))
        points = tuple((time, (index + 1) / len(measured)) for index, time in enumerate(times))
        name = case.label if len(result.servers) == 1 else f"{case.target} {case.label}"
        series.append(Series(name, role_of("prefill", case.target), points))
    return Chart("time to first token", "seconds", "share of offered", tuple(series), has_steps=True)


def stall_lanes(run: Run) -> tuple[list[Record], Record, float] | None:
    """Streams A, the intruder, and the time of its first token; None where it had none."""
    streams = [record for record in run.records if record.label == "A" and record.stamps_s]
    intruder = next((record for record in run.records if record.label == "B"), None)
    if not streams or intruder is None or not intruder.stamps_s:
        return None
    return streams, intruder, intruder.stamps_s[0]


def stall_svg(run: Run, width: int = 860, *, has_others: bool = False) -> str | None:
    """A tick for each token of A, red where A waited, and a bar from B's sending to its first token."""
    lanes = stall_lanes(run)
    if lanes is None:
        return None
    streams, intruder, first_s = lanes
    start_s = min(record.stamps_s[0] for record in streams)
    end_s = max(first_s, *(record.stamps_s[-1] for record in streams))
    scale = (width - 70) / (end_s - start_s)

    def place(at_s: float) -> float:
        return 56 + (at_s - start_s) * scale

    parts = [part for row, record in enumerate(streams) for part in _ticks(record, row, place(0), scale)]
    y = 40 + 34 * len(streams)
    b_start = max(56.0, place(intruder.sent_s))
    parts.append(svg.box(b_start, y, place(first_s) - b_start, 12, "prefill"))
    parts.append(svg.text(8, y + 11, "B waits"))
    for tick in svg.Axis.to(end_s - start_s).ticks:
        if tick <= end_s - start_s:
            parts.append(svg.text(56 + tick * scale, y + 32, f"{tick:.4g} s", "middle"))
    where = f" on server {run.target}" if has_others else ""
    title = f"{run.case}{where}: tokens of the streams A, their waits in red"
    return svg.document(title, width, y + 44, "".join(parts))


def _ticks(record: Record, row: int, origin: float, scale: float) -> Iterator[str]:
    y = 36 + 34 * row
    gaps = sorted(b - a for a, b in pairwise(record.stamps_s))
    usual = gaps[len(gaps) // 2] if gaps else 0.0
    yield svg.text(8, y + 14, f"A {row + 1}")
    for before, after in pairwise(record.stamps_s):
        if after - before > STALL_FACTOR * usual:
            yield svg.box(origin + before * scale, y + 8, (after - before) * scale, 4, "stalled")
    for at_s in record.stamps_s:
        x = origin + at_s * scale
        yield svg.line(x, y, x, y + 20, "decode")
