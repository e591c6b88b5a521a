"""Reports and pictures of a whole benchmark against a mock."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench_mock import caching_script, options, record
from mock_openai import MockServer

from edgeserve.bench import compare, environment, plots, report, svg
from edgeserve.bench.figures import Run
from edgeserve.bench.kinds import figures_of
from edgeserve.bench.options import BenchOptions, Scenario
from edgeserve.bench.results import REQUEST_SCHEMA, SUMMARY_SCHEMA, BenchResult, sum_up
from edgeserve.bench.runner import Outcome
from edgeserve.bench.session import run_bench
from edgeserve.bench.svg import Chart, Series
from edgeserve.bench.text_plot import text_chart, text_timeline
from edgeserve.bench.workload import Arrivals, Lengths
from edgeserve.errors import UsageError
from edgeserve.metrics import SLO

NAMESPACE = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def load_result() -> Iterator[BenchResult]:
    # Apart in time: chunks that arrive in one piece have no gap between them.
    with MockServer(caching_script(gap_s=0.05)).running() as server:
        server.pages["/props"] = {
            "chat_template": "secret",
            "total_slots": 2,
            "model_path": "/nowhere/model.gguf",
        }
        wanted = options(
            server.url,
            Scenario.LOAD,
            api_key="very-secret",
            rates_per_s=(20.0, 30.0, 40.0),
            arrivals=Arrivals.CONSTANT,
            warmup_s=0,
            # At most nine requests a case: with more, a machine that gets busy could look like a queue.
            duration_s=0.22,
            slo=SLO(e2e_s=20.0),
        )
        arguments = ["edgeserve", "bench", "load", "--api-key", "very-secret", "--seed", "0"]
        yield run_bench(wanted, arguments=arguments)


def test_the_printed_report_shows_every_case_with_counts_and_units(load_result: BenchResult) -> None:
    text = report.text_report(load_result)
    assert "load (open loop)" in text
    for label in ("constant 20/s", "constant 30/s", "constant 40/s"):
        assert label in text
    for head in ("offered", "rejected", "ttft p50", "p99", "within objective", "goodput"):
        assert head in text
    assert "capacity of A: at least 40.0 requests/s" in text
    assert "goodput: requests within the objective, requests/s" in text
    assert "\x1b" not in text
    assert "inf" not in text.lower().split()


def test_the_files_hold_the_result_and_no_key(load_result: BenchResult, tmp_path: Path) -> None:
    written = report.write_files(load_result, tmp_path / "new" / "folder")
    names = {path.name for path in written}
    assert {"summary.json", "requests.jsonl", "report.md", "curves.svg", "ttft.svg"} <= names
    for path in written:
        assert "very-secret" not in path.read_text(encoding="utf-8")

    summary = json.loads((tmp_path / "new/folder/summary.json").read_text(encoding="utf-8"))
    assert summary["schema"] == SUMMARY_SCHEMA
    assert summary["command"].endswith("--api-key '***' --seed 0")
    assert summary["options"]["seed"] == 0
    assert "api_key" not in summary["options"]
    server = summary["environment"]["servers"]["A"]
    assert server["props"]["total_slots"] == 2
    assert "chat_template" not in server["props"]
    assert len(server["props"]["chat_template_sha256"]) == 64
    assert server["model_file"] is None
    assert {"state_before", "state_after", "client", "busy_processes", "salts"} <= set(summary["environment"])
    assert compare.compare(summary, summary).rows[0].ratio.value == 1.0


def test_every_request_has_a_line(load_result: BenchResult, tmp_path: Path) -> None:
    report.write_files(load_result, tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    assert len(lines) == sum(len(run.records) for run in load_result.runs)
    measured = [line for line in lines if line["is_measured"]]
    assert len(measured) == sum(case.median("offered") or 0 for case in load_result.cases)
    line = measured[0]
    assert line["schema"] == REQUEST_SCHEMA
    assert line["ttft_s"] >= line["ttft_send_s"] > 0
    assert line["evaluated_tokens"] == line["prompt_tokens"] - line["cached_tokens"]
    assert len(line["stamps_s"]) == line["completion_tokens"] == 4


def test_the_markdown_report_has_tables_plots_and_the_environment(load_result: BenchResult) -> None:
    text = report.markdown_report(load_result)
    assert "| case | offered |" in text
    assert "![curves](curves.svg)" in text
    assert "num_physical_cores" in text


def test_a_report_that_cannot_be_written_is_a_named_error(load_result: BenchResult, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("x")
    with pytest.raises(UsageError):
        report.write_files(load_result, blocked / "below")


def test_a_partial_result_says_so_everywhere(load_result: BenchResult) -> None:
    partial = replace(load_result, is_partial=True)
    assert report.PARTIAL in report.text_report(partial)
    assert report.PARTIAL in report.markdown_report(partial)


def test_a_result_without_any_run_can_still_be_reported(load_result: BenchResult, tmp_path: Path) -> None:
    empty = replace(load_result, cases=(), runs=(), is_partial=True)
    assert report.PARTIAL in report.text_report(empty)
    assert {path.name for path in report.write_files(empty, tmp_path)} == {
        "summary.json",
        "requests.jsonl",
        "report.md",
    }


def test_control_characters_of_a_server_do_not_reach_the_terminal(load_result: BenchResult) -> None:
    hostile = replace(load_result, warnings=("evil \x1b]0;title\x07 text",))
    assert "\x1b" not in report.text_report(hostile)


def elements(text: str, name: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(text).iter(NAMESPACE + name))


def test_curves_are_drawings_of_the_points(load_result: BenchResult) -> None:
    drawing = plots.plot_files(load_result)["curves.svg"]
    lines = elements(drawing, "polyline")
    assert len(lines) == 7
    assert all(len((line.get("points") or "").split()) == 3 for line in lines)
    labels = {entry.text for entry in elements(drawing, "text")}
    assert {"throughput", "time to first token", "gaps between tokens", "offered requests/s"} <= labels


def offered(rate: float, target: str, is_good: bool) -> Run:
    """Five requests, all in time or all late."""
    ttft_s = 0.1 if is_good else 3.0
    records = tuple(
        record(index, scheduled_s=at_s, sent_s=at_s, stamps_s=[at_s + ttft_s, at_s + ttft_s + 0.1])
        for index, at_s in enumerate((0.0, 1.0, 2.0, 3.0, 4.0))
    )
    return Run(f"poisson {rate}/s", "load", "open loop", target, 0, (0.0, 9.0), records, rate)


def test_a_sweep_shows_its_capacity_and_the_second_server_in_grey() -> None:
    runs = [offered(rate, target, rate < 2) for rate in (1.0, 2.0, 4.0) for target in ("A", "B")]
    cases = sum_up([(run, figures_of(run, SLO(ttft_s=2.0))) for run in runs])
    found = result_of(*runs, scenario="sweep", servers={"A": "http://a", "B": "http://b"}, cases=cases)
    drawing = plots.plot_files(found)["curves.svg"]
    labels = [entry.text for entry in elements(drawing, "text")]
    assert labels.count("capacity of A 1.00/s") == 4
    marks = [line for line in elements(drawing, "line") if line.get("class") == "decode mark"]
    assert len({line.get("x1") for line in marks}) == 1, "the panels share one x axis"
    roles = {name: line.get("class") for name, line in zip("AB", elements(drawing, "polyline"), strict=False)}
    assert roles == {"A": "decode", "B": "queue"}


def test_each_server_has_a_picture_of_its_stall() -> None:
    runs = (stalled(), replace(stalled(), target="B"))
    files = plots.plot_files(result_of(*runs, servers={"A": "http://a", "B": "http://b"}))
    assert "on server A" in files["stall.svg"]
    assert "on server B" in files["stall-B.svg"]


def test_a_distribution_ends_below_one_when_requests_failed() -> None:
    answered = record(0, scheduled_s=0.0, stamps_s=[1.0])
    failed = record(1, scheduled_s=0.0, outcome=Outcome.ERROR)
    run = Run("case", "load", "open loop", "A", 0, (0.0, 5.0), (answered, failed), 1.0)
    chart = plots.ttft_distribution(result_of(run))
    assert chart.series[0].points == ((1.0, 0.5),)


def result_of(*runs: Run, **more: Any) -> BenchResult:
    fields: dict[str, Any] = {
        "scenario": "load",
        "started_at": "",
        "command": "",
        "options": {},
        "environment": {},
        "servers": {"A": "http://a"},
        "cases": sum_up([(run, figures_of(run, SLO())) for run in runs]),
        "runs": runs,
    }
    return BenchResult(**(fields | more))


def stalled() -> Run:
    stamps = [index / 10 for index in range(1, 11)] + [2.0 + index / 10 for index in range(5)]
    records = (
        record(0, label="A", stamps_s=stamps),
        record(1, label="B", sent_s=1.05, stamps_s=[2.0]),
        record(2, label="B alone", sent_s=-3.0, stamps_s=[-2.0]),
    )
    return Run("stall", "stall", "script", "A", 0, (0.0, 9.0), records)


def test_a_stall_is_drawn_where_the_stream_waited() -> None:
    drawing = plots.plot_files(result_of(stalled()))["stall.svg"]
    boxes = elements(drawing, "rect")
    (wait,) = [box for box in boxes if box.get("class") == "stalled"]
    (prefill,) = [box for box in boxes if box.get("class") == "prefill"]
    assert float(wait.get("x", 0)) < float(prefill.get("x", 0))
    ticks = [line for line in elements(drawing, "line") if line.get("class") == "decode"]
    assert len(ticks) == 15


def test_a_stall_in_the_terminal() -> None:
    text = report.text_report(result_of(stalled()))
    assert "B waits" in text
    assert "A's gap before" in text
    (tokens,) = [line for line in text.splitlines() if "▮" in line]
    assert "·" * 20 in tokens


def test_a_saturated_case_shows_no_percentile() -> None:
    rising = [
        record(i, scheduled_s=i / 5, sent_s=i / 5, stamps_s=[i / 5 + 0.5 + i / 5, i / 5 + 1.0 + i / 5])
        for i in range(100)
    ]
    run = Run("poisson 5/s", "load", "open loop", "A", 0, (0.0, 20.0), tuple(rising), 5.0)
    text = report.text_report(result_of(run))
    (row,) = [line for line in text.splitlines() if line.strip().startswith("poisson 5/s  ")]
    assert "saturated" in row
    assert "Not steady" in text


def test_two_servers_have_a_row_each_and_their_ratio() -> None:
    def measured(target: str, factor: float) -> list[Run]:
        stamps = [[0.5 * factor, (0.6 + repeat / 1000) * factor] for repeat in range(3)]
        return [
            Run("case", "closed", "closed loop", target, i, (0.0, 9.0), (record(0, stamps_s=stamp),))
            for i, stamp in enumerate(stamps)
        ]

    runs = [*measured("A", 1.0), *measured("B", 2.0)]
    text = report.text_report(result_of(*runs, servers={"A": "http://a", "B": "http://b"}))
    (row,) = [line for line in text.splitlines() if "B/A" in line]
    assert "2.00×" in row


def test_energy_is_a_column_only_where_it_was_counted() -> None:
    answered = (record(0, stamps_s=[0.5, 0.6, 0.7, 0.8]),)
    run = Run("case", "closed", "closed loop", "A", 0, (0.0, 9.0), answered, energy_j=6.0)
    text = report.text_report(result_of(run))
    assert "energy per token" in text
    assert "1.50 J" in text, "6 joules for 4 tokens"
    assert "energy" not in report.text_report(result_of(replace(run, energy_j=None)))


def test_a_comparison_is_printed_with_its_verdict(load_result: BenchResult) -> None:
    document = json.loads(json.dumps(report.summary_json(load_result)))
    text = report.comparison_text(compare.compare(document, document))
    assert "too few repeats to tell" in text
    assert "1.00×" in text


def test_axes_end_on_round_numbers_above_the_data() -> None:
    assert svg.Axis.to(87).ticks == [0, 25, 50, 75, 100]
    assert svg.Axis.to(0.3).top == pytest.approx(0.3)
    assert svg.Axis.to(0).ticks == [0, 0.5, 1]


def test_text_in_a_drawing_is_escaped() -> None:
    chart = Chart("a < b & c", "x", "y", (Series("<script>", "decode", ((1.0, 1.0), (2.0, 2.0))),))
    drawing = svg.charts('"quoted"', [chart])
    assert "<script>" not in drawing
    assert "a < b & c" in {entry.text for entry in elements(drawing, "text")}


def test_a_chart_of_nothing_is_nothing() -> None:
    assert text_chart(Chart("t", "x", "y", (Series("s", "decode", ()),))) == ""


def test_points_stand_where_they_belong() -> None:
    chart = Chart("t", "x", "y", (Series("s", "decode", ((0.0, 0.0), (10.0, 100.0))),))
    lines = text_chart(chart, width=21, height=5).splitlines()
    assert lines[1].endswith("┤" + " " * 20 + "o")
    assert lines[5].endswith("┤o")


def test_a_timeline_spans_from_the_first_to_the_last() -> None:
    lines = text_timeline([("A", [0.0, 5.0])], ("B", 2.5, 10.0), width=11).splitlines()
    assert lines[0] == "A ▮····▮·····"
    assert lines[1] == "B   ▯▯▯▯▯▯▯▯▯"


def test_the_environment_has_the_machine_and_its_state() -> None:
    machine = environment.machine()
    assert machine["cpu"]
    assert machine["memory_total_bytes"]
    assert environment.state()["load_average"]


def test_a_model_file_is_named_by_the_hash_of_its_head(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + b"\0" * 2_000_000)
    found = environment.model_file(path)
    assert found is not None
    assert (found["name"], found["size_bytes"]) == ("m.gguf", 2_000_004)
    path.write_bytes(b"GGUF" + b"\0" * 1_999_999 + b"x")
    assert environment.model_file(path) == found, "only the head is hashed"
    path.write_bytes(b"GGUX" + b"\0" * 2_000_000)
    assert environment.model_file(path) != found


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["bench", "--api-key=K1", "x"], "bench '--api-key=***' x"),
        (["bench", "--against-api-key", "K2", "x"], "bench --against-api-key '***' x"),
        (["bench", "--api-key"], "bench --api-key"),
        (["--url", "http://me:secret@h:1/v1"], "--url 'http://***@h:1/v1'"),
        (["--url=https://token@h", "x"], "'--url=https://***@h' x"),
        (["--vs=me:secret@h:1", "me:@h"], "'--vs=***@h:1' '***@h'"),
        (["name@revision", "--prompt", "lognormal:5:1"], "name@revision --prompt lognormal:5:1"),
    ],
)
def test_keys_do_not_get_into_the_command(arguments: list[str], shown: str) -> None:
    assert environment.command_line(arguments) == shown


@pytest.mark.parametrize(
    "more",
    [
        {"repeats": 0},
        {"duration_s": 0},
        {"streams": ()},
        {"rates_per_s": (0.0,)},
        {"warmup_s": -1},
        {"attainment_target": 1.5},
        {"depths": (-1,)},
        {"timeout_s": float("nan")},
    ],
)
def test_options_that_make_no_sense(more: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        BenchOptions("http://h", Scenario.LOAD, **more)
    with pytest.raises(UsageError):
        BenchOptions("http://h", Scenario.TRACE)


@pytest.mark.parametrize(
    ("against", "own", "used"),
    [
        ("http://h:2", None, "K"),
        ("http://other:1", None, None),
        ("http://other:1", "own", "own"),
        ("http://h:2", "own", "own"),
    ],
)
def test_a_key_is_not_sent_to_another_host(against: str, own: str | None, used: str | None) -> None:
    chosen = BenchOptions("http://h:1", Scenario.LOAD, against, api_key="K", against_api_key=own)
    assert chosen.key_against == used


def test_settings_are_public_but_keys_are_not() -> None:
    chosen = BenchOptions(
        "http://me:secret@h", Scenario.LOAD, api_key="K", prompt=Lengths.parse("5"), slo=SLO(ttft_s=1)
    )
    public = chosen.public()
    assert json.loads(json.dumps(public)) == public
    assert (public["prompt"], public["output"]) == ("5", "lognormal:64:0.4")
    bounds = {"ttft_s": 1, "ttft_token_s": None, "tpot_s": None, "itl_s": None, "e2e_s": None}
    assert public["slo"] == bounds
    assert public["url"] == "http://***@h"
    assert "K" not in json.dumps(public)
    assert "K" not in repr(chosen)
