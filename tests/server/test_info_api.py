"""The endpoints that tell: models, props, slots, metrics, events; and cancelling by id."""

from __future__ import annotations

import json
import logging
import re
from typing import Any

import httpx2
import pytest
from conftest import Serve
from live_server import N_CTX_SEQ, NUM_SLOTS, Live, sse_documents, streaming

HI = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize("path", ["/v1/models", "/models"])
def test_models_say_what_is_served_and_what_was_trained(live: Live, path: str) -> None:
    document = live.http.get(path).json()
    [entry] = document["data"]
    assert entry["object"] == "model"
    assert entry["max_model_len"] == entry["meta"]["n_ctx"] == N_CTX_SEQ
    assert entry["meta"]["n_ctx_pool"] == N_CTX_SEQ * NUM_SLOTS
    assert entry["meta"]["n_ctx_train"] == 8192
    assert entry["root"] == entry["id"] == document["models"][0]["name"]
    assert entry["created"] == live.http.get(path).json()["data"][0]["created"] > 0
    assert live.http.get(f"/v1/models/{entry['id']}").json() == entry


def test_an_alias_names_the_model(serve: Serve) -> None:
    live = serve(model_alias="tiny")
    assert live.http.get("/v1/models").json()["data"][0]["id"] == "tiny"
    assert live.post("/v1/chat/completions", messages=HI, max_tokens=1, model="other")["model"] == "tiny"


def test_props(live: Live) -> None:
    props = live.http.get("/props").json()
    assert props["default_generation_settings"]["n_ctx"] == N_CTX_SEQ
    assert props["total_slots"] == NUM_SLOTS
    assert "<|im_start|>" in props["chat_template"]
    assert props["chat_template_caps"]["supports_system_role"] is True
    assert props["chat_template_caps"]["supports_tools"] is False
    assert props["modalities"] == {"vision": False, "audio": False, "video": False}
    assert props["bos_token"] == "<|im_start|>"


def test_server_defaults_apply_and_show(serve: Serve) -> None:
    live = serve(request_defaults={"temperature": 0.0, "max_tokens": 3})
    params = live.http.get("/props").json()["default_generation_settings"]["params"]
    assert (params["temperature"], params["max_tokens"]) == (0.0, 3)
    assert live.post("/v1/chat/completions", messages=HI)["usage"]["completion_tokens"] == 3
    assert live.post("/v1/chat/completions", messages=HI, max_tokens=2)["usage"]["completion_tokens"] == 2


def test_slots_show_counts_and_no_text(live: Live) -> None:
    live.wait_until_idle()
    secret = [{"role": "user", "content": "xyzzy plugh"}]
    with streaming(live, messages=secret) as stream:
        next(stream)
        response = live.http.get("/slots")
    slots = response.json()
    assert [slot["id"] for slot in slots] == list(range(NUM_SLOTS))
    [busy] = [slot for slot in slots if slot["is_processing"]]
    assert busy["n_ctx"] == N_CTX_SEQ
    assert busy["n_prompt_tokens"] > 0
    assert busy["next_token"][0]["n_decoded"] > 0
    assert busy["id_task"] >= 0
    assert "xyzzy" not in response.text


def test_no_free_slot_is_an_error_on_request(live: Live) -> None:
    live.wait_until_idle()
    assert live.http.get("/slots?fail_on_no_slot=1").status_code == 200
    with streaming(live) as one, streaming(live) as two:
        next(one), next(two)
        assert live.http.get("/slots?fail_on_no_slot=1").status_code == 503
        assert live.http.get("/slots").status_code == 200


def metric(live: Live, name: str, labels: str = "") -> float:
    """The sum over all labels, or the sample with exactly these."""
    text = live.http.get("/metrics").text
    starts = (f"{name}{labels} ",) if labels else (f"{name} ", f"{name}{{")
    lines = [line for line in text.splitlines() if line.startswith(starts)]
    assert len(lines) <= 1 or not labels, lines
    return sum(float(line.split(" ")[-1]) for line in lines)


