"""The dry-run child: its protocol, what happens when it fails, and the pretended device it uses."""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zoo

from edgeserve import llama, virtual_device
from edgeserve.dry_run import Library
from edgeserve.errors import RuntimeUnavailableError
from edgeserve.gguf import GGUFHeader, read_header
from edgeserve.layout_check import check_layouts
from edgeserve.planner.measure import DryRunFailure, dry_run, measure
from edgeserve.planner.memory import plan_memory
from edgeserve.planner.placement import Accelerator
from edgeserve.planner.report import MemoryReport
from edgeserve.planner.settings import Settings
from edgeserve.virtual_device import VirtualDevice, VirtualDeviceSpec, device_array

GIB, MIB = 1 << 30, 1 << 20
SMALL = Settings(n_ctx=512, swa_full=False)


def ask(request: dict[str, Any]) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "edgeserve.dry_run"],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def qwen2(tmp_path: Path) -> GGUFHeader:
    return read_header(zoo.write_model("qwen2", tmp_path / "qwen2.gguf"))


# --- protocol


def test_one_line_for_each_settings_in_order(qwen2: GGUFHeader) -> None:
    settings = [{"n_ctx": n_ctx, "n_gpu_layers": 0} for n_ctx in (256, 512, 1024)]
    answers = ask({"path": qwen2.source, "settings": settings, "devices": []})
    assert [answer["n_ctx"] for answer in answers] == [256, 512, 1024]
    assert all(answer["exact"] and answer["flash_attn"] for answer in answers)
    sizes = [sum(buffer["context"] for buffer in answer["buffers"]) for answer in answers]
    assert sizes[1] == 2 * sizes[0] and sizes[2] == 4 * sizes[0]


def test_bare_header_is_enough(qwen2: GGUFHeader, tmp_path: Path) -> None:
    bare = tmp_path / "bare.gguf"
    bare.write_bytes(Path(qwen2.source).read_bytes()[: qwen2.data_offset])
    settings = [{"n_ctx": 512}]
    whole = ask({"path": qwen2.source, "settings": settings, "devices": []})
    assert ask({"path": str(bare), "settings": settings, "devices": []}) == whole
    assert whole[0]["buffers"][0]["model"] > 0


def test_no_device_list_means_the_devices_that_are_there(qwen2: GGUFHeader) -> None:
    (answer,) = ask({"path": qwen2.source, "settings": [{"n_ctx": 512}], "devices": None})
    assert sum(buffer["model"] for buffer in answer["buffers"]) > 0


def test_refusal_is_an_answer(qwen2: GGUFHeader) -> None:
    bad = {"n_ctx": 512, "type_v": "q8_0", "flash_attn": "off"}
    refused, fine = ask({"path": qwen2.source, "settings": [bad, {"n_ctx": 512}], "devices": []})
    assert refused["stage"] == "context" and "quantized V cache requires flash_attn" in refused["error"]
    assert fine["n_ctx"] == 512


def test_unreadable_file_is_an_answer(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"not a model at all")
    (answer,) = ask({"path": str(broken), "settings": [{"n_ctx": 512}], "devices": []})
    assert answer["stage"] == "load"


def test_dry_run_equals_a_real_load_on_a_device(qwen2: GGUFHeader) -> None:
    devices = [Accelerator("GPU0", 2 * GIB, 2 * GIB)]
    settings = [Settings(n_ctx=512, n_gpu_layers=2), Settings(n_ctx=512, n_gpu_layers=2, flash_attn="off")]
    assert [r.devices for r in measure(qwen2, settings, devices) if isinstance(r, MemoryReport)] == [
        r.devices for r in measure(qwen2, settings, devices, allocate=True) if isinstance(r, MemoryReport)
    ]


