"""`edgeserve bench` as its users meet it: options, servers, results, files, exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mock_openai as mock
import pytest
import typer
from mock_openai import MockServer

from edgeserve.bench.options import Scenario
from edgeserve.bench.read_options import objective, read_options, seconds
from edgeserve.bench.workload import Arrivals, Lengths
from edgeserve.cli import app, main
from edgeserve.cli_options import known_flags, prepare
from edgeserve.errors import UsageError
from edgeserve.metrics import SLO
from edgeserve.settings.bench_flags import BENCH_FLAGS, SIMULATE_FLAGS, BenchFlag

QUICK = ("--repeats", "1", "--pause", "0", "--prompt", "24", "--output-tokens", "4")
ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def _no_settings_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text("")
    monkeypatch.setenv("EDGESERVE_CONFIG", str(config))
    monkeypatch.delenv("EDGESERVE_API_KEY", raising=False)


@pytest.fixture
def server() -> Iterator[MockServer]:
    with MockServer(answer).running() as running:
        yield running


def answer(body: dict[str, Any]) -> Any:
    """A token a word, and five of a template."""
    num_words = sum(len(message["content"].split()) for message in body["messages"])
    return mock.answer(int(body["max_tokens"]), ttft_s=0.01, gap_s=0.002, prompt_tokens=num_words + 5)


def document(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


# --- words -------------------------------------------------------------------------------------------------


def test_options_become_one_benchmark_a_scenario() -> None:
    typed = {
        "scenario": "stall, poisson",
        "rate": "0.5,2",
        "duration": "2m",
        "prompt": "lognormal:512:0.6",
        "arrivals": "gamma",
        "slo": "ttft=2s,tpot=100ms",
        "attainment": "95%",
        "param": ["top_k=1", "reasoning_effort=low"],
        "ignore_eos": False,
        "fail_if": [],
        "seed": None,
    }
    stall, load = read_options(typed, "http://x", "k", None)
    assert (stall.scenario, load.scenario) == (Scenario.STALL, Scenario.LOAD)
    assert (load.rates_per_s, load.duration_s, load.arrivals) == ((0.5, 2.0), 120.0, Arrivals.GAMMA)
    assert (load.prompt, load.slo) == (Lengths("lognormal", 512, 0.6), SLO(ttft_s=2.0, tpot_s=0.1))
    assert (load.attainment_target, load.ignore_eos, load.api_key) == (0.95, False, "k")
    assert load.extra_params == {"top_k": 1, "reasoning_effort": "low"}


def test_what_is_not_typed_has_the_defaults() -> None:
    found = read_options({}, "http://x", None, None)
    assert [options.scenario for options in found] == [Scenario.DECODE, Scenario.STALL, Scenario.TURNS]
    assert (found[0].streams, found[0].repeats) == ((1, 4), 3)


def test_durations_have_units() -> None:
    assert [seconds(text) for text in ("30", "500ms", "1.5s", "2m")] == [30.0, 0.5, 1.5, 120.0]


def test_an_objective_has_a_name_or_bounds() -> None:
    assert objective("agent") == SLO(ttft_s=10.0, tpot_s=0.06)
    assert objective("ttft=2s,ttft_token=15ms") == SLO(ttft_s=2.0, ttft_token_s=0.015)
    assert objective("itl=0.3,e2e=1m") == SLO(itl_s=0.3, e2e_s=60.0)


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ({"scenario": "decod"}, "no scenario decod"),
        ({"scenario": ","}, "No scenario"),
        ({"rate": "fast"}, "'fast' is not a number"),
        ({"streams": "1,x"}, "'x' is not a whole number"),
        ({"duration": "3 weeks"}, "not a duration"),
        ({"slo": "speed=3"}, "'speed=3' is not a bound"),
        ({"arrivals": "all"}, "no all arrivals"),
        ({"param": ["temperature"]}, "not a request field"),
        ({"fail_if": ["slow"]}, "not a condition"),
        ({"scenario": "trace"}, "needs a trace file"),
    ],
)
def test_a_word_that_means_nothing_is_a_usage_error(typed: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        read_options(typed, "http://x", None, None)


@pytest.mark.parametrize(
    ("command", "flags"),
    [(("bench", "run"), BENCH_FLAGS), (("simulate",), SIMULATE_FLAGS)],
    ids=["bench", "simulate"],
)
def test_every_option_keeps_its_value(command: tuple[str, ...], flags: tuple[BenchFlag, ...]) -> None:
    """llama-server has flags of the same names that need nothing here, such as --warmup."""
    found: Any = typer.main.get_command(app)
    for name in command:
        found = found.commands[name]
    for flag in (flag for flag in flags if flag.metavar):
        arguments = [f"--{flag.name}", "5"]
        assert prepare(list(arguments), known_flags(found.params)) == arguments


# --- a server that runs already ----------------------------------------------------------------------------


def test_a_table_for_people(server: MockServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--url", server.url, "--scenario", "decode", "--streams", "1,2", *QUICK]) == 0
    captured = capsys.readouterr()
    assert "decode, 2 streams" in captured.out
    assert "tok/s" in captured.out
    assert captured.err == ""


def test_one_document_for_programs(server: MockServer, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "run", "some-model", "--url", server.url, "--scenario", "decode", "--streams", "1"]
    assert main([*command, *QUICK, "--json", "--api-key", "secret"]) == 0
    found = document(capsys)
    assert found["schema"] == "edgeserve-bench/1"
    assert [case["label"] for case in found["cases"]] == ["decode, 1 stream"]
    assert server.headers[-1]["authorization"] == "Bearer secret"
    assert server.sent[-1].body["model"] == "some-model"
    assert "secret" not in json.dumps(found)


def test_several_scenarios_are_several_results_and_folders(
    server: MockServer, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    command = ["bench", "--url", server.url, "--scenario", "decode,turns", "--turns", "2", "--streams", "1"]
    assert main([*command, *QUICK, "--json", "--out", str(tmp_path)]) == 0
    assert [result["scenario"] for result in document(capsys)["results"]] == ["decode", "turns"]
    for name in ("decode", "turns"):
        written = {path.name for path in (tmp_path / name).iterdir()}
        assert {"summary.json", "requests.jsonl", "report.md"} <= written


def test_probes_wait_while_a_long_prompt_is_computed(
    server: MockServer, capsys: pytest.CaptureFixture[str]
) -> None:
    def waits_for_b(index: int) -> bool:
        return any(sent.body["max_tokens"] == 8 and len(sent.stamps_s) > 2 for sent in server.sent[:index])

    def script(body: dict[str, Any]) -> Any:
        index = len(server.sent)
        if body["max_tokens"] == 8:
            return mock.answer(2, ttft_s=0.4, prompt_tokens=200)
        is_beside_b = any(sent.body["max_tokens"] == 8 for sent in server.sent[: index - 1])
        return mock.answer(1, until=(lambda: waits_for_b(index)) if is_beside_b else None, prompt_tokens=20)

    server.script = script
    command = ["bench", "--url", server.url, "--scenario", "probe", "--probe-rate", "20", "--repeats", "1"]
    assert main([*command, "--stall-prompt", "200", "--json"]) == 0
    (case,) = document(capsys)["cases"]
    figures = {name: spread["median"] for name, spread in case["figures"].items()}
    assert figures["probes_during"] >= 4
    assert figures["probe_during_max_s"] > 0.2
    assert figures["probe_alone_p50_s"] > 0


def test_a_condition_that_holds_fails_the_command(
    server: MockServer, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["bench", "--url", server.url, "--scenario", "turns,decode", "--turns", "2", "--streams", "1"]
    assert main([*command, *QUICK, "--fail-if", "tpot_p50>10s", "--fail-if", "turns<1"]) == 0
    capsys.readouterr()
    assert main([*command, *QUICK, "--fail-if", "ttft_p50>1us"]) == 5
    captured = capsys.readouterr()
    assert "decode, 1 stream" in captured.out
    assert "ttft_p50_s is" in captured.err


def test_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--url", "http://127.0.0.1:1", "--scenario", "decode"]) == 4
    assert capsys.readouterr().out == ""


def test_engine_settings_have_no_meaning_for_a_running_server(
    server: MockServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--url", server.url, "-c", "4096"]) == 2
    assert "-c/--ctx-size" in capsys.readouterr().err
    assert server.sent == []


def test_an_option_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--rat", "3"]) == 2
    assert "--rate" in capsys.readouterr().err


def test_ctrl_c_shows_what_was_measured(server: MockServer) -> None:
    def script(body: dict[str, Any]) -> Any:
        num_measured = sum(sent.body["max_tokens"] == 4 for sent in server.sent)
        return mock.answer(500, gap_s=0.05) if num_measured > 1 else mock.answer(2)

    server.script = script
    command = [sys.executable, "-m", "edgeserve", "bench", "--url", server.url, "--scenario", "decode,turns"]
    process = subprocess.Popen(
        [*command, "--streams", "1", "--output-tokens", "4", "--pause", "0", "--json"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )

    def interrupt() -> None:
        while not any(len(sent.stamps_s) > 8 for sent in server.sent) and process.poll() is None:
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    (result,) = json.loads(out)["results"]
    assert result["is_partial"]
    assert len(result["cases"]) == 1
    assert "Traceback" not in err


# --- comparing ---------------------------------------------------------------------------------------------


def test_two_results_side_by_side(
    server: MockServer, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    command = ["bench", "--url", server.url, "--scenario", "decode", "--streams", "1", *QUICK]
    for name in ("one", "two"):
        assert main([*command, "--repeats", "3", "--out", str(tmp_path / name)]) == 0
    capsys.readouterr()
    paths = [str(tmp_path / "one"), str(tmp_path / "two" / "summary.json")]
    assert main(["bench", "compare", *paths]) == 0
    assert "second over first" in capsys.readouterr().out
    assert main(["bench", "compare", *paths, "--json"]) == 0
    rows = {row["figure"]: row for row in document(capsys)["rows"]}
    ttft = rows["ttft_p50_s"]
    assert ttft["ratio"]["value"] == pytest.approx(ttft["b"]["median"] / ttft["a"]["median"])
    assert main(["bench", "compare", str(tmp_path), paths[1]]) == 2


# --- a server for the run ----------------------------------------------------------------------------------


def test_without_an_address_a_server_is_started_and_ended(
    model_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = ["-c", "512", "-np", "1", "-t", "1"]
    command = ["bench", str(model_path), *own, "--scenario", "decode", "--streams", "1"]
    assert main([*command, *QUICK, "--json"]) == 0
    found = document(capsys)
    engine = found["environment"]["servers"]["A"]["props"]["engine"]
    assert (engine["n_ctx"], engine["n_seq_max"]) == (512, 1)
    assert found["cases"][0]["figures"]["ok"]["median"] == 1
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(found["servers"]["A"], timeout=5)


def test_a_server_that_does_not_start_says_why(model_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(model_path), "-ctv", "q8_0", "-fa", "off", "--scenario", "decode"]) == 2
    assert "flash attention" in capsys.readouterr().err