def test_metrics_count_what_requests_said(live: Live) -> None:
    live.wait_until_idle()
    names = (
        "edgeserve_prompt_tokens_total",
        "edgeserve_generation_tokens_total",
        "llamacpp:n_decode_total",
        "edgeserve_time_per_output_token_seconds_count",
        "edgeserve_request_prompt_tokens_sum",
    )
    outcome = '{endpoint="chat",outcome="length"}'
    before = {name: metric(live, name) for name in names}
    steps_before = live.stats.num_steps
    requests_before = metric(live, "edgeserve_requests_total", outcome)
    answer = live.post("/v1/chat/completions", messages=HI, max_tokens=6, ignore_eos=True, cache_prompt=False)
    num_steps = live.stats.num_steps - steps_before
    grown = {name: metric(live, name) - before[name] for name in names}
    assert metric(live, "edgeserve_requests_total", outcome) == requests_before + 1
    assert grown["edgeserve_prompt_tokens_total"] == answer["timings"]["prompt_n"]
    assert grown["edgeserve_request_prompt_tokens_sum"] == answer["usage"]["prompt_tokens"]
    assert grown["edgeserve_generation_tokens_total"] == 6
    assert grown["llamacpp:n_decode_total"] == num_steps >= 6
    assert grown["edgeserve_time_per_output_token_seconds_count"] == 1


def test_one_token_has_no_time_per_output_token(live: Live) -> None:
    before = metric(live, "edgeserve_time_per_output_token_seconds_count")
    answer = live.post("/v1/chat/completions", messages=HI, max_tokens=1)
    assert answer["timings"]["predicted_per_token_ms"] is None
    assert answer["timings"]["predicted_per_second"] is None
    assert metric(live, "edgeserve_time_per_output_token_seconds_count") == before


def test_cache_hits_and_misses_are_kept_apart(live: Live) -> None:
    messages = [{"role": "user", "content": "A question for the metrics alone."}]
    hit, name = '{cache="hit"}', "edgeserve_time_to_first_token_seconds_count"
    before = metric(live, name, hit)
    live.post("/v1/chat/completions", messages=messages, max_tokens=1, cache_prompt=False)
    assert metric(live, name, hit) == before
    live.post("/v1/chat/completions", messages=messages, max_tokens=1)
    live.post("/v1/chat/completions", messages=messages, max_tokens=1)
    assert metric(live, name, hit) > before


def test_metrics_name_the_model_and_its_cells(live: Live) -> None:
    text = live.http.get("/metrics").text
    assert re.search(r'edgeserve_model_info{arch="llama",.*model="SmolLM2.*quant="Q4_1"', text)
    assert re.search(r'edgeserve_build_info{ggml_commit="\w+', text)
    assert f'edgeserve_kv_cells{{state="total"}} {float(N_CTX_SEQ * NUM_SLOTS)}' in text
    assert "# TYPE edgeserve_requests_total counter" in text or "# TYPE edgeserve_requests counter" in text


def test_events_tell_each_step_and_no_text(live: Live) -> None:
    live.wait_until_idle()
    seen: list[dict[str, Any]] = []
    with (
        httpx2.Client(base_url=live.url, timeout=30, verify=False) as http,
        http.stream("GET", "/events") as response,
    ):
        pieces = response.iter_text()
        seen += sse_documents(next(pieces))
        step_before = seen[0]["step"]
        with streaming(live, messages=[{"role": "user", "content": "xyzzy"}], max_tokens=5) as stream:
            b"".join(stream)
        while seen[-1]["step"] < step_before + 5:
            seen += sse_documents(next(pieces))
    assert "xyzzy" not in json.dumps(seen)
    running = [sequence for document in seen for sequence in document["running"]]
    assert {sequence["status"] for sequence in running} <= {"prefill", "decode"}
    assert all(sequence["request_id"].startswith("chatcmpl-") for sequence in running)
    steps = [step for document in seen[1:] for step in document["steps"]]
    assert [step["step"] for step in steps] == list(range(step_before + 1, step_before + 1 + len(steps)))
    assert sum(step["num_decode_tokens"] for step in steps) == 4
    assert all(step["duration_ms"] > 0 for step in steps)