def test_output_buffer_is_what_llama_cpp_allocates(tmp_path: Path) -> None:
    header = zoo.truth_header("real-size-mixtral-8x7b", tmp_path)
    settings = {"n_ctx": 512, "n_seq_max": 16}
    (answer,) = ask({"path": str(header.shards[0].header_path), "settings": [settings], "devices": []})
    planned = plan_memory(header, Settings(n_ctx=512, n_seq_max=16)).output_bytes
    assert answer["output_mib"] == pytest.approx(planned / MIB, abs=0.005)


# --- failures


def with_metadata(header: GGUFHeader, key: str, value: int, directory: Path) -> GGUFHeader:
    """The same file with one 32-bit number changed in its header."""
    path = directory / "changed.gguf"
    data = bytearray(Path(header.source).read_bytes())
    at = data.index(key.encode()) + len(key) + 4
    data[at : at + 4] = value.to_bytes(4, "little")
    path.write_bytes(data)
    return read_header(path)


def test_crash_costs_one_answer(tmp_path: Path) -> None:
    header = read_header(zoo.write_model("qwen2moe-moe", tmp_path / "moe.gguf"))
    absurd = with_metadata(header, "qwen2moe.expert_count", 1_000_000, tmp_path)
    results = dry_run(absurd, [SMALL, SMALL])
    assert [result.kind for result in results if isinstance(result, DryRunFailure)] == ["crashed", "crashed"]
    assert "signal" in str(results[0])


def test_slow_child_is_ended(qwen2: GGUFHeader) -> None:
    (result,) = dry_run(qwen2, [SMALL], timeout_s=0.01)
    assert isinstance(result, DryRunFailure) and result.kind == "timed out"


def test_missing_interpreter_or_runtime_is_told_apart(qwen2: GGUFHeader, tmp_path: Path) -> None:
    (result,) = dry_run(qwen2, [SMALL], python=str(tmp_path / "no-python"))
    assert isinstance(result, DryRunFailure) and result.kind == "no runtime"
    bare_python = shutil.which("python3", path="/usr/bin:/usr/local/bin") or sys.executable
    isolated = tmp_path / "isolated"
    isolated.write_text(f'#!/bin/sh\nexec {bare_python} -I -S "$@"\n')
    isolated.chmod(0o755)
    (result,) = dry_run(qwen2, [SMALL], python=str(isolated))
    assert isinstance(result, DryRunFailure) and result.kind == "no runtime"


def test_large_recurrent_states_are_not_tried(tmp_path: Path) -> None:
    header = zoo.truth_header("real-size-falcon-mamba-7b", tmp_path)
    many = Settings(n_ctx=512, n_seq_max=256)
    (result,) = dry_run(header, [many], memory_limit_bytes=1 * GIB)
    assert isinstance(result, DryRunFailure) and result.kind == "too large"
    assert plan_memory(header, many).state_bytes > GIB // 2


def test_child_stays_below_its_memory_limit(tmp_path: Path) -> None:
    header = read_header(zoo.write_model("qwen2", tmp_path / "m.gguf"))
    (result,) = dry_run(header, [Settings(n_ctx=1 << 22)], memory_limit_bytes=300 * MIB, allocate=True)
    # Only Linux enforces the limit that is used here.
    assert isinstance(result, DryRunFailure) or not sys.platform.startswith("linux")


def test_unknown_architecture_is_the_librarys_word(qwen2: GGUFHeader, tmp_path: Path) -> None:
    renamed = tmp_path / "novel.gguf"
    renamed.write_bytes(Path(qwen2.source).read_bytes().replace(b"qwen2", b"qwenX"))
    (result,) = measure(read_header(renamed), [SMALL])
    assert isinstance(result, DryRunFailure)
    assert result.kind == "not loaded" and "qwenX" in result.message


# --- without the C++ map


