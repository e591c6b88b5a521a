"""From symptom to cause: one provoking observation for each rule, and a healthy one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mock_openai import MockServer

from edgeserve.cli import main
from edgeserve.doctor.diagnosis import RULES, Diagnosis, diagnose, has_evidence
from edgeserve.doctor.from_bench import observe_bench
from edgeserve.doctor.observed import Observed, Queue
from edgeserve.doctor.scrape import Scrape, observe, quantile_of, read_scrape
from edgeserve.doctor.server_check import report_lines
from edgeserve.engine.request import EngineStats, RequestTimings
from edgeserve.errors import UsageError
from edgeserve.ink import Ink
from edgeserve.server.metrics_export import Metrics

HEALTHY = Observed(
    window_s=10.0,
    num_requests=40,
    num_rejected=0,
    num_waiting_first=0,
    num_waiting_last=0,
    num_running=1.0,
    num_slots=4,
    ttft_s=0.4,
    queue_s=0.02,
    queue_share=0.05,
    ttft_miss_s=0.6,
    num_misses=20,
    ttft_hit_s=0.1,
    num_hits=20,
    hit_prompt_tokens=800,
    hit_cached_tokens=700,
    prefill_tok_s=300.0,
    mean_prompt_tokens=400.0,
    num_gaps=2000,
    gap_p50_s=0.02,
    gap_p99_s=0.03,
    stalled_share=0.02,
    busy_share=0.8,
    decodes_per_step=2.0,
    sample_share=0.03,
    output_tok_s=60.0,
    cells_total=4096,
    cells_used=1000,
    cells_cached=500,
    num_evicted_tokens=0,
    num_looked_up_tokens=16000,
    shallow_tokens=64,
    shallow_tpot_s=0.02,
    deep_tokens=2048,
    deep_tpot_s=0.022,
    attainment=1.0,
    attainment_target=0.9,
    is_saturated=False,
    itl_target_s=0.1,
    settings={"type_k": "f16", "type_v": "f16"},
)

PROVOKING: dict[str, dict[str, Any]] = {
    "slow prefill": {"ttft_miss_s": 6.0},
    "queueing": {"ttft_s": 5.0, "queue_s": 4.5, "queue_share": 0.9},
    "waiting": {"queue": Queue(2, "9be2", "812 KV cells", 1.5, 812, 64)},
    "stalls": {"gap_p99_s": 0.4, "stalled_share": 0.3},
    "idle machine": {"busy_share": 0.3},
    "overload": {"busy_share": 0.98, "num_waiting_first": 3, "num_waiting_last": 12},
    "full cells": {"cells_used": 4000},
    "useless hits": {"ttft_hit_s": 0.6},
    "cold prompts": {"num_misses": 40},
    "slow at depth": {"deep_tpot_s": 0.05},
}


def only(seen: Observed) -> Diagnosis:
    (found,) = diagnose(seen)
    return found


def test_a_healthy_server_is_called_healthy() -> None:
    assert diagnose(HEALTHY) == []
    (line,) = report_lines(HEALTHY, [], Ink(False))
    assert "healthy" in line
    assert "40 requests" in line


def test_every_rule_has_an_observation_that_provokes_it() -> None:
    assert len(PROVOKING) == len(RULES)


@pytest.mark.parametrize("rule", PROVOKING)
def test_a_symptom_has_its_cause_and_nothing_else_is_said(rule: str) -> None:
    found = only(replace(HEALTHY, **PROVOKING[rule]))
    assert found.rule == rule
    assert found.remedy
    assert found.expect
    assert len(found.figures) >= 2, "a finding names the figures that it rests on"


@pytest.mark.parametrize("rule", PROVOKING)
def test_without_a_figure_nothing_is_said(rule: str) -> None:
    """Of the figures that provoke a rule, the lack of any one silences it."""
    for name in PROVOKING[rule]:
        changes = {**PROVOKING[rule], name: None}
        assert rule not in [found.rule for found in diagnose(replace(HEALTHY, **changes))], name
    assert diagnose(Observed()) == []
    assert not has_evidence(Observed())


@pytest.mark.parametrize(
    ("rule", "changes", "said"),
    [
        ("idle machine", {"sample_share": 0.4}, "40 % of the step time goes into drawing"),
        ("overload", {"busy_share": 0.95, "num_rejected": 7}, "More is asked"),
        ("overload", {"is_saturated": True}, "More is asked"),
        ("overload", {"attainment": 0.5}, "More is asked"),
        ("full cells", {"num_evicted_tokens": 9000, "cells_cached": 3000}, "gave up 9,000 tokens"),
        ("useless hits", {"ttft_hit_s": 0.6, "hit_cached_tokens": 40.0}, "what is found is short"),
    ],
)
def test_other_ways_to_the_same_cause(rule: str, changes: dict[str, Any], said: str) -> None:
    found = only(replace(HEALTHY, **changes))
    assert found.rule == rule
    assert said in found.sentence


@pytest.mark.parametrize(
    "changes",
    [
        {"num_evicted_tokens": 9000},
        {"busy_share": 1.0, "num_waiting_first": 0, "num_waiting_last": 4},
        {"gap_p99_s": 0.4, "stalled_share": 0.01},
        {"ttft_miss_s": 6.0, "queue_share": 0.4},
        {"busy_share": 1.0, "num_waiting_first": 2, "num_waiting_last": 4},
        {"num_misses": 40, "mean_prompt_tokens": 30.0},
        {"queue": Queue(0)},
    ],
    ids=[
        "slots taken over",
        "a queue that begins",
        "gaps without prompts",
        "partly queue",
        "a queue that comes and goes",
        "short prompts",
        "nobody waits",
    ],
)
def test_what_only_resembles_a_symptom_is_not_one(changes: dict[str, Any]) -> None:
    assert diagnose(replace(HEALTHY, **changes)) == []


def test_stalls_too_rare_for_a_percentile_show_in_the_mean() -> None:
    """Two gaps of two seconds among two hundred of 12 ms, as prompts computed whole leave them."""
    rare = replace(HEALTHY, num_gaps=201, gap_p99_s=0.03, gap_mean_s=0.032, stalled_share=0.6)
    [found] = diagnose(rare)
    assert found.rule == "stalls"
    assert "32.0 ms on average" in found.sentence
    even = replace(rare, gap_p50_s=0.03)
    assert diagnose(even) == [], "slow, but evenly so"


def test_more_sequences_are_not_suggested_where_no_cells_are_left() -> None:
    queueing = PROVOKING["queueing"]
    assert "-np" in only(replace(HEALTHY, **queueing)).remedy
    busy = only(replace(HEALTHY, **queueing, busy_share=0.99))
    assert "computes all the time" in busy.remedy
    full = diagnose(replace(HEALTHY, **queueing, cells_used=4000))
    assert "find no cells" in next(found for found in full if found.rule == "queueing").remedy


def test_who_waits_and_for_what_comes_with_the_remedy_for_that() -> None:
    found = only(replace(HEALTHY, **PROVOKING["waiting"]))
    assert found.sentence == "9be2 waits for 812 KV cells, and 1 behind it."
    assert found.remedy.startswith("A larger -c")
    assert found.level == "problem"
    assert found.figures["its prompt"] == "812 tokens"
    briefly = only(replace(HEALTHY, queue=Queue(1, "9be2", "a free sequence", 0.2)))
    assert briefly.level == "note"
    assert "-np" in briefly.remedy
    assert only(replace(HEALTHY, queue=Queue(3))).sentence == "3 requests wait in the server's queue."


def test_stalls_name_the_prompts_and_are_no_problem_within_the_target() -> None:
    changes = {**PROVOKING["stalls"], "prefilling": ("77c0",)}
    found = only(replace(HEALTHY, **changes))
    assert "the prompt of 77c0" in found.sentence
    assert found.level == "problem"
    kept = only(replace(HEALTHY, **changes, itl_target_s=0.5))
    assert kept.level == "note"
    assert "keeps the target" in kept.remedy


def test_what_to_expect_is_computed_from_the_figures() -> None:
    assert "save 333 ms" in only(replace(HEALTHY, ttft_miss_s=6.0)).expect
    depth = only(replace(HEALTHY, shallow_tokens=1000, deep_tokens=3000, deep_tpot_s=0.05))
    assert "save about 15.0 ms a token" in depth.expect


def test_too_few_requests_are_no_health() -> None:
    seen = Observed(window_s=10.0, num_requests=1)
    (line,) = report_lines(seen, diagnose(seen), Ink(False))
    assert "fewer than the 3" in line
    assert "healthy" not in line


# --- figures from two scrapes ------------------------------------------------------------------------------


def test_a_quantile_lies_within_its_bucket() -> None:
    buckets = [(0.1, 50.0), (0.2, 90.0), (float("inf"), 100.0)]
    assert quantile_of(buckets, 0.5) == pytest.approx(0.1)
    assert quantile_of(buckets, 0.7) == pytest.approx(0.15)
    assert quantile_of(buckets, 0.99) == 0.2
    assert quantile_of([(0.1, 0.0), (float("inf"), 0.0)], 0.5) is None


def timings(ttft_s: float, queue_s: float, num_cached: int = 0) -> RequestTimings:
    return RequestTimings(
        num_prompt_tokens=200,
        num_cached_tokens=num_cached,
        num_evaluated_tokens=200 - num_cached,
        num_output_tokens=21,
        queue_s=queue_s,
        prefill_s=ttft_s - queue_s,
        decode_s=2.0,
        stalled_s=0.5,
        ttft_s=ttft_s,
    )


STATS = EngineStats(
    num_slots=4,
    n_ctx=4096,
    num_used_cells=600,
    num_cached_cells=100,
    num_prompt_tokens_total=1000,
    prefill_s_total=2.0,
    steps_total={"decode": 10},
    step_s_total={"decode": 3.0},
)


def scrapes() -> tuple[Scrape, Scrape]:
    """Six requests in ten seconds, after one that must not count."""
    current = [STATS]
    metrics = Metrics(lambda: current[0])
    metrics.observe_choice(timings(90.0, 80.0), is_complete=True)
    slots = [{"id": 0, "is_processing": True, "id_task": 7}, {"id": 1, "is_processing": False}]
    first = read_scrape(100.0, metrics.render().decode(), slots)
    for _ in range(3):
        metrics.observe_choice(timings(2.0, 1.5), is_complete=True)
        metrics.observe_choice(timings(1.0, 0.5, num_cached=180), is_complete=True)
    for gap_s in [0.012] * 90 + [0.4] * 10:
        metrics.observe_gap(timings(2.0, 1.5), gap_s)
    current[0] = replace(
        STATS,
        num_prompt_tokens_total=1660,
        num_cached_tokens_total=60,
        prefill_s_total=4.0,
        num_output_tokens_total=120,
        sample_s_total=0.8,
        steps_total={"decode": 50, "mixed": 20},
        step_s_total={"decode": 6.0, "mixed": 5.0},
        num_evicted_tokens_total=30,
    )
    props = {"engine": {"itl_target_ms": 150.0, "n_seq_max": 2}}
    return first, read_scrape(110.0, metrics.render().decode(), slots, props)


def test_two_scrapes_give_the_figures_of_the_window_between_them() -> None:
    seen = observe(*scrapes())
    assert (seen.window_s, seen.num_requests, seen.num_misses, seen.num_hits) == (10.0, 6, 3, 3)
    assert (seen.ttft_s, seen.ttft_miss_s, seen.ttft_hit_s) == (1.5, 2.0, 1.0)
    assert seen.queue_share == pytest.approx(1.0 / 1.5)
    assert (seen.hit_prompt_tokens, seen.hit_cached_tokens) == (200, 180)
    assert seen.prefill_tok_s == pytest.approx(300.0)
    assert seen.stalled_share == pytest.approx(0.25)
    assert seen.busy_share == pytest.approx(0.8)
    assert seen.sample_share == pytest.approx(0.1)
    assert seen.decodes_per_step == pytest.approx(2.0)
    assert (seen.num_gaps, seen.num_running, seen.num_slots) == (100, 1.0, 2)
    assert 0.01 <= (seen.gap_p50_s or 0) <= 0.015
    assert 0.3 <= (seen.gap_p99_s or 0) <= 0.5
    assert (seen.cells_total, seen.cells_used, seen.cells_cached) == (4096, 500, 100)
    assert seen.num_evicted_tokens == 30
    assert seen.itl_target_s == pytest.approx(0.15)


def test_a_task_that_changed_did_not_run_through() -> None:
    first, last = scrapes()
    assert observe(first, replace(last, running=frozenset({8}))).num_running == 0.0


def test_llama_server_tells_less_and_nothing_is_made_up() -> None:
    pages = [
        f"llamacpp:prompt_tokens_total {prompt}\nllamacpp:prompt_seconds_total {seconds}\n"
        f"llamacpp:requests_deferred {waiting}\n"
        for prompt, seconds, waiting in ((100, 1.0, 0), (400, 2.0, 5))
    ]
    first, last = (read_scrape(at_s, page) for at_s, page in zip((0.0, 10.0), pages, strict=True))
    seen = observe(first, last)
    assert seen.prefill_tok_s == pytest.approx(300.0)
    assert (seen.num_waiting_first, seen.num_waiting_last) == (0, 5)
    assert (seen.ttft_s, seen.busy_share, seen.gap_p99_s, seen.num_requests) == (None, None, None, None)
    assert diagnose(seen) == []


# --- figures from a benchmark ------------------------------------------------------------------------------


def case(kind: str, label: str = "", is_saturated: bool = False, **figures: float) -> dict[str, Any]:
    spreads = {name: {"median": value} for name, value in figures.items()}
    return {
        "kind": kind, "label": label or kind, "server": "A", "is_saturated": is_saturated,
        "figures": spreads, "repeats": [{}, {}, {}],
    }  # fmt: skip


def summary(*cases: dict[str, Any]) -> dict[str, Any]:
    return {"schema": "edgeserve-bench/1", "cases": list(cases), "options": {"attainment_target": 0.9}}


@pytest.mark.parametrize(
    ("document", "rule"),
    [
        (summary(case("load", offered=30, attainment=0.4, is_saturated=True)), "overload"),
        (
            summary(
                case(
                    "stall", ok=3, a_gap_before_p50_s=0.02, a_gap_p50_s=0.1, a_gap_max_s=0.5, a_gaps=80
                )
            ),
            "stalls",
        ),
        (
            summary(
                case("depth", "decode at depth 64", ok=1, tpot_p50_s=0.02),
                case("depth", "decode at depth 2,048", ok=1, tpot_p50_s=0.05),
            ),
            "slow at depth",
        ),
        (
            summary(
                case(
                    "turns", ok=6, turns=6, first_ttft_s=0.5, later_ttft_p50_s=0.6,
                    later_evaluated_tokens=50, later_evaluated_share=0.5,
                )
            ),
            "useless hits",
        ),
    ],
)  # fmt: skip
def test_a_benchmark_is_evidence_too(document: dict[str, Any], rule: str) -> None:
    seen = observe_bench(document)
    assert [found.rule for found in diagnose(seen)] == [rule]
    assert has_evidence(seen)


def test_a_good_benchmark_is_healthy(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    path.write_text(json.dumps(summary(case("load", offered=30, attainment=1.0, rejected=0))))
    assert main(["doctor", "--bench", str(tmp_path)]) == 0
    assert "healthy" in capsys.readouterr().out
    path.write_text(json.dumps({"schema": "other"}))
    assert main(["doctor", "--bench", str(path)]) == 2


def test_a_document_without_cases_is_refused() -> None:
    with pytest.raises(UsageError, match="no cases"):
        observe_bench(summary())


# --- the command -------------------------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[MockServer]:
    with MockServer().running() as running:
        yield running


def test_a_running_server_is_looked_at_twice(server: MockServer, capsys: pytest.CaptureFixture[str]) -> None:
    pages = iter([STATS, replace(STATS, num_used_cells=4090, num_cached_cells=0)])

    class Growing(dict[str, Any]):
        def get(self, key: str, default: Any = None) -> Any:
            return Metrics(lambda: next(pages)).render().decode() if key == "/metrics" else super().get(key)

    server.pages = Growing(server.pages)
    assert main(["doctor", "--url", server.url, "--window", "0.1", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [item["rule"] for item in found["findings"]] == ["full cells"]
    assert found["findings"][0]["figures"]["KV cells in use"] == "4,090 of 4,096"
    assert (found["ok"], found["has_evidence"]) == (False, False)


def test_a_server_without_metrics_is_not_called_healthy(
    server: MockServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--url", server.url, "--window", "0.1"]) == 2
    assert "edgeserve bench" in capsys.readouterr().err
    assert main(["doctor", "--url", "http://127.0.0.1:1", "--window", "0.1"]) == 4
    assert main(["doctor", "--url", server.url, "--bench", "x.json"]) == 2
    assert main(["doctor", "--url", server.url, "--window", "0"]) == 2
