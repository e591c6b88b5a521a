"""Memory figures against llama.cpp itself: its recorded figures, its dry run, and models really loaded.

truth.json holds what llama.cpp 0c1e57098 said of 990 contexts over 100 models on a CPU (no rearranged
weights, no mmap), with the header of each model beside it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import zoo

from edgeserve.gguf import read_header
from edgeserve.planner.library_figures import DryRun
from edgeserve.planner.measure import DryRunFailure, dry_run, measure
from edgeserve.planner.memory import ModelMemory, plan_memory
from edgeserve.planner.report import MemoryReport
from edgeserve.planner.settings import Settings

TRUTH: dict[str, Any] = json.loads((zoo.HEADERS.parent / "truth.json").read_text())["models"]

# One of each memory class, chosen small; the real sizes have vocabularies that take longest to read.
DRY_RUN_MODELS = (
    "tiny/gemma2", "tiny/glm-dsa-moe", "tiny/deepseek4-moe", "tiny/rwkv7", "tiny/falcon-h1",
    "tiny/laguna-moe", "tiny/nomic-bert", "tiny/qwen3moe-moe", "real-size/mixtral-8x7b",
    "real-size/lfm2-1.2b",
)  # fmt: skip

LOADED = (
    "llama", "llama-tied", "llama-rope-factors", "qwen2", "qwen3", "qwen3moe-moe", "falcon", "phi2",
    "bloom", "chatglm", "gemma3", "gemma4", "gpt-oss-moe", "cohere2moe-draft", "mimo2-moe", "modern-bert",
    "dream", "deepseek2", "deepseek32-draft", "dots3note-moe", "minicpm3", "arwkv7", "rwkv6", "falcon-h1",
    "granitehybrid", "jamba-moe", "lfm2", "lfm2moe-moe", "minimax-01-moe", "nemotron_h", "plamo2",
    "qwen35-draft", "bailingmoe3-moe",
)  # fmt: skip

LOADED_SETTINGS = (
    Settings(n_ctx=512, swa_full=False),
    Settings(n_ctx=1024, n_seq_max=3, swa_full=False),
    Settings(n_ctx=700, n_seq_max=2, kv_unified=True, swa_full=False),
    Settings(n_ctx=512, flash_attn="off"),
    Settings(n_ctx=512, n_ubatch=64, type_k="q8_0", type_v="q8_0", swa_full=False),
    Settings(n_ctx=512, n_batch=128, n_ubatch=32, n_seq_max=4, n_outputs_max=0, swa_full=False),
)


def settings_of_row(row: dict[str, Any]) -> Settings:
    return Settings(**row["settings"], use_extra_bufts=False)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelMemory]:
    directory = tmp_path_factory.mktemp("headers")
    return {name: ModelMemory(zoo.truth_header(name.replace("/", "-"), directory)) for name in TRUTH}


def test_weights_and_context_are_exact_for_all_recorded_rows(models: dict[str, ModelMemory]) -> None:
    wrong = []
    for name, entry in TRUTH.items():
        for row in entry["rows"]:
            report = models[name].report(settings_of_row(row))
            if "bytes" in row:
                said = row["bytes"]["CPU"]
                found = [(device.model_bytes, device.context_bytes) for device in report.devices]
                exact = found == [(said["model"], said["context"])]
            else:
                exact = report.rejected is not None
            if not exact:
                wrong.append((name, row["settings"]))
    assert not wrong
    assert sum(len(entry["rows"]) for entry in TRUTH.values()) == 990


def test_estimated_compute_holds_in_nine_of_ten_rows(models: dict[str, ModelMemory]) -> None:
    held = {"tiny": 0, "real-size": 0}
    total = {"tiny": 0, "real-size": 0}
    for name, entry in TRUTH.items():
        kind = name.split("/")[0]
        for row in entry["rows"]:
            if "bytes" not in row:
                continue
            report = models[name].report(settings_of_row(row))
            host = report.devices[0]
            assert report.compute_source == "estimate"
            total[kind] += 1
            held[kind] += host.compute_low_bytes <= row["bytes"]["CPU"]["compute"] <= host.compute_high_bytes
    assert held["tiny"] / total["tiny"] >= 0.9
    assert held["real-size"] / total["real-size"] >= 0.9


@pytest.mark.parametrize("name", DRY_RUN_MODELS)
def test_dry_run_is_exact_and_refuses_for_the_same_reason(name: str, models: dict[str, ModelMemory]) -> None:
    rows = TRUTH[name]["rows"]
    all_settings = [settings_of_row(row) for row in rows]
    results = measure(models[name].header, all_settings)
    for row, settings, result in zip(rows, all_settings, results, strict=True):
        if "bytes" not in row:
            assert isinstance(result, DryRunFailure)
            assert result.kind == "refused"
            assert result.code == models[name].report(settings).rejection_code
            continue
        assert isinstance(result, MemoryReport), result
        device, said = result.devices[0], row["bytes"]["CPU"]
        assert device.model_bytes == said["model"]
        assert device.context_bytes == said["context"]
        assert (
            device.compute_bytes == device.compute_low_bytes == device.compute_high_bytes == said["compute"]
        )
        assert result.compute_source == "dry-run"


@pytest.mark.parametrize("name", LOADED)
def test_really_loaded_models_take_what_was_planned(name: str, tmp_path: Path) -> None:
    header = read_header(zoo.write_model(name, tmp_path / f"{name}.gguf"))
    loaded = dry_run(header, LOADED_SETTINGS, allocate=True)
    for settings, result in zip(LOADED_SETTINGS, loaded, strict=True):
        planned = plan_memory(header, settings)
        if isinstance(result, DryRunFailure):
            assert result.code == planned.rejection_code != ""
            continue
        assert isinstance(result, DryRun)
        host = result.by_device(())["CPU"]
        rearranged = result.rearranged_bytes(())
        assert host.context_bytes == planned.devices[0].context_bytes
        assert rearranged or host.model_bytes == planned.devices[0].model_bytes
        assert planned.resolved is not None
        assert (result.n_ctx, result.n_ctx_seq) == (planned.resolved.n_ctx, planned.resolved.n_ctx_seq)


def test_doubtful_dry_run_is_an_estimate_that_covers_the_real_load(tmp_path: Path) -> None:
    header = read_header(zoo.write_model("minimax-01-moe", tmp_path / "m.gguf"))
    settings = [Settings(n_ctx=1024, n_seq_max=3, swa_full=False)]
    (dry,), (loaded,) = measure(header, settings), measure(header, settings, allocate=True)
    assert isinstance(dry, MemoryReport) and isinstance(loaded, MemoryReport)
    assert dry.compute_source == "estimate" and "dry run leaves out" in dry.notes[0]
    assert loaded.compute_source == "dry-run" and not loaded.notes
    host = dry.devices[0]
    assert host.compute_low_bytes <= loaded.compute_bytes <= host.compute_high_bytes
