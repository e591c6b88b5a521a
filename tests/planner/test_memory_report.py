"""What a report adds to llama.cpp's own account, and how its figures add up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import zoo

from edgeserve.gguf import GGUFHeader, read_header
from edgeserve.planner.library_figures import BufferBytes, DryRun
from edgeserve.planner.measure import measure
from edgeserve.planner.memory import Extras, ModelMemory, plan_memory
from edgeserve.planner.placement import Accelerator
from edgeserve.planner.report import ExtraLine, MemoryReport
from edgeserve.planner.settings import Settings

GIB, MIB = 1 << 30, 1 << 20
GPU = [Accelerator("CUDA0", 8 * GIB, 8 * GIB)]
BASE = Settings(n_ctx=4096, n_seq_max=3, swa_full=False)


@pytest.fixture
def model(tmp_path: Path) -> GGUFHeader:
    return read_header(zoo.write_model("llama", tmp_path / "llama.gguf"))


def line(report: MemoryReport, name: str) -> ExtraLine:
    return next(extra for extra in report.extras if extra.name == name)


def test_output_buffer_is_one_row_of_logits_a_sequence(model: GGUFHeader) -> None:
    report = plan_memory(model, BASE)
    assert report.output_bytes == line(report, "output buffer").n_bytes == 4 * 3 * zoo.N_VOCAB
    with_embeddings = plan_memory(model, replace(BASE, embeddings=True))
    assert with_embeddings.output_bytes == 4 * 3 * (zoo.N_VOCAB + 256)


def test_need_is_the_sum_of_all_counted_lines(model: GGUFHeader) -> None:
    extras = Extras(prefix_cache_bytes=64 * MIB)
    report = ModelMemory(model).report(BASE, GPU, extras=extras)
    for device in report.devices:
        lines = sum(x.n_bytes for x in report.extras if x.device == device.name and x.counted)
        need = report.need(device.name)
        assert need.likely == device.total_bytes + lines
        assert need.low <= need.likely <= need.high
    assert line(report, "prefix cache").n_bytes == 64 * MIB
    assert line(report, "backend overhead").device == "CUDA0"


def test_overhead_is_for_devices_that_hold_layers(model: GGUFHeader) -> None:
    report = ModelMemory(model).report(replace(BASE, n_gpu_layers=0), GPU)
    assert not any(extra.name == "backend overhead" for extra in report.extras)


def test_projector_is_a_line_of_its_own(model: GGUFHeader, tmp_path: Path) -> None:
    projector = read_header(zoo.write_model("gemma3", tmp_path / "stand-in.gguf"))
    with_it = plan_memory(model, BASE, GPU, extras=Extras(projector=projector))
    without = plan_memory(model, BASE, GPU)
    assert line(with_it, "vision projector").n_bytes == projector.tensor_bytes
    assert with_it.need("CUDA0").likely - without.need("CUDA0").likely == projector.tensor_bytes


def test_mapped_weights_are_told_from_private_memory(model: GGUFHeader) -> None:
    mapped, copied = plan_memory(model, BASE), plan_memory(model, replace(BASE, use_mmap=False))
    assert mapped.host_mapped_bytes == mapped.devices[0].model_bytes > 0
    assert copied.host_mapped_bytes == 0


def test_rearranged_weights_are_bounded_and_then_known(model: GGUFHeader) -> None:
    bound = line(plan_memory(model, BASE), "repacked weights")
    assert bound.source == "upper bound" and not bound.counted
    assert 0 < bound.n_bytes <= model.tensor_bytes
    (real,) = measure(model, [BASE])
    assert isinstance(real, MemoryReport)
    known = [extra for extra in real.extras if extra.name == "repacked weights"]
    assert sum(extra.n_bytes for extra in known) <= bound.n_bytes
    off = plan_memory(model, replace(BASE, use_extra_bufts=False))
    assert not any(extra.name == "repacked weights" for extra in off.extras)


def test_buffers_of_one_device_are_added_up(model: GGUFHeader) -> None:
    buffers = (
        BufferBytes("CUDA0", 100, 30, 7),
        BufferBytes("CUDA0_Host", 50, 0, 3),
        BufferBytes("CPU", 20, 40, 0),
        BufferBytes("CPU_REPACK", 60, 0, 0),
    )
    run = DryRun(buffers, True, True, "", 4096, 4096)
    sums = run.by_device(GPU)
    assert sums["CUDA0"] == BufferBytes("CUDA0", 100, 30, 7)
    assert sums["CPU"] == BufferBytes("CPU", 130, 40, 3)
    assert run.rearranged_bytes(GPU) == 60


def test_inexact_dry_run_replaces_compute_only(model: GGUFHeader) -> None:
    run = DryRun(
        (BufferBytes("CUDA0", 0, 0, 7 * MIB), BufferBytes("CPU", 0, 0, MIB)), False, True, "", 4096, 4096
    )
    planned, measured = plan_memory(model, BASE, GPU), plan_memory(model, BASE, GPU, dry_run=run)
    assert [(d.model_bytes, d.context_bytes) for d in measured.devices] == [
        (d.model_bytes, d.context_bytes) for d in planned.devices
    ]
    assert [d.compute_bytes for d in measured.devices] == [MIB, 7 * MIB]
    assert (measured.compute_source, measured.context_source) == ("dry-run", "exact")


def test_real_devices_are_used_when_nothing_is_pretended(model: GGUFHeader) -> None:
    settings = replace(BASE, n_gpu_layers=0)
    (real,), (alone,) = measure(model, [settings], pretend=False), measure(model, [settings])
    assert isinstance(real, MemoryReport) and isinstance(alone, MemoryReport)
    assert real.context_bytes == alone.context_bytes


def test_every_figure_comes_with_the_settings_it_assumes(model: GGUFHeader) -> None:
    report = plan_memory(model, replace(BASE, n_ctx=4100, type_k="q8_0", type_v="q8_0"))
    assert report.resolved is not None
    assert (report.resolved.n_ctx, report.resolved.n_ctx_seq, report.resolved.n_seq_max) == (4608, 1536, 3)
    assert report.settings.type_k == "q8_0"
    assert report.kv_bytes == report.kv_bytes_per_token * report.resolved.n_ctx
