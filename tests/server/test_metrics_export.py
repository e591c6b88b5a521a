"""The names, labels and buckets of /metrics, and that documentation and dashboard speak of what is there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from edgeserve.engine.request import EngineStats, RequestTimings
from edgeserve.server.metrics_export import Metrics, ModelInfo, cache_state_of

BEFORE = ("front_end", "queue", "cache_restore", "prefill")
AFTER = ("own_decode", "stalled", "delivery")
DOCS = Path(__file__).parent.parent.parent / "docs"


def timings(num_prompt: int = 100, num_cached: int = 0, num_output: int = 11) -> RequestTimings:
    return RequestTimings(
        num_prompt_tokens=num_prompt,
        num_cached_tokens=num_cached,
        num_evaluated_tokens=num_prompt - num_cached,
        num_output_tokens=num_output,
        front_end_s=0.05,
        queue_s=0.125,
        restore_s=0.025,
        prefill_s=0.6,
        decode_s=1.0,
        stalled_s=0.25,
        ttft_s=0.8,
        delivery_s=0.01,
        e2e_s=1.81,
    )


STATS = EngineStats(
    num_steps=9,
    num_slots=4,
    n_ctx=1000,
    num_used_cells=300,
    num_cached_cells=100,
    num_prompt_tokens_total=500,
    num_cached_tokens_total=120,
    num_output_tokens_total=77,
    prefill_s_total=2.0,
    decode_s_total=3.0,
    sample_s_total=0.5,
    steps_total={"decode": 6, "mixed": 3},
    step_s_total={"decode": 3.0, "mixed": 2.0},
    num_evicted_tokens_total=42,
    n_tokens_max=321,
    finished_total={"stop": 2},
)


@pytest.fixture
def metrics() -> Metrics:
    made = Metrics(lambda: STATS)
    made.describe(ModelInfo("m", "llama", "1.0", "0.3.36", "Q4_K", 1000, "CPU", "abc", 2.5))
    return made


def samples(metrics: Metrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    families = text_string_to_metric_families(metrics.render().decode())
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def value(metrics: Metrics, name: str, **labels: str) -> float:
    return samples(metrics)[(name, frozenset(labels.items()))]


def names(metrics: Metrics) -> set[str]:
    """As written in documents: counters with _total, histograms without their parts."""
    found = metrics.registry.collect()
    return {f"{family.name}_total" if family.type == "counter" else family.name for family in found}


def test_every_part_of_a_request_is_kept_apart_by_cache_state(metrics: Metrics) -> None:
    metrics.observe_choice(timings(), is_complete=True)
    metrics.observe_choice(timings(num_cached=90), is_complete=True)
    metrics.observe_choice(timings(num_cached=50), is_complete=False)
    for state, count in (("miss", 1.0), ("hit", 1.0), ("partial", 1.0)):
        for name in ("time_to_first_token", *(f"request_{part}" for part in BEFORE)):
            assert value(metrics, f"edgeserve_{name}_seconds_count", cache=state) == count
    found = samples(metrics)
    for name in (*(f"request_{part}" for part in ("decode", *AFTER, "e2e")), "time_per_output_token"):
        counted = {labels for (full, labels) in found if full == f"edgeserve_{name}_seconds_count"}
        assert counted == {frozenset({("cache", "miss")}), frozenset({("cache", "hit")})}
    assert value(metrics, "edgeserve_time_per_output_token_seconds_sum", cache="miss") == pytest.approx(0.1)
    assert value(metrics, "edgeserve_request_cached_tokens_sum", cache="hit") == 90


@pytest.mark.parametrize("num_cached", [0, 50, 90])
def test_the_parts_add_up_in_every_cache_state(metrics: Metrics, num_cached: int) -> None:
    one = timings(num_cached=num_cached)
    metrics.observe_choice(one, is_complete=True)

    def total(name: str) -> float:
        return value(metrics, f"edgeserve_{name}_seconds_sum", cache=cache_state_of(one))

    until_first = sum(total(f"request_{part}") for part in BEFORE)
    assert until_first == pytest.approx(total("time_to_first_token"))
    assert until_first + sum(total(f"request_{part}") for part in AFTER) == pytest.approx(
        total("request_e2e")
    )


def test_what_did_not_happen_is_not_counted_as_zero(metrics: Metrics) -> None:
    metrics.observe_choice(RequestTimings(10, 0, 0, 0), is_complete=False)
    assert not any(name.startswith("edgeserve_time_to_first_token_seconds_c") for name, _ in samples(metrics))


def test_the_engine_counts(metrics: Metrics) -> None:
    assert value(metrics, "edgeserve_prompt_tokens_total") == 380
    assert value(metrics, "edgeserve_prefix_cache_query_tokens_total") == 500
    assert value(metrics, "edgeserve_prefix_cache_evicted_tokens_total") == 42
    assert value(metrics, "edgeserve_steps_total", kind="mixed") == 3
    assert value(metrics, "edgeserve_steps_total", kind="prefill") == 0
    assert value(metrics, "edgeserve_step_seconds_total", kind="decode") == 3.0
    assert value(metrics, "edgeserve_kv_cells", state="used") == 200
    assert value(metrics, "edgeserve_model_load_seconds") == 2.5
    info = {"model": "m", "arch": "llama", "quant": "Q4_K", "n_ctx": "1000", "device": "CPU"}
    assert value(metrics, "edgeserve_model_info", **info) == 1


def test_llama_servers_names_have_the_same_numbers(metrics: Metrics) -> None:
    same = {
        "prompt_tokens_total": "prompt_tokens_total",
        "prompt_tokens_cached_total": "prompt_tokens_cached_total",
        "prompt_seconds_total": "prefill_seconds_total",
        "tokens_predicted_total": "generation_tokens_total",
        "tokens_predicted_seconds_total": "decode_seconds_total",
        "n_decode_total": "decode_calls_total",
        "requests_processing": "requests_running",
        "requests_deferred": "requests_waiting",
    }
    for theirs, ours in same.items():
        assert value(metrics, f"llamacpp:{theirs}") == value(metrics, f"edgeserve_{ours}")
    assert value(metrics, "llamacpp:n_tokens_max") == 321


def test_before_the_model_is_there_only_requests_are_counted() -> None:
    metrics = Metrics(lambda: None)
    metrics.observe_request("chat", "rejected", 0.1, "miss")
    assert value(metrics, "edgeserve_requests_total", endpoint="chat", outcome="rejected") == 1
    assert "edgeserve_kv_cells" not in names(metrics)


def test_the_document_lists_exactly_what_is_there(metrics: Metrics) -> None:
    text = (DOCS / "metrics.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `(edgeserve_\w+)` \|", text, re.MULTILINE))
    assert listed == {name for name in names(metrics) if name.startswith("edgeserve_")}
    for name in names(metrics):
        if name.startswith("llamacpp:"):
            assert name.removeprefix("llamacpp:") in text


def test_the_dashboard_asks_for_what_is_there(metrics: Metrics) -> None:
    board = json.loads((DOCS / "grafana.json").read_text(encoding="utf-8"))
    asked = {
        name
        for panel in board["panels"]
        for target in panel["targets"]
        for name in re.findall(r"edgeserve_\w+", target["expr"])
    }
    known = names(metrics) | {f"{name}_{part}" for name in names(metrics) for part in ("bucket", "sum")}
    assert asked <= known
    assert len(asked) > 15
