"""The command line as its users meet it: options, errors, exit codes, and commands with the real model."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import typer
from typer.core import TyperGroup

from edgeserve.cli import app, main
from edgeserve.cli_options import Wants, known_flags, prepare, unknown_option
from edgeserve.config import EngineConfig
from edgeserve.errors import UsageError
from edgeserve.settings.llama_server import ABSENT, ALWAYS_SO
from edgeserve.settings.table import settings_of

MODEL_RUN_S = 90


@pytest.fixture(autouse=True)
def _no_settings_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith(("EDGESERVE_", "LLAMA_")) and not name.endswith("_DIR"):
            monkeypatch.delenv(name)
    config = tmp_path / "config.toml"
    config.write_text("")
    monkeypatch.setenv("EDGESERVE_CONFIG", str(config))
    monkeypatch.setenv("EDGESERVE_TUNE", "off")


def child(
    *arguments: str, stdin: int = subprocess.DEVNULL, env: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    """`python -m edgeserve ...` with pipes for its output."""
    return subprocess.Popen(
        [sys.executable, "-m", "edgeserve", *arguments],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        cwd=Path(__file__).parent.parent,
    )


def run(*arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a child."""
    process = child(*arguments)
    out, err = process.communicate(timeout=MODEL_RUN_S)
    return process.returncode, out, err


# --- a quick start -----------------------------------------------------------------------------------------

_HEAVY = (
    "llama_cpp",
    "textual",
    "starlette",
    "uvicorn",
    "huggingface_hub",
    "prompt_toolkit",
    "httpx2",
    "numpy",
)


@pytest.mark.parametrize(
    "arguments", [["--help"], ["serve", "--help"], ["chat", "--print-config"], ["--version"]]
)
def test_what_needs_no_model_imports_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys; from edgeserve.cli import main\n"
        f"code = main({arguments!r}); print(sorted(sys.modules), file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True
    )
    imported = done.stderr
    assert "'typer'" in imported
    assert [name for name in _HEAVY if f"'{name}'" in imported] == []


def test_version_names_the_runtime_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert re.search(r"^edgeserve .+\nllama-cpp-python \d+\.\d+\.\d+\nPython 3", capsys.readouterr().out)


def test_help_shows_every_setting_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--help"]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert [setting.name for setting in settings_of("serve") if f"--{setting.name}" not in words] == []
    assert f"most tokens in one step [{EngineConfig('x').n_batch}]" in words


# --- options -----------------------------------------------------------------------------------------------


def serve_flags() -> dict[str, Wants]:
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    return known_flags(group.commands["serve"].params)


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, tuple[object, str]]:
    """`--print-config --json`, as {name: (value, source)}."""
    assert main([*arguments, "--print-config", "--json"]) == 0, capsys.readouterr().err
    return {
        name: (item["value"], item["source"]) for name, item in json.loads(capsys.readouterr().out).items()
    }


def test_a_llama_server_command_line_works_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    line = (
        "serve -m model.gguf -c 8192 -np 4 -b 1024 -ub 256 -ngl 99 -t8 -tb 2 -fa on -ctk q8_0 -ctv q8_0 -nkvo"
        " --no-mmap --mlock -kvu --jinja --metrics -cb --host ::1 --port=0 --api-key k -a alias -n -1"
        " --temp 0.5"
    )
    config = {
        name: value for name, (value, source) in printed(capsys, *line.split()).items() if source == "flag"
    }
    assert config == {
        "model": "model.gguf", "ctx-size": 8192, "parallel": 4, "batch-size": 1024, "ubatch-size": 256,
        "gpu-layers": 99, "threads": 8, "threads-batch": 2, "flash-attn": "on", "cache-type-k": "q8_0",
        "cache-type-v": "q8_0", "kv-offload": False, "mmap": False, "mlock": True, "kv-unified": True,
        "host": "::1", "port": 0, "api-key": "1 key", "alias": "alias", "predict": 2**31 - 1, "temp": 0.5,
    }  # fmt: skip


