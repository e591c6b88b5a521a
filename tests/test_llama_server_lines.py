"""Command lines of llama-server's documentation, typed at `edgeserve serve`: each works as it stands, or the
answer names the option that is not there."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from edgeserve.cli import main


@pytest.fixture(autouse=True)
def _no_settings_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EDGESERVE_CONFIG", str(tmp_path / "config.toml"))
    (tmp_path / "config.toml").write_text("")


def understood(line: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The settings that a line gives, without loading anything."""
    assert main(["serve", *shlex.split(line), "--print-config", "--json"]) == 0
    return {name: row["value"] for name, row in json.loads(capsys.readouterr().out).items()}


@pytest.mark.parametrize(
    ("line", "settings"),
    [
        ("", {"port": 8080, "host": "127.0.0.1"}),
        ("-m models/7B/ggml-model.gguf -c 2048", {"model": "models/7B/ggml-model.gguf", "ctx-size": 2048}),
        (r"-m 'models\7B\ggml-model.gguf' -c 2048", {"model": r"models\7B\ggml-model.gguf"}),
        (
            "-m models/7B/ggml-model.gguf -c 512 --host 0.0.0.0 --port 8080",
            {"ctx-size": 512, "host": "0.0.0.0", "port": 8080},
        ),
        (
            "-m models/7B/ggml-model.gguf -c 512 --host 0.0.0.0 --port 8080 --n-gpu-layers 99",
            {"gpu-layers": 99},
        ),
        ("-hf ggml-org/gemma-3-4b-it-GGUF", {"model": "ggml-org/gemma-3-4b-it-GGUF"}),
        ("-hf ggml-org/Qwen3-8B-GGUF:q8_0", {"model": "ggml-org/Qwen3-8B-GGUF:q8_0"}),
        (
            "--jinja -fa -hf bartowski/Qwen2.5-7B-Instruct-GGUF:Q4_K_M",
            {"flash-attn": "on", "model": "bartowski/Qwen2.5-7B-Instruct-GGUF:Q4_K_M"},
        ),
        ("-m model.gguf --port 8080 -c 1024 -np 2 -n 1024", {"parallel": 2, "predict": 1024}),
        ("-m model.gguf --metrics --slots --no-webui -cb -ngl all", {"gpu-layers": -1}),
    ],
)
def test_a_line_that_works(line: str, settings: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    found = understood(line, capsys)
    assert {name: found[name] for name in settings} == settings


@pytest.mark.parametrize(
    ("line", "option", "words"),
    [
        ("-m model.gguf --mcp-servers-config mcp.json", "--mcp-servers-config", "tools"),
        ("--models-dir ./models_directory", "--models-dir", "one model"),
        ("--models-preset ./my-models.ini", "--models-preset", "one model"),
        ("-ctx 8192 -n 1024 -np 2", "-ctx", "-c"),
        ("-m model.gguf --ui-config '{\"pasteLongTextToFileLen\": 0}'", "--ui-config", "edgeserve chat"),
        ("-m g.gguf --mmproj mmproj.gguf", "--mmproj", "text only"),
        ("-m Qwen3-4B.gguf -md Qwen3-4B-eagle3.gguf --spec-type draft-eagle3", "-md", "ngram-simple"),
        ("--jinja -fa -hf bartowski/firefunction-v2-GGUF -hff firefunction-v2-IQ1_M.gguf", "-hff", "hf:"),
        ("-m model.gguf --cors-origins localhost", "--cors-origins", "--allow-origin"),
        ("-m model.gguf --agent", "--agent", "tools"),
        ("--list-devices", "--list-devices", "doctor"),
    ],
)
def test_a_line_that_names_what_is_missing(
    line: str, option: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *shlex.split(line), "--print-config"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    message, hint = said.err.splitlines()[:2]
    assert f" {option}." in message
    assert words in hint
