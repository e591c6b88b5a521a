"""The real scheduler over a step model: fits, whole runs, and what must hold of any of them."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from edgeserve.bench.options import BenchOptions, Scenario
from edgeserve.bench.runner import Outcome
from edgeserve.bench.simulate import Machine, Simulation
from edgeserve.bench.simulated_result import simulate
from edgeserve.bench.step_model import StepModel, from_engine_bench, from_figures, from_prediction
from edgeserve.bench.workload import Lengths, Planned
from edgeserve.cli import main
from edgeserve.errors import UsageError

# 10 ms a step, 1 ms for each stream; prompts at 500 tokens a second in large pieces, 250 in small ones.
MODEL = StepModel(fixed_s=0.009, each_s=0.001, depth_s=0.0, prefill_s={32: 0.004, 512: 0.002})


def run(planned: list[Planned], users: int = 1, model: StepModel = MODEL, **machine: Any) -> Simulation:
    simulation = Simulation(Machine(**machine), model)
    simulation.closed_loop(planned, users)
    return simulation


def requests(count: int, prompt: int = 200, output: int = 20, **more: Any) -> list[Planned]:
    return [Planned(index, prompt, output, **more) for index in range(count)]


# --- the cost of a step ------------------------------------------------------------------------------------


def engine_document(n_batch: int, fixed: float, each: float, depth: float, token: float) -> dict[str, Any]:
    """Rows that obey the formula exactly."""
    rows = []
    for pp in (64, 512):
        for pl in (1, 4):
            step_s = fixed + each * pl + depth * pl * (pp + 8)
            t_pp = pp * pl * (token + depth * pp / 2)
            rows.append({"pp": pp, "tg": 16, "pl": pl, "t_pp": t_pp, "t_tg": 16 * step_s})
    return {"schema": "edgeserve-engine-bench/1", "n_batch": n_batch, "model": "m", "rows": rows}


def test_the_fit_finds_the_costs_that_rows_were_made_from() -> None:
    documents = [
        engine_document(32, 0.008, 0.002, 3e-6, 0.004),
        engine_document(2048, 0.008, 0.002, 3e-6, 0.002),
    ]
    model = from_engine_bench(documents)
    assert (model.fixed_s, model.each_s) == (pytest.approx(0.008, rel=1e-3), pytest.approx(0.002, rel=1e-3))
    assert model.depth_s == pytest.approx(3e-6, rel=1e-3)
    assert model.prefill_s[32] == pytest.approx(0.004, rel=1e-3)
    assert model.prefill_s[2048] == pytest.approx(0.002, rel=1e-3)


def test_no_cost_is_fitted_below_zero() -> None:
    document = engine_document(512, 0.010, 0.0, 0.0, 0.002)
    document["rows"][3]["t_tg"] *= 0.8  # batching and depth that seem to make a step cheaper
    model = from_engine_bench([document])
    assert min(model.fixed_s, model.each_s, model.depth_s) >= 0
    assert model.fixed_s > 0


def test_a_step_with_both_pays_for_the_weights_once() -> None:
    decode_s = MODEL.step_s([100, 100], [])
    assert decode_s == pytest.approx(0.011)
    alone_s = MODEL.step_s([], [(32, 0)])
    assert alone_s == pytest.approx(32 * 0.004)
    assert MODEL.step_s([100, 100], [(32, 0)]) == pytest.approx(alone_s + 0.002)


def test_prompt_costs_lie_between_the_sizes_measured() -> None:
    assert MODEL.prefill_token_s(32) == pytest.approx(0.004)
    assert MODEL.prefill_token_s(512) == pytest.approx(0.002)
    assert MODEL.prefill_token_s(4096) == pytest.approx(0.002)
    assert 0.002 < MODEL.prefill_token_s(128) < 0.004
    # One token is a step of its own, whatever a piece of 32 costs per token.
    assert MODEL.prefill_token_s(1) == pytest.approx(0.010)


def test_depth_costs_decode_and_prompts() -> None:
    deep = StepModel(0.009, 0.001, 1e-6, {512: 0.002})
    assert deep.step_s([1000], []) - deep.step_s([0], []) == pytest.approx(1e-3)
    assert deep.step_s([], [(512, 1000)]) - deep.step_s([], [(512, 0)]) == pytest.approx(0.512)


def test_a_prediction_is_as_good_a_source() -> None:
    model = from_prediction(lambda num, resident: 0.01 + 0.001 * num, lambda size: 0.003, "x")
    assert (model.fixed_s, model.each_s) == (pytest.approx(0.01), pytest.approx(0.001))
    assert model.prefill_token_s(100) == pytest.approx(0.003)


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"schema": "edgeserve-bench/1", "cases": []},
        {"schema": "edgeserve-engine-bench/1", "rows": []},
        {"schema": "edgeserve-engine-bench/1", "rows": [{}], "is_pp_shared": True},
    ],
)
def test_other_documents_are_refused(document: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        from_engine_bench([document])


def test_figures_that_cannot_be_are_refused() -> None:
    for figures in ((10.0, 0.0, 0.0, 0.0), (10.0, 300.0, 20.0, 0.0)):
        with pytest.raises(UsageError):
            from_figures(*figures)


# --- whole runs --------------------------------------------------------------------------------------------


def test_one_request_alone_takes_what_its_steps_cost() -> None:
    """512 prompt tokens in known pieces, then 9 further tokens."""
    (record,) = run(requests(1, prompt=512, output=10), prefill_chunk=512).records
    assert record.stamps_s[0] == pytest.approx(512 * 0.002)
    gaps = [b - a for a, b in pairwise(record.stamps_s)]
    assert gaps == pytest.approx([0.010] * 9)
    assert record.usage is not None
    assert (record.usage.prompt_tokens, record.usage.completion_tokens) == (512, 10)


def test_every_request_ends_with_all_its_tokens() -> None:
    simulation = run(requests(30), users=7, n_seq_max=3)
    assert len(simulation.records) == 30
    assert all(record.is_ok and len(record.stamps_s) == 20 for record in simulation.records)
    assert all(list(record.stamps_s) == sorted(record.stamps_s) for record in simulation.records)
    assert 0 < simulation.busy_s <= simulation.now_s


def test_the_same_run_gives_the_same_times() -> None:
    one, two = (run(requests(12), users=4) for _ in range(2))
    assert [record.stamps_s for record in one.records] == [record.stamps_s for record in two.records]


def longest_gap_s(simulation: Simulation) -> float:
    stamps = [record.stamps_s for record in simulation.records]
    return max(b - a for line in stamps for a, b in pairwise(line))


def late_ttft_s(simulation: Simulation) -> float:
    record = max(simulation.records, key=lambda record: record.num_planned_prompt_tokens)
    return record.stamps_s[0] - record.arrival_s


def test_a_gap_target_trades_gaps_for_the_first_token() -> None:
    """A stream decodes when a long prompt comes."""
    planned = [Planned(0, 32, 200, at_s=0.0), Planned(1, 1500, 8, at_s=1.0)]
    found = []
    for target_ms in (60.0, 400.0):
        simulation = Simulation(Machine(itl_target_ms=target_ms), MODEL)
        simulation.open_loop(planned)
        found.append((longest_gap_s(simulation), late_ttft_s(simulation)))
    (small_gap, slow_first), (large_gap, fast_first) = found
    assert small_gap < large_gap
    assert slow_first > fast_first


def test_a_full_queue_refuses_and_a_prompt_too_long_is_an_error() -> None:
    simulation = Simulation(Machine(n_seq_max=1, n_ctx=512, max_waiting=2), MODEL)
    planned = [Planned(index, 100, 20, at_s=0.001) for index in range(6)]
    simulation.open_loop([*planned, Planned(6, 600, 20, at_s=0.002)])
    outcomes = [record.outcome for record in simulation.records]
    # One runs, two wait; the cell that is too small is another matter.
    assert outcomes.count(Outcome.OK) == 3
    assert outcomes.count(Outcome.REJECTED) == 3
    assert [record.code for record in simulation.records if record.outcome is Outcome.ERROR] == [
        "context_length_exceeded"
    ]


def test_who_waits_too_long_is_told_so() -> None:
    simulation = Simulation(Machine(n_seq_max=1, max_queue_s=1.0), MODEL)
    simulation.open_loop([Planned(index, 200, 100, at_s=0.0) for index in range(4)])
    codes = [record.code for record in simulation.records]
    assert codes.count("queue_timeout") >= 1
    assert sum(record.is_ok for record in simulation.records) + codes.count("queue_timeout") == 4


def test_only_a_shared_prefix_is_found_in_the_cache() -> None:
    cold = run(requests(6), users=1)
    assert {record.num_cached_tokens for record in cold.records} == {0}
    warm = run(requests(6, prompt=300, shared_prefix_tokens=200), users=1)
    assert [record.num_cached_tokens for record in warm.records] == [0, 200, 200, 200, 200, 200]
    assert (
        warm.records[1].stamps_s[0] - warm.records[1].sent_s
        < cold.records[1].stamps_s[0] - cold.records[1].sent_s
    )


# --- results -----------------------------------------------------------------------------------------------


def options(scenario: Scenario, **more: Any) -> BenchOptions:
    lengths = {"prompt": Lengths.parse("200"), "output": Lengths.parse("20")}
    return BenchOptions("simulated", scenario, repeats=1, **lengths, **more)


def test_a_rate_beyond_the_machine_is_saturated_and_below_it_is_not() -> None:
    wanted = options(Scenario.LOAD, rates_per_s=(0.3, 20.0), duration_s=40.0)
    slow, fast = simulate(wanted, Machine(max_waiting=10_000), MODEL, ["x"]).cases
    assert not slow.is_saturated
    assert (slow.median("attainment") or 0) > 0.9
    assert fast.is_saturated
    assert (fast.median("attainment") or 0) < 0.5


def test_throughput_rises_with_users_until_the_slots_are_full() -> None:
    """Short prompts: long ones in small pieces beside running streams can cost what batching saves."""
    wanted = replace(
        options(Scenario.CLOSED, concurrency=(1, 4, 16)),
        prompt=Lengths.parse("32"),
        output=Lengths.parse("200"),
    )
    one, four, many = simulate(wanted, Machine(n_seq_max=4), MODEL, ["x"]).cases
    rates = [case.median("output_tok_s") or 0 for case in (one, four, many)]
    assert rates[0] < rates[1]
    assert rates[2] == pytest.approx(rates[1], rel=0.1)
    assert (many.median("ttft_p50_s") or 0) > 2 * (four.median("ttft_p50_s") or 0)


# --- the command -------------------------------------------------------------------------------------------

FIGURES = ("--decode-ms", "10", "--prefill-tok-s", "500")


def test_a_simulation_is_a_benchmarks_result(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    command = ["simulate", *FIGURES, "--users", "1,3", "--prompt", "100", "--output-tokens", "8", "-np", "2"]
    assert main([*command, "--json", "--out", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "edgeserve-bench/1"
    assert [case["label"] for case in found["cases"]] == ["closed loop, 1 client", "closed loop, 3 clients"]
    assert found["simulated"]["machine"]["n_seq_max"] == 2
    assert found["servers"]["A"].startswith("simulated")
    assert main(["bench", "compare", str(tmp_path), str(tmp_path)]) == 0
    assert "1.00×" in capsys.readouterr().out


def test_measured_rows_are_a_source(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "engine.json").write_text(json.dumps(engine_document(512, 0.008, 0.002, 0.0, 0.002)))
    assert main(["simulate", "--rows", str(tmp_path), "--rate", "0.5", "--duration", "20"]) == 0
    assert "4 rows measured with m" in capsys.readouterr().out


def test_a_profile_is_a_source(model_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        "simulate",
        str(model_path),
        "--device",
        "MacBook Air M2 16 GB",
        "--users",
        "1",
        "--prompt",
        "64",
    ]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "M2" in found["servers"]["A"]
    assert found["simulated"]["step_model"]["fixed_s"] > 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "nothing says what a step costs"),
        ([*FIGURES, "--device", "M2"], "--device and --decode-ms"),
        (["--decode-ms", "10"], "--prefill-tok-s"),
        ([*FIGURES, "--users", "2", "--rate", "1"], "two kinds of load"),
        ([*FIGURES, "-np", "0"], "at least 1"),
        (["--rows", "/no/such/file.json"], "cannot be read"),
    ],
)
def test_what_cannot_be_simulated(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *arguments]) == 2
    assert said in capsys.readouterr().err
