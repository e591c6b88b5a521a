"""`edgeserve plan`, `devices` and `models fit` as users meet them, and what serve and chat make of a plan."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf_builder as build
import plan_cases as cases
import pytest
import zoo
from file_server import FileServer, Served, file_server
from plan_cases import GIB, MIB

from edgeserve.cli import main
from edgeserve.host import MemoryBudget
from edgeserve.ink import without_colour
from edgeserve.planner.here import ask_probe

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def _own_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No calibration, tuning, configuration or header of the user's."""
    config = tmp_path / "config.toml"
    config.write_text("")
    monkeypatch.setenv("EDGESERVE_CONFIG", str(config))
    monkeypatch.setenv("EDGESERVE_TUNING_DIR", str(tmp_path / "tuning"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("edgeserve.planner.calibration_store.store_path", lambda: tmp_path / "cal.json")


@pytest.fixture
def server() -> Iterator[FileServer]:
    with file_server() as running:
        yield running


def document(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def give_memory(monkeypatch: pytest.MonkeyPatch, n_bytes: int) -> None:
    budget = MemoryBudget(16 * GIB, n_bytes, None, "told")
    monkeypatch.setattr("edgeserve.planner.this_machine.memory_budget", lambda: budget)


# --- figures


def test_typed_settings_are_reported_exactly_as_llama_cpp_has_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    truth = json.loads((ROOT / "tests/data/memory_truth/truth.json").read_text())["models"]
    for name in ("real-size/gemma2-9b", "real-size/mixtral-8x7b", "real-size/qwen3-next-80b"):
        entry = truth.get(name) or truth[name.replace("real-size/", "real-size-")]
        path = tmp_path / "m.gguf"
        path.write_bytes(zoo.gzip.open(zoo.HEADERS / entry["header"]).read())
        for row in entry["rows"]:
            if not row["bytes"]:
                continue
            found = document(capsys, "plan", str(path), "--estimate", *flags_of(row["settings"]))
            (device,) = found["memory"]["devices"]
            real = row["bytes"]["CPU"]
            assert (device["model_bytes"], device["context_bytes"]) == (real["model"], real["context"])
            assert device["compute_low_bytes"] <= real["compute"] <= device["compute_high_bytes"]
            assert found["settings"]["n_ctx"] == row["settings"]["n_ctx"]
            assert found["memory"]["compute_source"] == "estimate"


def flags_of(settings: dict[str, Any]) -> list[str]:
    names = {"n_ctx": "-c", "n_seq_max": "-np", "n_batch": "-b", "n_ubatch": "-ub", "type_k": "-ctk",
             "type_v": "-ctv", "flash_attn": "-fa", "n_outputs_max": "--outputs-max",
             "n_gpu_layers": "-ngl"}  # fmt: skip
    flags = [word for name, flag in names.items() for word in (flag, str(settings[name]))]
    flags.append("--kv-unified" if settings["kv_unified"] else "--no-kv-unified")
    return [*flags, "--swa-full"] if settings["swa_full"] else flags


def test_a_dry_run_gives_the_library_s_own_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a header-only sparse file as of a bare header."""
    bare = cases.header(tmp_path, n_layer=4, n_embd=1024, n_ff=2048, n_head=8, n_head_kv=2)
    sparse = tmp_path / "sparse.gguf"
    sparse.write_bytes(Path(bare.source).read_bytes())
    with sparse.open("r+b") as file:
        file.truncate(bare.total_bytes)
    found = [document(capsys, "plan", str(path), "-c", "4096") for path in (bare.source, sparse)]
    assert found[0]["memory"]["devices"] == found[1]["memory"]["devices"]
    assert found[0]["memory"]["compute_source"] in ("dry-run", "estimate")
    assert found[0]["settings"]["n_ctx"] == 4096


def test_planned_bytes_are_those_of_a_real_load(model_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "plan", str(model_path), "--verify", "-c", "2048", "-np", "1")
    assert found["memory"]["compute_source"] == "dry-run"
    for row in found["verified"]:
        assert row["planned_bytes"] == row["real_bytes"], row


def test_a_split_model_is_counted_once_and_without_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metadata, tensors = cases.dense(n_layer=6, n_embd=512, n_ff=1024, n_head=8, n_head_kv=8)
    whole = tmp_path / "whole.gguf"
    whole.write_bytes(build.header_bytes(metadata, tensors))
    for index in range(3):
        part = {**(metadata if index == 0 else {"general.architecture": "llama"})}
        part |= {"split.no": build.Typed(build.U16, index), "split.count": build.Typed(build.U16, 3)}
        path = tmp_path / f"parts-0000{index + 1}-of-00003.gguf"
        path.write_bytes(build.header_bytes(part, tensors[index::3]))
    split = document(capsys, "plan", str(tmp_path / "parts-00002-of-00003.gguf"), "--estimate")
    one = document(capsys, "plan", str(whole), "--estimate")
    assert split["memory"]["devices"] == one["memory"]["devices"]
    assert capsys.readouterr().err == ""


def test_a_remote_model_costs_its_header_only(
    server: FileServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = cases.header(tmp_path, n_layer=4, n_embd=1024, n_ff=2048, n_head=8, n_head_kv=2)
    head = Path(model.source).read_bytes()
    body = head + b"\x5a" * (16 * MIB)
    server.paths["/m-Q4_K_M.gguf"] = Served(body)
    found = document(capsys, "plan", f"{server.url}/m-Q4_K_M.gguf", "--estimate", "-c", "4096")
    asked = [headers["range"] for headers in server.asked("/m-Q4_K_M.gguf")]
    assert asked == ["bytes=0-1048575"]
    assert (
        found["memory"]["devices"]
        == document(capsys, "plan", model.source, "--estimate", "-c", "4096")["memory"]["devices"]
    )
    assert "-mu http" in found["commands"]["llama_server"]


def test_a_projector_is_a_line_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = cases.header(tmp_path, n_layer=4, n_embd=1024, n_ff=2048, n_head=8, n_head_kv=2)
    projector = cases.header(tmp_path, "mmproj.gguf", arch="clip", n_layer=2, n_embd=512, n_ff=512)
    found = document(capsys, "plan", model.source, "--mmproj", projector.source, "--estimate")
    lines = {line["name"]: line["n_bytes"] for line in found["memory"]["extras"]}
    assert lines["vision projector"] == projector.tensor_bytes


# --- forms


def test_the_text_is_plain_and_narrow(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    model = cases.header(tmp_path)
    assert main(["plan", model.source, "--estimate", "--device", "MacBook Air M2 16 GB"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    labels = [line.split()[0] for line in out.splitlines() if line.startswith("  ") and line[2] != " "]
    assert labels[:4] == ["suggested", "memory", "speed", "why"]
    commands = ("edgeserve serve", "llama-server")
    assert all(len(line) <= 100 for line in out.splitlines() if not any(c in line for c in commands))
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(["plan", model.source, "--estimate", "--device", "MacBook Air M2 16 GB"]) == 0
    coloured = capsys.readouterr().out
    assert "\x1b[" in coloured
    assert without_colour(coloured) == out


def test_all_forms_of_a_plan_say_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = cases.header(tmp_path)
    typed = ["plan", model.source, "--estimate", "--device", "RTX 4060 laptop", "-np", "1", "-c", "8192"]
    found = document(capsys, *typed)
    need = found["memory"]["pools"][0]["need_high_bytes"]
    table = document(capsys, *typed, "--table")
    same = [
        cell for cell in table["cells"]
        if (cell["n_ctx_seq"], cell["cache_type"], cell["n_gpu_layers"]) == (8192, "f16", 33)
    ]  # fmt: skip
    assert same[0]["fits"]
    assert abs(same[0]["need_bytes"][0] - need) < MIB  # the table says -fa on where the plan says auto
    assert main([*typed, "--markdown"]) == 0
    shown = capsys.readouterr().out
    assert f"{need / GIB:.2f} GiB of" in shown
    assert str(tmp_path) not in shown
    assert main([*typed, "--table"]) == 0
    assert "-ngl 33" in capsys.readouterr().out


def test_quantizations_beside_a_file_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = cases.header(tmp_path, "Made-up-Q4_K_M.gguf", n_layer=4)
    cases.header(tmp_path, "Made-up-Q8_0.gguf", n_layer=4)
    cases.header(tmp_path, "Other-Q8_0.gguf", n_layer=5)
    found = document(capsys, "plan", model.source, "--quants", "--estimate")
    assert [row["file"] for row in found["quants"]] == ["Made-up-Q4_K_M.gguf", "Made-up-Q8_0.gguf"]
    assert not any(row["is_scaled"] for row in found["quants"])


def test_quantizations_of_a_repository_are_scaled_from_their_sizes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from edgeserve import hub

    model = cases.header(tmp_path)
    files = (
        hub.HubFile("m-Q4_K_M.gguf", model.total_bytes),
        hub.HubFile("m-Q8_0.gguf", 2 * model.total_bytes),
    )
    monkeypatch.setattr(hub, "list_files", lambda repo: files)
    monkeypatch.setattr("edgeserve.models.read_model_header", lambda *args, **options: model)
    typed = ("plan", "hf:org/m:Q4_K_M", "--quants", "--estimate", "--device", "RTX 4060 laptop")
    small, large = document(capsys, *typed)["quants"]
    assert (small["quant"], large["quant"]) == ("Q4_K_M", "Q8_0")
    assert small["is_scaled"] and large["is_scaled"]
    assert large["n_gpu_layers"] < small["n_gpu_layers"] == 33


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        (["--memory", "lots"], "no size"),
        (["--prefer", "fame"], "cannot prefer"),
        (["--device", "zzz 9000"], "No device profile"),
        (["--backend", "cuda"], "no backend cuda"),
        (["-ctk", "q9_9"], "-ctk"),
        (["--min-ctx", "-1"], "must not be negative"),
        (["--device", "RTX 4090", "--verify"], "for this machine"),
        (["--table", "--quants"], "do not go together"),
        (["--device", "RTX 4090", "--backend", "metal"], "One of: cuda, vulkan, cpu."),
    ],
)
def test_mistakes_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], typed: list[str], words: str
) -> None:
    model = cases.header(tmp_path, n_layer=1, n_embd=256, n_ff=256, n_head=4, n_head_kv=4)
    assert main(["plan", model.source, "--estimate", *typed]) == 2
    assert words in capsys.readouterr().err


def test_what_a_missing_gpu_was_asked_for_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = cases.header(tmp_path, n_layer=2, n_embd=512, n_ff=512, n_head=8, n_head_kv=8)
    typed = ("plan", model.source, "--estimate", "--backend", "cpu")
    asked = document(capsys, *typed, "-ngl", "7", "--gpu-memory", "2GiB")
    sentence = "-ngl 7 and --gpu-memory have no effect: there is no GPU here that llama.cpp could use."
    assert sentence in asked["reasons"]
    assert asked["settings"]["n_gpu_layers"] == 7
    assert not any("no effect" in reason for reason in document(capsys, *typed, "-ngl", "0")["reasons"])


def test_a_model_that_llama_cpp_does_not_load_is_pointed_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its memory is planned all the same, and the cache of an unknown design called what it is."""
    model = cases.header(tmp_path, arch="zzz", n_layer=2, n_embd=512, n_ff=512, n_head=8, n_head_kv=8)
    found = document(capsys, "plan", model.source, "-c", "4096")
    assert "does not load the model" in found["reasons"][-1]
    assert "zzz" in found["reasons"][-1]
    assert found["memory"]["context_source"] == "upper bound"
    assert found["proof"]["is_loadable"] is False
    assert main(["plan", model.source, "-c", "4096", "--estimate"]) == 0
    assert "the cache is an upper bound" in capsys.readouterr().out


def test_planning_loads_no_runtime(model_path: Path) -> None:
    code = (
        "import sys; from edgeserve.cli import main; main(['plan', sys.argv[1], '--json', '--estimate']);"
        " print([m for m in ('llama_cpp', 'numpy', 'textual', 'starlette') if m in sys.modules],"
        " file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(model_path)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stderr.strip() == "[]"
    assert json.loads(done.stdout)["fits"] is True


# --- machines


def test_this_machine_and_others_can_be_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    here = document(capsys, "devices", "show")
    assert here["pools"][0]["usable_bytes"] > 0
    assert here["calibration"] is None
    other = document(capsys, "devices", "show", "RTX 4060 laptop")
    assert [pool["devices"] for pool in other["pools"]] == [["CUDA0"], ["CPU"]]
    assert main(["devices", "show"]) == 0
    assert "not yet" in capsys.readouterr().out
    assert main(["devices", "list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) > 100


def test_models_that_fit_are_listed_without_a_download(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "models", "fit", "--device", "Raspberry Pi 5 4 GB")
    by_name = {row["name"]: row for row in found["models"]}
    assert by_name["qwen3-30b-a3b"]["fits"] is False
    assert by_name["qwen3-0.6b"]["fits"] is True
    assert main(["models", "fit", "--device", "Raspberry Pi 5 4 GB"]) == 0
    assert "qwen3-30b-a3b" in capsys.readouterr().out


def test_the_probe_measures_single_steps(model_path: Path) -> None:
    request = {"want": "speed", "path": str(model_path), "n_threads": 1, "n_gpu_layers": 0}
    rows = ask_probe({**request, "flash_attn": ["off"], "budget_s": 0.1}, 120)
    kinds = [(row["kind"], row["num_sequences"]) for row in rows]
    assert kinds == [("decode", 1), ("prefill", 1), ("chunked prefill", 1), ("decode", 1), ("decode", 4)]
    assert all(0 < row["seconds"] < 120 and row["flash_attn"] is False for row in rows)


def test_the_probe_lists_devices_and_names_its_errors() -> None:
    (answer,) = ask_probe({"want": "devices"}, 60)
    assert any(device["type"] == "cpu" for device in answer["devices"])