def test_cancel_a_running_request_by_its_id(live: Live) -> None:
    live.wait_until_idle()
    with streaming(live) as stream:
        [first, *_] = sse_documents(next(stream).decode())
        answer = live.http.post(f"/requests/{first['id']}/cancel")
        assert answer.json() == {"id": first["id"], "cancelled": True}
        rest = sse_documents(b"".join(stream).decode())
    assert rest[-1]["error"]["code"] == "cancelled"
    assert "[DONE]" not in rest
    live.wait_until_idle()
    assert live.http.post(f"/requests/{first['id']}/cancel").status_code == 404


def test_cancel_a_waiting_request_by_its_engine_id(live: Live) -> None:
    live.wait_until_idle()
    with streaming(live) as one, streaming(live) as two, streaming(live, max_tokens=2) as waiting:
        next(one), next(two)
        live.wait_until(lambda: len(live.stats.waiting) == 1, "for the third to wait")
        request_id = live.stats.waiting[0].request_id
        assert live.http.post(f"/requests/{request_id}/cancel").status_code == 200
        [error] = sse_documents(b"".join(waiting).decode())
        assert error["error"]["code"] == "cancelled"
        assert len(live.stats.running) == 2
    live.wait_until_idle()


def test_one_log_line_a_request_without_its_text(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    live.wait_until_idle()
    with caplog.at_level(logging.INFO, logger="edgeserve.requests"):
        messages = [{"role": "user", "content": "xyzzy plugh"}]
        answer = live.http.post(
            "/v1/chat/completions",
            json={"messages": messages, "max_tokens": 3, "ignore_eos": True},
            headers={"X-Request-ID": "mine-7"},
        ).json()
        live.wait_until(lambda: bool(caplog.records), "for the log line")
    [line] = [json.loads(record.message) for record in caplog.records if record.name == "edgeserve.requests"]
    assert line["request_id"] == answer["id"]
    assert line["client_request_id"] == "mine-7"
    assert (line["endpoint"], line["outcome"], line["predicted_n"]) == ("chat", "length", 3)
    assert line["queue_ms"] <= line["ttft_ms"] <= line["total_ms"]
    assert "xyzzy" not in caplog.text


def test_refusals_are_logged_as_such(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="edgeserve.requests"):
        messages = [{"role": "user", "content": "word " * (N_CTX_SEQ + 10)}]
        live.error("/v1/chat/completions", 400, messages=messages)
    [line] = [json.loads(record.message) for record in caplog.records if record.name == "edgeserve.requests"]
    assert (line["outcome"], line["error"]) == ("rejected", "context_length_exceeded")


def with_units(document: Any, place: str = "") -> list[str]:
    """Places of numbers with a fraction whose name does not say in which unit they are."""
    if isinstance(document, dict):
        return [item for key, value in document.items() for item in with_units(value, key)]
    if isinstance(document, list):
        return [item for value in document for item in with_units(value, place)]
    units = ("_ms", "_s", "_per_second", "_per_s")
    return [place] if isinstance(document, float) and not place.endswith(units) else []


def test_every_time_names_its_unit(live: Live) -> None:
    body = {"messages": HI, "max_tokens": 3, "stream": True, "timings_per_token": True}
    documents = sse_documents(live.http.post("/v1/chat/completions", json=body).text)
    with httpx2.Client(base_url=live.url, verify=False) as http, http.stream("GET", "/events") as response:
        documents += sse_documents(next(response.iter_text()))
    documents += [live.http.get(path).json() for path in ("/health", "/slots")]
    assert with_units(documents) == []