def test_log_alone_gives_compute_to_5_kb(qwen2: GGUFHeader, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"n_ctx": 2048, "n_seq_max": 2}
    library = Library([])
    model = library.load(qwen2.source, settings)
    exact = library.measure(model, settings)
    monkeypatch.setattr("edgeserve.dry_run.sys.platform", "darwin")
    from_log = library.measure(model, settings)
    library.free_model(model)
    assert exact["exact"] and not from_log["exact"]
    said = sum(buffer["compute"] for buffer in exact["buffers"])
    assert abs(sum(buffer["compute"] for buffer in from_log["buffers"]) - said) <= 5300


# --- the library's structs are where they are taken to be


def test_the_structs_of_this_release_are_where_they_are_read() -> None:
    check_layouts(VirtualDevice(VirtualDeviceSpec("GPU0", 2 * GIB, 3 * GIB)))


@pytest.mark.parametrize(
    ("offset", "moved", "said"),
    [
        ("_TENSOR_TYPE", 4, "tensor type"),
        ("_TENSOR_NE", 24, "tensor shape"),
        ("_TENSOR_OP", 84, "tensor operation"),
        ("_TENSOR_SRC", 160, "tensor sources"),
        ("_TENSOR_VIEW_SRC", 224, "tensor view"),
        ("_BUFFER_TYPE_AT", 96, "buffer type"),
        ("_BUFFER_CONTEXT", 88, "buffer context"),
        ("_BUFFER_SIZE", 96, "buffer size"),
    ],
)
def test_a_field_that_is_elsewhere_is_named(
    monkeypatch: pytest.MonkeyPatch, offset: str, moved: int, said: str
) -> None:
    monkeypatch.setattr(virtual_device, offset, moved)
    with pytest.raises(RuntimeUnavailableError, match=said):
        check_layouts(VirtualDevice(VirtualDeviceSpec("GPU0", 2 * GIB, 3 * GIB)))


# --- the pretended device computes


def test_half_of_the_layers_on_a_pretended_device_give_the_same_text(model_path: Path) -> None:
    prompt = "The capital of France is"
    device = VirtualDevice(VirtualDeviceSpec("GPU0", 2 * GIB, 2 * GIB))
    split = generate(model_path, prompt, n_gpu_layers=16, devices=[device])
    assert split == generate(model_path, prompt, n_gpu_layers=0, devices=[])
    assert "Paris" in split


def generate(path: Path, prompt: str, n_gpu_layers: int, devices: Sequence[VirtualDevice]) -> str:
    """A few words by greedy choice, with the library's own calls."""
    library, log = llama.load_library(), llama.Log()
    library.llama_backend_init()
    params = library.llama_model_default_params()
    array = device_array(devices)
    params.devices, params.n_gpu_layers = ctypes.cast(array, ctypes.c_void_p), n_gpu_layers
    params.use_extra_bufts, params.load_mode = False, 0
    model = library.llama_model_load_from_file(str(path).encode(), params)
    context_params = library.llama_context_default_params()
    context_params.n_ctx, context_params.n_threads, context_params.n_threads_batch = 256, 1, 1
    context = library.llama_init_from_model(model, context_params)
    assert context, log.errors()
    vocab = library.llama_model_get_vocab(model)
    n_vocab = library.llama_vocab_n_tokens(vocab)
    tokens = (ctypes.c_int32 * 64)()
    count = library.llama_tokenize(vocab, prompt.encode(), len(prompt), tokens, 64, True, False)
    text, pending = b"", list(tokens[:count])
    for _ in range(6):
        ids = (ctypes.c_int32 * len(pending))(*pending)  # the batch only points to them
        batch = library.llama_batch_get_one(ids, len(pending))
        assert library.llama_decode(context, batch) == 0
        logits = np.ctypeslib.as_array(library.llama_get_logits_ith(context, -1), shape=(n_vocab,))
        pending = [int(logits.argmax())]
        piece = ctypes.create_string_buffer(64)
        length = library.llama_token_to_piece(vocab, pending[0], piece, 64, 0, True)
        text += piece.raw[:length]
    library.llama_free(context)
    library.llama_model_free(model)
    return text.decode()
