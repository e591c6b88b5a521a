"""What the start says: layers really offloaded, a GPU asked for in vain, and the context that came out."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgeserve import ggml
from edgeserve.commands.engine_start import (
    Offload,
    make_engine,
    offload_of,
    threads_reason,
    unused_gpu_warning,
)
from edgeserve.commands.serve import access_text, context_text, engine_lines, model_text
from edgeserve.config import EngineConfig, ServerConfig
from edgeserve.host import cpu_budget
from edgeserve.llama import Model
from edgeserve.settings.sources import Settings, gather
from edgeserve.settings.values import defaults_of

CPU_BUILD, NO_GPU = Offload(0, 31, is_possible=False), Offload(0, 31, is_possible=True)


def settings(typed: dict[str, str] | None = None, environ: dict[str, str] | None = None) -> Settings:
    return gather("serve", typed or {}, environ or {}, defaults_of("serve"), config_path=Path("/dev/null"))


def test_layers_on_a_gpu_are_read_from_the_log_of_the_load(model: Model) -> None:
    log = "load_tensors: offloading output layer to GPU\nload_tensors: offloaded 20/31 layers to GPU\n"
    assert offload_of(model, log) == Offload(20, 31, is_possible=True)
    assert str(offload_of(model, log)) == "20 of 31 layers on a GPU"
    assert offload_of(model, "") == Offload(0, 31, ggml.supports_gpu_offload())


@pytest.mark.parametrize(
    "offload, asked, words",
    [
        (CPU_BUILD, {"n_gpu_layers": "99"}, "this build has no GPU support"),
        (CPU_BUILD, {"n_gpu_layers": "all"}, "make install BACKEND=cuda"),
        (NO_GPU, {"n_gpu_layers": "10"}, "found none"),
        (CPU_BUILD, {"n_gpu_layers": "0"}, ""),
        (CPU_BUILD, {}, ""),
        (Offload(31, 31, is_possible=True), {"n_gpu_layers": "99"}, ""),
    ],
)
def test_a_gpu_asked_for_in_vain_is_one_loud_line(
    offload: Offload, asked: dict[str, str], words: str
) -> None:
    warning = unused_gpu_warning(settings(asked), offload)
    assert bool(warning) == bool(words)
    assert words in warning
    assert "\n" not in warning
    assert not warning or warning.startswith("warning: -ngl has no effect")


def test_the_warning_names_the_variable_that_asked() -> None:
    warning = unused_gpu_warning(settings(environ={"LLAMA_ARG_N_GPU_LAYERS": "99"}), CPU_BUILD)
    assert warning.startswith("warning: -ngl from LLAMA_ARG_N_GPU_LAYERS has no effect")


def test_the_lines_of_a_start_tell_what_the_engine_really_has(model_path: Path) -> None:
    progress: list[float] = []
    started = make_engine(
        settings({"n_ctx": "1000", "n_seq_max": "1", "n_threads": "1"}), model_path, progress.append
    )
    lines = {line.split()[0]: line for line in engine_lines(started)}
    started.engine.start()
    started.engine.stop()
    # llama.cpp rounds up to 256 cells.
    assert lines["context"].endswith("1,024 tokens a request, 1 sequence, 1,024 in all")
    assert lines["threads"].endswith("1: as asked for")
    assert lines["attention"].endswith("KV cache f16/f16")
    assert "of 31 layers on a GPU" in lines["offload"]
    assert progress == sorted(progress) and progress[-1] == 1


def test_threads_are_explained_by_who_chose_them() -> None:
    budget = cpu_budget()
    assert threads_reason(settings({"n_threads": "1"}), EngineConfig("m", n_threads=1)) == "as asked for"
    allowed = threads_reason(settings(), EngineConfig("m", n_threads=budget.n_threads))
    assert f"{allowed}." == budget.reason
    # Fewer than allowed without being asked: only a measurement does that.
    assert "measured" in threads_reason(settings(), EngineConfig("m", n_threads=budget.n_threads - 1))


def test_a_model_is_described_by_its_counted_parameters(model: Model) -> None:
    # llama.cpp's own text says 256M: it goes by the number of layers.
    assert model_text(model).endswith("(135M parameters, Q4_1, 92 MiB)")


def test_a_context_longer_than_the_training_is_pointed_out() -> None:
    config = EngineConfig("m", n_ctx=16384, n_ctx_seq=16384, n_seq_max=1)
    assert "trained for 8,192" in context_text(config, 8192)
    assert "trained" not in context_text(config, 16384)


@pytest.mark.parametrize(
    "config, text",
    [
        (ServerConfig(), "loopback only, no key needed"),
        (ServerConfig(api_keys=("k",)), "loopback only, API key required"),
        (ServerConfig(host="0.0.0.0", api_keys=("k",)), "reachable from other machines, API key required"),
        (ServerConfig(host="::"), "reachable from other machines, no key: anybody there can use it"),
    ],
)
def test_who_may_come_is_said(config: ServerConfig, text: str) -> None:
    assert access_text(config) == text
