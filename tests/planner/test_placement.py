"""What goes where: planned over -ngl, tensor split and expert overrides, against llama.cpp's own placement.

The devices are pretended (`edgeserve.virtual_device`), so llama.cpp itself decides where every tensor goes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import zoo

from edgeserve.gguf import GGUFHeader, read_header
from edgeserve.planner.measure import DryRunFailure, measure
from edgeserve.planner.memory import ModelMemory
from edgeserve.planner.placement import Accelerator, place_layers
from edgeserve.planner.report import MemoryReport
from edgeserve.planner.settings import Settings

GIB = 1 << 30
ONE = [Accelerator("GPU0", 8 * GIB, 8 * GIB)]
TWO = [Accelerator("GPU0", 8 * GIB, 8 * GIB), Accelerator("GPU1", 20 * GIB, 24 * GIB)]
BASE = Settings(n_ctx=4096, n_seq_max=2, swa_full=False)

# Experts, short convolutions, a hybrid with a state space, all recurrent, an encoder, windows.
SWEPT = {
    "real-size-mixtral-8x7b": (0, 1, 2, 17, 32, 33),
    "real-size-lfm2-1.2b": (0, 1, 2, 3, 8, 16, 17),
    "real-size-nemotron-h-8b": (12, 53),
    "real-size-falcon-mamba-7b": (1, 40, 65),
    "real-size-bge-base": (1, 6, 13),
    "real-size-gpt-oss-20b": (9,),
}  # fmt: skip


def assert_as_planned(model: GGUFHeader, all_settings: list[Settings], devices: list[Accelerator]) -> None:
    memory = ModelMemory(model)
    for settings, real in zip(all_settings, measure(model, all_settings, devices), strict=True):
        assert isinstance(real, MemoryReport), real
        planned = memory.report(settings, devices)
        assert _exact(planned) == _exact(real), settings


def _exact(report: MemoryReport) -> list[tuple[str, int, int]]:
    return [(device.name, device.model_bytes, device.context_bytes) for device in report.devices]


@pytest.mark.parametrize("name", SWEPT)
def test_every_layer_count_is_placed_as_llama_cpp_does(name: str, tmp_path: Path) -> None:
    settings = [replace(BASE, n_gpu_layers=n_gpu_layers) for n_gpu_layers in SWEPT[name]]
    assert_as_planned(zoo.truth_header(name, tmp_path), settings, ONE)


@pytest.mark.parametrize("name", ["real-size-lfm2-1.2b", "real-size-mixtral-8x7b"])
def test_two_devices_share_by_free_memory_or_by_the_given_split(name: str, tmp_path: Path) -> None:
    settings = [
        BASE,
        replace(BASE, n_gpu_layers=9),
        replace(BASE, tensor_split=(3.0, 1.0)),
        replace(BASE, n_gpu_layers=9, tensor_split=(1.0, 2.0)),
        replace(BASE, tensor_split=(0.0, 1.0)),
    ]
    assert_as_planned(zoo.truth_header(name, tmp_path), settings, TWO)


def test_experts_and_cache_can_stay_on_the_host(tmp_path: Path) -> None:
    settings = [
        replace(BASE, n_cpu_moe=10),
        replace(BASE, n_cpu_moe=32, n_gpu_layers=20),
        replace(BASE, offload_kqv=False),
    ]
    assert_as_planned(zoo.truth_header("real-size-mixtral-8x7b", tmp_path), settings, ONE)


def test_other_alignments_and_no_pinned_memory(tmp_path: Path) -> None:
    metal = Accelerator(
        "MTL0", 8 * GIB, 8 * GIB, alignment=16384, pads_quantized_rows=False, has_host_buffer=False
    )
    assert_as_planned(
        zoo.truth_header("real-size-bge-base", tmp_path), [BASE, replace(BASE, n_gpu_layers=5)], [metal]
    )


def test_tied_embeddings_are_copied_to_the_device_that_has_the_output(tmp_path: Path) -> None:
    path = zoo.write_model("llama-tied", tmp_path / "tied.gguf")
    model = read_header(path)
    assert_as_planned(model, [replace(BASE, n_gpu_layers=n) for n in (0, 1, 3)], ONE)
    table = next(tensor for tensor in model.tensors if tensor.name == "token_embd.weight")
    none, one = (ModelMemory(model).report(replace(BASE, n_gpu_layers=n), ONE).model_bytes for n in (0, 1))
    assert one - none >= table.n_bytes


@pytest.mark.parametrize("name", ["llama-rope-factors", "gemma4", "deepseek32-draft", "lfm2", "qwen35-draft"])
def test_shared_and_draft_tensors_follow_their_layers(name: str, tmp_path: Path) -> None:
    model = read_header(zoo.write_model(name, tmp_path / f"{name}.gguf"))
    assert_as_planned(model, [replace(BASE, n_gpu_layers=n) for n in (1, 2, 3)], TWO)


def test_output_layer_moves_first_and_without_devices_nothing_moves() -> None:
    one = place_layers(4, Settings(n_gpu_layers=1), ONE)
    assert one.layer_device == (-1, -1, -1, -1, 0)
    assert place_layers(4, Settings(n_gpu_layers=-1), ONE).num_gpu_layers == 5
    assert place_layers(4, Settings(n_gpu_layers=-1), ()).num_gpu_layers == 0


def test_devices_without_known_memory_share_alike() -> None:
    blind = [Accelerator("A", 0, 0), Accelerator("B", 0, 0)]
    assert place_layers(3, Settings(), blind).layer_device == (0, 0, 1, 1)


def test_automatic_flash_attention_is_seen_to_be_dropped(tmp_path: Path) -> None:
    """LFM2 with two layers on the device: the attention layer before the border is pulled across it."""
    model = zoo.truth_header("real-size-lfm2-1.2b", tmp_path)
    two = replace(BASE, n_gpu_layers=2)
    settings = [two, replace(BASE, n_gpu_layers=3), replace(two, flash_attn="on")]
    dropped, kept, forced = measure(model, settings, ONE)
    assert (
        isinstance(dropped, MemoryReport)
        and isinstance(kept, MemoryReport)
        and isinstance(forced, MemoryReport)
    )
    assert dropped.flash_attn is False
    assert "assigned to device CPU but Flash Attention" in dropped.flash_attn_reason
    assert any("-fa on" in note for note in dropped.notes)
    assert kept.flash_attn is True and forced.flash_attn is True
    assert dropped.devices[0].compute_bytes > 4 * forced.devices[0].compute_bytes


def test_estimate_covers_a_dropped_flash_attention(tmp_path: Path) -> None:
    model = zoo.truth_header("real-size-lfm2-1.2b", tmp_path)
    settings = replace(BASE, n_gpu_layers=2)
    (real,) = measure(model, [settings], ONE)
    assert not isinstance(real, DryRunFailure)
    for planned, device in zip(ModelMemory(model).report(settings, ONE).devices, real.devices, strict=True):
        assert planned.compute_low_bytes <= device.compute_bytes <= planned.compute_high_bytes