@pytest.mark.parametrize(
    "arguments, value",
    [
        (["-fa"], "on"),
        (["-fa", "-np", "2"], "on"),
        (["-fa", "off"], "off"),
        (["-fa", "auto", "m.gguf"], "auto"),
        (["-fa", "m.gguf"], "on"),
        (["--flash-attn=off"], "off"),
        (["-fa", "0"], "off"),
    ],
)
def test_flash_attention_alone_means_on(
    capsys: pytest.CaptureFixture[str], arguments: list[str], value: str
) -> None:
    config = printed(capsys, "serve", *arguments)
    assert config["flash-attn"] == (value, "flag")
    assert config["model"][0] == ("m.gguf" if "m.gguf" in arguments else None)


def test_the_environment_and_the_file_reach_the_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "other.toml"
    file.write_text("[serve]\nparallel = 3\ncache-type-k = 'q8_0'\n")
    monkeypatch.setenv("LLAMA_ARG_N_PARALLEL", "5")
    config = printed(capsys, "serve", "--config", str(file), "-ctk", "q4_0")
    assert config["parallel"] == (5, "LLAMA_ARG_N_PARALLEL")
    assert config["cache-type-k"] == ("q4_0", "flag")
    assert config["cache-type-v"] == ("f16", "default")


def test_an_option_that_llama_server_has_and_we_do_not_is_named_with_a_sentence() -> None:
    known = serve_flags()
    for flag in [flag for absent in ABSENT for flag in absent.flags]:
        with pytest.raises(UsageError) as caught:
            prepare(["-c", "1", flag, "value"], known)
        assert caught.value.message == f"edgeserve has no {flag}."
        assert caught.value.hint.endswith(".")


def test_a_switch_for_what_is_always_so_is_taken() -> None:
    assert prepare([*ALWAYS_SO, "model"], {}) == ["model"]


@pytest.mark.parametrize(
    "arguments, message, hint",
    [
        (["serve", "--ctxsize", "5"], "There is no option --ctxsize.", "Did you mean --ctx-size?"),
        (["serve", "-ngll", "4"], "There is no option -ngll.", "-ngl"),
        # Typer alone would read these as -n cmoe, -m m and -c x.
        (["serve", "-mm", "4"], "edgeserve has no -mm.", "images"),
        (["serve", "-cx", "4"], "There is no option -cx.", ""),
        (["serve", "-qqq"], "There is no option -qqq.", "--help lists them."),
        (["chat", "--host", "x"], "--host is an option of `edgeserve serve`.", "no meaning"),
        (["serve", "-c", "many"], "-c/--ctx-size: 'many' is not a whole number.", "from 0 on"),
        (["serve", "--port", "70000"], "--port: '70000' is out of range.", "0 to 65535"),
        (["serve", "-fa=perhaps"], "-fa/--flash-attn: 'perhaps' is not one of them.", "on, off, auto"),
        (["serve", "--port"], "Option '--port' requires an argument.", "--help"),
        (["serve", "one", "two"], "Got unexpected extra argument", "--help"),
        (["serve", "one", "-m", "two"], "Two models were given: one and two.", ""),
        (["serve", "--host", "0.0.0.0"], "On 0.0.0.0 other machines can reach this server", "--api-key"),
        (["chat", "--url", "http://h", "-c", "5", "-p", "x"], "-c/--ctx-size: not possible for a server", ""),
        (["nope"], "No such command 'nope'.", "--help"),
        (["models", "pul"], "No such command 'pul'. Did you mean 'pull'?", ""),
        (["service", "print", "cron"], "There is no service system cron.", "systemd"),
        (["serve", "--config", "/nowhere.toml"], "There is no configuration file /nowhere.toml.", ""),
    ],
)
def test_a_users_mistake_is_one_line_a_hint_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str, hint: str
) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    first, *rest = err.splitlines()
    assert first.startswith(f"error: {message}")
    assert hint in " ".join(rest)
    assert len(rest) <= 1


def test_near_names_are_only_near_ones() -> None:
    assert unknown_option("--zzzzzz", serve_flags()).hint == "--help lists them."


