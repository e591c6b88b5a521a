"""Work of one token, counted from headers of real models and from published cache sizes."""

from __future__ import annotations

from pathlib import Path

import pytest
from zoo import HEADERS, truth_header

from edgeserve.errors import UsageError
from edgeserve.planner.model_work import model_work


def test_dense_model(tmp_path: Path) -> None:
    """Llama 3.1 8B: 8.03 billion parameters, 0.525 of them in each of two tables; 32 x 8 heads of 128."""
    header = truth_header("real-size-llama3.1-8b", tmp_path)
    work = model_work(header)
    assert work.n_layer == 32
    assert work.active_params == pytest.approx(8.03e9 - 2 * 0.525e9, rel=0.001)
    assert work.output_params == 128_256 * 4096
    assert work.kv_bytes_per_token == 2 * 32 * 8 * 128 * 2
    assert work.pair_flops == 4 * 32 * 32 * 128
    assert work.quant_class == "k"
    assert not work.has_experts
    table = next(tensor for tensor in header.tensors if tensor.name == "token_embd.weight")
    assert work.weight_bytes == header.tensor_bytes - table.n_bytes


def test_cache_types_change_the_cache_alone(tmp_path: Path) -> None:
    header = truth_header("real-size-llama3.1-8b", tmp_path)
    half, full = model_work(header, "q8_0", "q8_0"), model_work(header)
    assert half.kv_bytes_per_token == full.kv_bytes_per_token * 34 / 64
    assert half.weight_bytes == full.weight_bytes


def test_experts_are_read_by_their_share(tmp_path: Path) -> None:
    """Mixtral: 2 of 8 experts, 12.9 of 46.7 billion parameters (two tables of 0.131 left out here)."""
    work = model_work(truth_header("real-size-mixtral-8x7b", tmp_path))
    assert work.has_experts
    assert work.active_params + 2 * 0.131e9 == pytest.approx(12.9e9, rel=0.005)
    assert work.active_weight_bytes / work.weight_bytes == pytest.approx(12.9 / 46.7, rel=0.02)


def test_tied_embeddings_are_read_as_the_output(tmp_path: Path) -> None:
    header = truth_header("real-size-gemma2-9b", tmp_path)
    work = model_work(header)
    assert work.weight_bytes == header.tensor_bytes
    assert work.output_params == 256_000 * 3584


def test_windows_are_kept_apart(tmp_path: Path) -> None:
    """gpt-oss-20b: 12 of 24 layers see 128 tokens; 8 KV heads of 64."""
    work = model_work(truth_header("real-size-gpt-oss-20b", tmp_path))
    assert work.kv_bytes_per_token == work.window_kv_bytes_per_token == 12 * 2 * 8 * 64 * 2
    assert work.pair_flops == work.window_pair_flops == 12 * 4 * 64 * 64
    assert work.n_swa == 128
    assert work.context_bytes(10_000) == 24_576 * 10_128


def test_recurrent_models_have_a_state_and_no_cache(tmp_path: Path) -> None:
    work = model_work(truth_header("real-size-falcon-mamba-7b", tmp_path))
    assert work.kv_bytes_per_token == work.pair_flops == 0
    assert work.state_bytes > 0
    hybrid = model_work(truth_header("real-size-nemotron-h-8b", tmp_path))
    assert hybrid.kv_bytes_per_token > 0
    assert hybrid.state_bytes > 0


def test_refused_cache_types_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        model_work(truth_header("tiny-glm-dsa-moe", tmp_path), "f16", "q8_0")


def test_every_known_architecture_has_work(tmp_path: Path) -> None:
    for path in sorted(HEADERS.glob("*.gz")):
        work = model_work(truth_header(path.name.removesuffix(".gguf-header.gz"), tmp_path))
        assert 0 < work.active_weight_bytes <= work.weight_bytes, path.name
        assert work.active_params > 0, path.name
