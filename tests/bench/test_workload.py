"""What is sent and when: drawn from a seed, with the distribution that was asked for."""

from __future__ import annotations

import json
import random
import statistics
from itertools import pairwise
from pathlib import Path

import pytest

from edgeserve.bench import workload
from edgeserve.bench.workload import Arrivals, Lengths, Shape
from edgeserve.errors import UsageError


@pytest.mark.parametrize(
    "text", ["512", "128-1024", "lognormal:512:0.6", "90%64-192+10%1330", "50%7+50%lognormal:9:0.1"]
)
def test_lengths_are_written_as_they_are_read(text: str) -> None:
    assert str(Lengths.parse(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "0",
        "-5",
        "9-3",
        "1.5",
        "lognormal:512",
        "lognormal:512:nan",
        "normal:1:2",
        "9999999999",
        "90%5",
        "90%5+20%6",
        "-10%5+110%6",
        "x%5+10%6",
        "90%5+10%x",
        "nan%5+10%6",
        "50%5+50%50%6",
    ],
)
def test_what_is_no_length(text: str) -> None:
    with pytest.raises(UsageError):
        Lengths.parse(text)


def test_lengths_are_drawn_as_described() -> None:
    rng = random.Random(1)
    assert {Lengths.parse("7").draw(rng) for _ in range(5)} == {7}
    uniform = [Lengths.parse("10-20").draw(rng) for _ in range(500)]
    assert (min(uniform), max(uniform)) == (10, 20)
    lognormal = [Lengths.parse("lognormal:300:0.5").draw(rng) for _ in range(2000)]
    assert statistics.median(lognormal) == pytest.approx(300, rel=0.1)
    assert min(lognormal) >= 1
    assert Lengths.parse("10-20").typical == 15


def test_a_mix_has_each_part_by_its_share() -> None:
    mix = Lengths.parse("90%64-192+10%1330")
    rng = random.Random(2)
    drawn = [mix.draw(rng) for _ in range(2000)]
    assert sum(length == 1330 for length in drawn) == pytest.approx(200, rel=0.2)
    assert all(64 <= length <= 192 for length in drawn if length != 1330)
    assert mix.typical == 128


def gaps(arrivals: Arrivals, burstiness: float = 1.0) -> list[float]:
    times = workload.arrival_times_s(arrivals, 10.0, 400.0, random.Random(3), burstiness)
    return [later - earlier for earlier, later in pairwise(times)]


def test_arrivals_have_the_rate_and_the_spread_that_were_asked_for() -> None:
    def spread(values: list[float]) -> float:
        return statistics.stdev(values) / statistics.mean(values)

    constant, poisson = gaps(Arrivals.CONSTANT), gaps(Arrivals.POISSON)
    bursty, even = gaps(Arrivals.GAMMA, 0.25), gaps(Arrivals.GAMMA, 4.0)
    for drawn in (constant, poisson, bursty, even):
        assert statistics.mean(drawn) == pytest.approx(0.1, rel=0.1)
    assert spread(constant) == pytest.approx(0, abs=1e-6)
    assert spread(poisson) == pytest.approx(1, rel=0.1)
    # The coefficient of variation of gamma gaps is 1 / sqrt(shape).
    assert spread(bursty) == pytest.approx(2, rel=0.15)
    assert spread(even) == pytest.approx(0.5, rel=0.1)


def test_arrivals_stay_within_the_duration() -> None:
    for arrivals in Arrivals:
        times = workload.arrival_times_s(arrivals, 5.0, 3.0, random.Random(0), 0.5)
        assert times == sorted(times)
        assert all(0 <= at_s < 3.0 for at_s in times)


@pytest.mark.parametrize(("rate", "burstiness"), [(0, 1), (-1, 1), (float("inf"), 1), (1, 0)])
def test_rates_that_make_no_sense(rate: float, burstiness: float) -> None:
    with pytest.raises(UsageError):
        workload.arrival_times_s(Arrivals.GAMMA, rate, 1.0, random.Random(0), burstiness)


SHAPE = Shape(Lengths.parse("lognormal:200:0.5"), Lengths.parse("10-50"))


def test_the_same_seed_gives_the_same_plan_and_another_another() -> None:
    plan = workload.open_loop(SHAPE, Arrivals.POISSON, 4.0, 20.0, seed=1)
    assert plan == workload.open_loop(SHAPE, Arrivals.POISSON, 4.0, 20.0, seed=1)
    assert plan != workload.open_loop(SHAPE, Arrivals.POISSON, 4.0, 20.0, seed=2)


def test_another_rate_keeps_the_lengths() -> None:
    slow = workload.open_loop(SHAPE, Arrivals.POISSON, 1.0, 20.0, seed=1)
    fast = workload.open_loop(SHAPE, Arrivals.POISSON, 8.0, 20.0, seed=1)
    pairs = zip(slow, fast, strict=False)
    assert all(one.num_prompt_tokens == other.num_prompt_tokens for one, other in pairs)
    assert len(fast) > len(slow)


def test_a_shared_prefix_comes_on_top() -> None:
    shape = Shape(Lengths.parse("100"), Lengths.parse("5"), shared_prefix_tokens=400)
    (plan,) = workload.closed_loop(shape, 1, seed=0)
    assert (plan.num_prompt_tokens, plan.shared_prefix_tokens, plan.at_s) == (500, 400, None)


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    return path


def test_a_trace_is_sorted_and_read_in_both_formats(tmp_path: Path) -> None:
    own = {"at_s": 2.5, "prompt_tokens": 30, "max_tokens": 4, "shared_prefix_tokens": 10}
    mooncake = {"timestamp": 500, "input_length": 900, "output_length": 7, "hash_ids": [3, 4]}
    first, second = workload.read_trace(write(tmp_path / "t.jsonl", own, mooncake))
    assert (first.at_s, first.num_prompt_tokens, first.max_tokens, first.block_ids) == (0.5, 900, 7, (3, 4))
    assert (second.at_s, second.num_prompt_tokens, second.shared_prefix_tokens) == (2.5, 30, 10)


@pytest.mark.parametrize(
    "line",
    [
        {"at_s": 0},
        {"at_s": -1, "prompt_tokens": 1, "max_tokens": 1},
        {"at_s": 0, "prompt_tokens": 0, "max_tokens": 1},
        {"at_s": "soon", "prompt_tokens": 1, "max_tokens": 1},
        [1, 2],
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: object) -> None:
    good = {"at_s": 0, "prompt_tokens": 1, "max_tokens": 1}
    with pytest.raises(UsageError, match="Line 2"):
        workload.read_trace(write(tmp_path / "t.jsonl", good, line))


def test_a_trace_without_requests_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        workload.read_trace(write(tmp_path / "t.jsonl"))
    with pytest.raises(UsageError):
        workload.read_trace(tmp_path / "missing.jsonl")