def test_a_value_may_look_like_an_option_and_nothing_after_two_dashes_is_one() -> None:
    known = {"-p": Wants(value=True)}
    assert prepare(["-p", "-ncmoe"], known) == ["-p", "-ncmoe"]
    assert prepare(["--", "-ncmoe"], known) == ["--", "-ncmoe"]
    assert prepare(["-n128", "-5"], known) == ["-n128", "-5"]


# --- exit codes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, code",
    [
        (["chat", "no-such-model", "-p", "hi"], 3),
        (["serve", "no-such-model", "--port", "0"], 3),
        (["models", "path", "no-such-model"], 3),
        (["chat", "./no/such.gguf", "-p", "hi"], 3),
        (["chat", "--url", "http://127.0.0.1:1", "-p", "hi"], 4),
    ],
)
def test_a_failure_has_its_exit_code_and_no_traceback(
    capsys: pytest.CaptureFixture[str], arguments: list[str], code: int
) -> None:
    assert main(arguments) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert "Traceback" not in err


def test_a_file_that_is_no_model_is_refused_before_the_library_sees_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + b"\xff" * 64)
    assert main(["chat", str(tmp_path / "bad.gguf"), "-p", "hi"]) == 3
    assert capsys.readouterr().err.startswith("error: ")


def test_a_reader_who_leaves_early_hears_nothing_of_it() -> None:
    process = child("models", "list", "--json")
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    process.wait(timeout=30)
    process.stderr.close()


