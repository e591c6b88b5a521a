"""The report of a benchmark: a table for people, and files for people and programs.

Owns: the drawing of tables (terminal and Markdown), the order of a report's parts, the files written.
Does not know: what the figures mean, or how they were measured.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from edgeserve.bench.compare import Comparison
from edgeserve.bench.plots import curve_charts, plot_files, stall_lanes, ttft_distribution
from edgeserve.bench.results import BenchResult, request_lines, summary_json
from edgeserve.bench.tables import Table, bucket_table, case_tables, turn_table
from edgeserve.bench.text_plot import text_chart, text_timeline
from edgeserve.errors import UsageError
from edgeserve.ink import format_ms, printable, significant

# A terminal shows the most telling ones; the files have all.
MAX_TEXT_CURVES = 2
MIN_POINTS_OF_DISTRIBUTION = 10
PARTIAL = "partial: interrupted before it was complete"


def text_report(result: BenchResult, width: int = 64) -> str:
    """What is printed: tables, charts, warnings. Plain text without colour codes."""
    parts = [_headline(result)]
    parts += [text_table(table) for table in _tables(result)]
    parts += [chart for chart in _text_charts(result, width) if chart]
    parts += ["\n".join(f"note  {warning}" for warning in _warnings(result))]
    return printable("\n\n".join(part for part in parts if part)) + "\n"


def markdown_report(result: BenchResult) -> str:
    """report.md: the same tables, the plots, and the environment that the figures belong to."""
    parts = [f"# edgeserve bench {result.scenario}", _headline(result)]
    parts += [_markdown_table(table) for table in _tables(result)]
    parts += [f"![{name.removesuffix('.svg')}]({name})" for name in plot_files(result)]
    warnings = _warnings(result)
    if warnings:
        parts += ["## Notes", "\n".join(f"- {warning}" for warning in warnings)]
    parts += ["## How it was measured", f"`{result.command}`, started {result.started_at}."]
    parts += [_markdown_json("Settings", result.options), _markdown_json("Environment", result.environment)]
    return "\n\n".join(parts) + "\n"


def write_files(result: BenchResult, directory: Path) -> list[Path]:
    """summary.json, requests.jsonl, report.md and the SVG files; returns what was written."""
    texts = {
        "summary.json": json.dumps(summary_json(result), indent=1, ensure_ascii=False) + "\n",
        "requests.jsonl": "".join(
            json.dumps(line, ensure_ascii=False) + "\n" for line in request_lines(result)
        ),
        "report.md": markdown_report(result),
        **plot_files(result),
    }
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in texts.items():
            (directory / name).write_text(content, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"The report cannot be written to {directory}: {error}.") from error
    return [directory / name for name in texts]


def comparison_text(comparison: Comparison) -> str:
    """`compare A.json B.json`: medians, their ratio, and whether the ratio stands out."""
    rows = []
    for row in comparison.rows:
        within = row.ratio.is_within_noise
        verdict = "too few repeats to tell" if within is None else "within noise" if within else "differs"
        figures = (_figure_text(row.figure, row.a.median), _figure_text(row.figure, row.b.median))
        rows.append((row.case, row.figure, *figures, row.ratio.text, verdict))
    table = Table("second over first", ("case", "figure", "first", "second", "ratio", ""), tuple(rows))
    notes = "".join(f"\nnote  {warning}" for warning in comparison.warnings)
    return printable(text_table(table)) + notes + "\n"


def _figure_text(name: str, value: float) -> str:
    """By the unit at the end of a figure's name."""
    if name.endswith(("_per_s", "tok_s")):
        return f"{significant(value)}/s"
    return format_ms(value) if name.endswith("_s") else f"{value:.3g}"


def text_table(table: Table) -> str:
    """Columns aligned with spaces: the first to the left, figures to the right."""
    rows = [table.columns, *table.rows]
    widths = [max(len(row[index]) for row in rows) for index in range(len(table.columns))]
    lines = [
        "  ".join(
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    note = [table.note] if table.note else []
    return "\n".join([table.title, *(f"  {line}" for line in lines), *(f"  {text}" for text in note)])


def _markdown_table(table: Table) -> str:
    def row(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"

    rule = "|" + "|".join(["---", *["--:"] * (len(table.columns) - 1)]) + "|"
    lines = [f"## {table.title}", "", row(table.columns), rule, *(row(cells) for cells in table.rows)]
    return "\n".join([*lines, *(["", table.note] if table.note else [])])


def _markdown_json(title: str, content: Mapping[str, Any]) -> str:
    body = json.dumps(content, indent=1, ensure_ascii=False)
    return f"<details><summary>{title}</summary>\n\n```json\n{body}\n```\n\n</details>"


def _headline(result: BenchResult) -> str:
    servers = ", ".join(f"{name} {url}" for name, url in result.servers.items())
    repeats = result.options.get("repeats")
    spread = (
        "median (95 % interval)" if isinstance(repeats, int) and repeats >= 3 else "median (lowest–highest)"
    )
    lines = [f"{result.scenario} on {servers} · {spread} of {repeats} repeats"]
    if result.is_partial:
        lines.append(PARTIAL)
    for name in result.servers:
        capacity = result.capacity_per_s(name)
        if capacity is not None and result.scenario in ("load", "sweep"):
            rates = [case.rate_per_s for case in result.of_target(name) if case.rate_per_s is not None]
            at_least = "at least " if capacity == max(rates) else ""
            lines.append(f"capacity of {name}: {at_least}{significant(capacity)} requests/s, objective kept")
    return "\n".join(lines)


def _tables(result: BenchResult) -> list[Table]:
    extra = (turn_table(result), bucket_table(result))
    return [*case_tables(result), *(table for table in extra if table is not None)]


def _text_charts(result: BenchResult, width: int) -> Iterator[str]:
    for chart in curve_charts(result)[:MAX_TEXT_CURVES]:
        # Two points are two numbers, which the table has already.
        if max((len(series.points) for series in chart.series), default=0) > 2:
            yield text_chart(chart, width)
    distribution = ttft_distribution(result)
    if sum(len(series.points) for series in distribution.series) >= MIN_POINTS_OF_DISTRIBUTION:
        yield text_chart(distribution, width)
    for run in result.runs:
        if run.kind == "stall" and (lanes := stall_lanes(run)) is not None:
            streams, intruder, first_s = lanes
            rows = [(f"A {index + 1}", record.stamps_s) for index, record in enumerate(streams)]
            yield text_timeline(rows, ("B waits", intruder.sent_s, first_s), width)
            return


def _warnings(result: BenchResult) -> list[str]:
    """Each once, with the cases that it concerns."""
    cases: dict[str, list[str]] = {}
    for case in result.cases:
        for warning in case.warnings:
            name = case.label if len(result.servers) == 1 else f"{case.label} on {case.target}"
            cases.setdefault(warning, []).append(name)
    return [*result.warnings, *(f"{', '.join(names)}: {warning}" for warning, names in cases.items())]
