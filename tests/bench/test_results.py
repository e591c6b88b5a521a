"""Repeats summed up, results compared, conditions checked."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from edgeserve.bench import compare
from edgeserve.bench.figures import Run, RunFigures
from edgeserve.bench.results import BenchResult, CaseResult, Spread, sum_up, summary_json
from edgeserve.bench.steadiness import Steadiness, Trend
from edgeserve.bench.tables import spread_text
from edgeserve.bench.thresholds import Condition, check_thresholds
from edgeserve.errors import ThresholdMissedError, UsageError
from edgeserve.ink import format_ms

RISING = Steadiness(Trend(2.0, 9.0), Trend(2.0, 9.0))


def case(
    label: str = "poisson 2/s",
    *,
    rate: float | None = 2.0,
    target: str = "A",
    steadiness: Steadiness | None = None,
    **values: Sequence[float | None],
) -> list[tuple[Run, RunFigures]]:
    """Runs of one case, a repeat for each value of the figures."""
    num_repeats = max(len(series) for series in values.values())
    made = []
    for repeat in range(num_repeats):
        run = Run(label, "load", "open loop", target, repeat, (0.0, 1.0), (), rate)
        figures = {name: series[repeat] for name, series in values.items()}
        made.append((run, RunFigures(figures, steadiness=steadiness)))
    return made


def result(*groups: list[tuple[Run, RunFigures]], **more: Any) -> BenchResult:
    runs = [pair for group in groups for pair in group]
    fields: dict[str, Any] = {
        "scenario": "load",
        "started_at": "2026-01-01T00:00:00+00:00",
        "command": "edgeserve bench load",
        "options": {"scenario": "load", "seed": 0, "repeats": 3},
        "environment": {"client": {"cpu": "x", "os": "y"}},
        "servers": {"A": "http://a"},
        "cases": sum_up(runs),
        "runs": tuple(run for run, _ in runs),
    }
    return BenchResult(**(fields | more))


def only(found: BenchResult) -> CaseResult:
    (single,) = found.cases
    return single


def test_repeats_become_a_median_with_an_interval() -> None:
    spread = only(result(case(ttft_p50_s=[1.0, 5.0, 2.0]))).spreads["ttft_p50_s"]
    assert spread.median == 2.0
    assert 1.0 <= spread.low <= spread.median <= spread.high <= 5.0
    assert spread.values == (1.0, 5.0, 2.0)


def test_two_repeats_have_a_range_and_no_interval() -> None:
    assert Spread.of([3.0, 1.0]) == Spread(2.0, 1.0, 3.0, (3.0, 1.0))
    assert Spread.of([3.0]).low == 3.0


def test_many_equal_repeats_have_a_narrow_interval() -> None:
    spread = Spread.of([10.0] * 9 + [50.0])
    assert (spread.low, spread.median, spread.high) == (10.0, 10.0, 10.0)


def test_a_figure_that_one_repeat_lacks_is_not_a_median_of_the_others() -> None:
    found = only(result(case(ttft_p50_s=[1.0, None, 1.0])))
    assert "ttft_p50_s" not in found.spreads
    assert found.median("ttft_p50_s") is None


def test_spreads_are_written_with_their_unit_once() -> None:
    assert spread_text(Spread(0.0131, 0.0129, 0.0134, ()), format_ms) == "13.1 ms (12.9–13.4)"
    assert spread_text(Spread(9.0, 8.0, 12.0, ()), format_ms) == "9,000 ms (8,000 ms–12.0 s)"
    assert spread_text(Spread(1.0, 1.0, 1.0, ()), format_ms) == "1,000 ms"
    assert spread_text(None, format_ms) == "n/a"


def test_capacity_is_the_highest_rate_that_keeps_the_objective() -> None:
    found = result(
        case("1", rate=1.0, attainment=[1.0]),
        case("2", rate=2.0, attainment=[0.95]),
        case("4", rate=4.0, attainment=[0.5]),
        case("8", rate=8.0, attainment=[0.99], steadiness=RISING),
    )
    assert found.capacity_per_s() == 2.0
    assert result(case(attainment=[0.2])).capacity_per_s() is None


def test_the_document_can_be_read_back_and_compared(tmp_path: Path) -> None:
    document = summary_json(result(case(ttft_p50_s=[1.0, 1.1, 0.9])))
    path = tmp_path / "summary.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    assert compare.read_summary(path) == json.loads(json.dumps(document))


@pytest.mark.parametrize("content", ["", "[]", '{"schema": "other/1"}', "{"])
def test_what_is_no_summary_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(UsageError):
        compare.read_summary(path)
    with pytest.raises(UsageError):
        compare.read_summary(tmp_path / "missing.json")


def documents(a: Sequence[float], b: Sequence[float]) -> tuple[dict[str, Any], dict[str, Any]]:
    return summary_json(result(case(tpot_p50_s=a))), summary_json(result(case(tpot_p50_s=b)))


def test_a_clear_difference_stands_out_and_noise_does_not() -> None:
    (row,) = compare.compare(*documents([1.0, 1.01, 0.99, 1.0], [2.0, 2.02, 1.98, 2.0])).rows
    assert row.ratio.value == pytest.approx(2.0)
    assert row.ratio.is_within_noise is False
    (row,) = compare.compare(*documents([1.0, 1.3, 0.8, 1.1], [1.05, 0.9, 1.2, 1.0])).rows
    assert row.ratio.is_within_noise is True


def test_too_few_repeats_allow_no_judgement() -> None:
    (row,) = compare.compare(*documents([1.0, 1.0], [2.0, 2.0])).rows
    assert row.ratio.value == 2.0
    assert row.ratio.is_within_noise is None


def test_results_of_different_workloads_are_compared_with_a_warning() -> None:
    one, other = documents([1.0], [2.0])
    other["options"] = {"scenario": "load", "seed": 7}
    other["environment"] = {"client": {"cpu": "z", "os": "y"}}
    other["is_partial"] = True
    warnings = compare.compare(one, other).warnings
    assert any("seed differs: 0 and 7" in warning for warning in warnings)
    assert any("different machines: x and z" in warning for warning in warnings)
    assert any("second result is partial" in warning for warning in warnings)


def test_nothing_in_common_is_an_error() -> None:
    one = summary_json(result(case("one", tpot_p50_s=[1.0])))
    other = summary_json(result(case("two", tpot_p50_s=[1.0])))
    with pytest.raises(UsageError):
        compare.compare(one, other)


@pytest.mark.parametrize(
    ("text", "name", "bound"),
    [
        ("ttft_p95>2s", "ttft_p95", 2.0),
        (" tpot_p50 >= 80 ms ", "tpot_p50", 0.08),
        ("attainment<95%", "attainment", 0.95),
        ("output_tok_s<50tok/s", "output_tok_s", 50.0),
        ("failed>0", "failed", 0.0),
        ("gap_max>.5s", "gap_max", 0.5),
    ],
)
def test_conditions_are_read(text: str, name: str, bound: float) -> None:
    condition = Condition.parse(text)
    assert (condition.figure, condition.case) == (name, None)
    assert condition.bound == pytest.approx(bound)


def test_a_condition_may_name_its_case() -> None:
    condition = Condition.parse("poisson 4/s: ttft_p95 > 2 s")
    assert (condition.case, condition.figure) == ("poisson 4/s", "ttft_p95")


@pytest.mark.parametrize("text", ["", "ttft", "ttft>", ">2s", "ttft=2", "ttft>2h", "ttft>2s extra", "a b>1"])
def test_what_is_no_condition(text: str) -> None:
    with pytest.raises(UsageError):
        Condition.parse(text)


def check(found: BenchResult, *texts: str) -> None:
    check_thresholds(found, [Condition.parse(text) for text in texts])


def test_thresholds_that_hold_and_do_not() -> None:
    found = result(case(ttft_p95_s=[1.5], attainment=[0.9]))
    check(found, "ttft_p95>2s", "attainment<80%")
    with pytest.raises(ThresholdMissedError) as caught:
        check(found, "ttft_p95>1s", "attainment<95%")
    assert caught.value.exit_code == 5
    assert "ttft_p95>1s" in caught.value.message
    assert "attainment<95%" in caught.value.message


def test_a_figure_that_could_not_be_measured_misses_its_threshold() -> None:
    with pytest.raises(ThresholdMissedError, match="could not be measured"):
        check(result(case(ttft_p99_s=[None])), "ttft_p99>2s")


def test_an_unknown_figure_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(UsageError, match="ttft_p95_s"):
        check(result(case(ttft_p95_s=[1.0])), "tfft_p95>2s")


def test_only_the_named_case_is_judged() -> None:
    found = result(case("poisson 1/s", ttft_p95_s=[1.0]), case("poisson 4/s", ttft_p95_s=[9.0]))
    check(found, "poisson 1/s: ttft_p95 > 2 s")
    with pytest.raises(ThresholdMissedError):
        check(found, "poisson 4/s: ttft_p95 > 2 s")