def test_a_taken_port_is_named_with_a_free_one(model_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, _, err = run("serve", str(model_path), "--port", str(port))
    assert code == 2
    assert f"error: Port {port} on 127.0.0.1 is taken by" in err
    assert re.search(r"--port \d+, which is free", err)


# --- small commands ----------------------------------------------------------------------------------------


def test_a_key_file_is_for_its_owner_only_and_never_overwritten(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "key"
    assert main(["key", "new", "--file", str(file)]) == 0
    key = file.read_text()
    assert capsys.readouterr().out.strip() == str(file)
    assert file.stat().st_mode & 0o777 == 0o600
    assert len(key.strip()) > 40
    assert main(["key", "new", "--file", str(file)]) == 2
    assert file.read_text() == key
    assert main(["key", "new"]) == 0
    assert capsys.readouterr().out.strip() != key.strip()


@pytest.mark.parametrize("system", ["systemd", "launchd"])
def test_a_service_starts_this_installation(capsys: pytest.CaptureFixture[str], system: str) -> None:
    assert main(["service", "print", system, "qwen3-4b"]) == 0
    text = capsys.readouterr().out
    assert sys.executable in text
    assert "qwen3-4b" in text


def test_models_list_is_the_same_for_people_and_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    people = capsys.readouterr().out
    assert main(["models", "list", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert len(document["models"]) > 5
    assert all(entry["name"] in people for entry in document["models"])


def test_a_model_is_found_pulled_and_removed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model_path: Path, tmp_path: Path
) -> None:
    monkeypatch.setenv("EDGESERVE_MODELS_DIR", str(tmp_path))
    assert main(["models", "path", "smollm2-135m"]) == 3
    here = tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf"
    here.symlink_to(model_path)
    for command in ("path", "pull"):
        capsys.readouterr()
        assert main(["models", command, "smollm2-135m"]) == 0
        assert capsys.readouterr() == (f"{here}\n", "")
    assert main(["models", "list", "--local"]) == 0
    assert "smollm2-135m" in capsys.readouterr().out
    assert main(["models", "rm", "smollm2-135m"]) == 0
    assert capsys.readouterr().out == f"{here}\n"
    assert not here.exists() and model_path.exists()


def test_a_device_is_shown_by_the_name_that_people_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["devices", "MacBook Air M2 16 GB"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^bandwidth +100 GB/s$", text, re.MULTILINE)
    assert main(["devices", "MacBook Air M2 16 GB", "--json"]) == 0
    choice = json.loads(capsys.readouterr().out)
    assert (choice["profile"]["key"], choice["memory_gib"]) == ("m2-8", 16)
    assert main(["devices"]) == 0
    assert len(capsys.readouterr().out.splitlines()) > 100
    assert main(["devices", "zzz 9000"]) == 2


# --- with the model ----------------------------------------------------------------------------------------


def test_chat_without_a_question_answers_nothing_and_loads_nothing() -> None:
    code, out, err = run("chat", "no-such-model")
    assert (code, out) == (0, "")
    assert "nothing to answer" in err


def test_one_answer_is_all_that_standard_output_gets(model_path: Path) -> None:
    question = "What is the capital of France? Answer in one sentence."
    code, out, err = run("chat", str(model_path), "-p", question, "--temp", "0", "-ngl", "0")
    assert (code, out, err) == (0, "The capital of France is Paris.\n", "")


def test_a_question_may_come_on_standard_input(model_path: Path) -> None:
    process = child("chat", str(model_path), "--temp", "0", "--max-tokens", "3", stdin=subprocess.PIPE)
    out, err = process.communicate("Say hi", timeout=MODEL_RUN_S)
    assert (process.returncode, err) == (0, "")
    assert out.strip()


def test_ctrl_c_keeps_what_came_and_exits_130(model_path: Path) -> None:
    process = child(
        "chat", str(model_path), "-p", "Count from 1 to 1000.", "--temp", "0", "--max-tokens", "2000"
    )
    assert process.stdout is not None
    begin = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert (begin + out).endswith("\n")
    assert "Traceback" not in err


@contextmanager
def serving(
    *arguments: str, env: dict[str, str] | None = None
) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """A server in a child: its process, its address, and its lines on standard error so far."""
    process = child("serve", *arguments, "--port", "0", env=env)
    assert process.stderr is not None
    lines: list[str] = []
    try:
        for line in process.stderr:
            lines.append(line.rstrip("\n"))
            if line.startswith("ready"):
                break
        address = re.search(r"http://[\d.]+:\d+", "\n".join(lines))
        assert address, lines
        reader = threading.Thread(target=lambda: lines.extend(process.stderr or ()), daemon=True)
        reader.start()
        yield process, address[0], lines
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def test_serve_says_how_it_runs_even_under_an_empty_environment(model_path: Path) -> None:
    with serving(str(model_path), "-ngl", "99", "-np", "2", "-c", "1024", "--no-tune", env={}) as (
        process,
        address,
        lines,
    ):
        text = "\n".join(lines)
        with urllib.request.urlopen(f"{address}/health", timeout=10) as response:
            assert json.load(response)["status"] == "ok"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0
    assert re.search(r"^context +512 tokens a request, 2 sequences, 1,024 in all$", text, re.MULTILINE)
    assert re.search(r"^threads +\d+: \S+", text, re.MULTILINE)
    assert re.search(r"^access +loopback only, no key needed$", text, re.MULTILINE)
    assert re.search(r"^model +.*\(135M parameters, Q4_1, 92 MiB\)$", text, re.MULTILINE)
    offload = re.search(r"^offload +(\d+) of 31 layers on a GPU", text, re.MULTILINE)
    assert offload
    # Asked for a GPU and got none: said loudly, whatever the reason.
    assert (offload[1] == "0") == ("warning: -ngl has no effect" in text)


def test_serve_with_a_key_answers_its_holder_only(model_path: Path, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret-key\n")
    arguments = (
        str(model_path),
        "--api-key-file",
        str(tmp_path / "key"),
        "-np",
        "1",
        "-c",
        "512",
        "-a",
        "small",
    )
    with serving(*arguments) as (_, address, lines):
        assert "access     loopback only, API key required" in lines
        request = urllib.request.Request(f"{address}/v1/models")
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(request, timeout=10)
        request.add_header("Authorization", "Bearer secret-key")
        with urllib.request.urlopen(request, timeout=10) as response:
            assert json.load(response)["data"][0]["id"] == "small"
        code, out, _ = run(
            "chat", "--url", address, "--api-key", "secret-key", "-p", "hi", "--max-tokens", "2"
        )
        assert (code, bool(out.strip())) == (0, True)
        assert run("chat", "--url", address, "-p", "hi")[0] == 1
    assert "secret-key" not in "\n".join(lines)
