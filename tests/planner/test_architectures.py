"""Closed forms against worked examples and the traps that other calculators fall into."""

from __future__ import annotations

from typing import Any

import pytest

from edgeserve.errors import GGUFError
from edgeserve.gguf import GGUFHeader, TensorInfo
from edgeserve.planner.architectures import ARCHITECTURES, Memory
from edgeserve.planner.hparams import read_hparams
from edgeserve.planner.kv_families import context_tensors, window_cells
from edgeserve.planner.memory import ModelMemory, plan_memory
from edgeserve.planner.report import MemoryReport
from edgeserve.planner.settings import Rejection, ResolvedSettings, Settings, resolve, settings_of

GIB, MIB = 1 << 30, 1 << 20


def header(arch: str, tensors: tuple[TensorInfo, ...] = (), **keys: Any) -> GGUFHeader:
    """A header with these keys; a double underscore stands for a dot."""
    metadata = {f"{arch}.{key.replace('__', '.')}": value for key, value in keys.items()}
    return GGUFHeader(metadata | {"general.architecture": arch}, tensors, (), 3, 32)


def dense(
    n_layer: int, n_head: int, n_head_kv: int, head_dim: int, arch: str = "llama", **keys: Any
) -> GGUFHeader:
    return header(
        arch,
        block_count=n_layer,
        embedding_length=n_head * head_dim,
        context_length=131072,
        feed_forward_length=1024,
        attention__head_count=n_head,
        attention__head_count_kv=n_head_kv,
        vocab_size=1000,
        **keys,
    )


def resolved(model: GGUFHeader, settings: Settings) -> ResolvedSettings:
    answer = resolve(read_hparams(model), settings)
    assert isinstance(answer, ResolvedSettings), answer
    return answer


def kv(model: GGUFHeader, n_ctx: int, **settings: Any) -> MemoryReport:
    return plan_memory(model, Settings(n_ctx=n_ctx, **settings))


# --- worked examples


def test_multi_head_model_of_7b_takes_64_gib_at_131072_tokens() -> None:
    model = dense(32, 32, 32, 128)
    assert kv(model, 4096).kv_bytes == 2 * GIB
    assert kv(model, 131072).kv_bytes == 64 * GIB
    assert kv(model, 8 * 131072, n_seq_max=8).kv_bytes == 512 * GIB


def test_grouped_heads_of_70b_take_320_kib_a_token() -> None:
    report = kv(dense(80, 64, 8, 128), 131072)
    assert report.kv_bytes_per_token == 327_680
    assert report.kv_bytes == 40 * GIB


@pytest.mark.parametrize(("cache_type", "bytes_per_token"), [("f16", 23_040), ("q8_0", 12_240)])
def test_smollm2_takes_what_its_cache_type_says(cache_type: str, bytes_per_token: int) -> None:
    report = kv(dense(30, 9, 3, 64), 8192, type_k=cache_type, type_v=cache_type)
    assert report.kv_bytes_per_token == bytes_per_token
    assert report.kv_bytes == 8192 * bytes_per_token


def test_qwen2_7b_counts_its_own_28_layers_and_4_kv_heads() -> None:
    report = kv(dense(28, 28, 4, 128, arch="qwen2"), 2048)
    assert report.kv_bytes_per_token == 57_344
    assert report.kv_bytes == 112 * MIB


# --- one trap a test


def test_heads_given_by_layer_are_counted_by_layer() -> None:
    heads = tuple(8 if il % 3 == 2 else 0 for il in range(16))
    model = dense(16, 32, 8, 64, arch="lfm2", shortconv__l_cache=3)
    model.metadata["lfm2.attention.head_count_kv"] = heads
    short, long = kv(model, 4096), kv(model, 32768)
    assert short.kv_bytes == 5 * 2 * 8 * 64 * 2 * 4096
    assert long.kv_bytes == 8 * short.kv_bytes
    assert short.state_bytes == long.state_bytes == 11 * 4 * 2048 * 2


def test_hybrid_with_every_fourth_layer_attending_has_a_quarter_of_the_cache() -> None:
    model = dense(
        32, 16, 4, 128, arch="qwen35", full_attention_interval=4, ssm__inner_size=4096, ssm__state_size=128,
        ssm__conv_kernel=4, ssm__time_step_rank=32, ssm__group_count=16,
    )  # fmt: skip
    report = kv(model, 4096, n_seq_max=2)
    assert report.kv_bytes == 8 * 2 * 4 * 128 * 2 * 4096
    assert report.state_bytes == 2 * 24 * 4 * (3 * (4096 + 2 * 16 * 128) + 128 * 4096)


def test_explicit_head_size_wins_over_the_quotient() -> None:
    model = dense(28, 16, 8, 64, arch="qwen3", attention__key_length=128, attention__value_length=128)
    assert kv(model, 4096).kv_bytes_per_token == 28 * 2 * 8 * 128 * 2


def test_latent_attention_keeps_one_vector_a_token() -> None:
    keys = {"attention__kv_lora_rank": 512, "attention__key_length": 576, "attention__value_length": 512}
    latent = {"attention__key_length_mla": 192, "attention__value_length_mla": 128}
    model = dense(61, 128, 1, 56, arch="deepseek2", **keys, **latent)
    assert kv(model, 4096).kv_bytes_per_token == 61 * 576 * 2
    old_file = dense(
        61, 128, 128, 56, arch="deepseek2", attention__key_length=192, attention__value_length=128
    )
    assert kv(old_file, 4096).kv_bytes_per_token == 61 * 128 * (192 + 128) * 2


def test_windowed_layers_stop_growing() -> None:
    model = dense(48, 16, 8, 256, arch="gemma3", attention__sliding_window=1024)
    hparams = read_hparams(model)
    assert sum(hparams.is_swa) == 40
    settings = resolved(model, Settings(n_ctx=131072, swa_full=False))
    assert window_cells(hparams, settings, unified=False) == 1536
    row = 2 * 8 * 256 * 2
    assert kv(model, 131072, swa_full=False).kv_bytes == row * (8 * 131072 + 40 * 1536)
    assert kv(model, 131072, swa_full=True).kv_bytes == row * 48 * 131072


def test_window_grows_with_sequences_only_when_cells_are_unified() -> None:
    model = dense(2, 2, 2, 64, arch="cohere2", attention__sliding_window=1000)
    settings = resolved(model, Settings(n_ctx=65536, n_seq_max=4, swa_full=False))
    assert window_cells(read_hparams(model), settings, unified=False) == 1536
    assert window_cells(read_hparams(model), settings, unified=True) == 4608


def test_transposed_values_are_padded_to_the_widest_layer() -> None:
    model = dense(4, 16, 8, 64, arch="openelm")
    model.metadata["openelm.attention.head_count_kv"] = (2, 4, 6, 8)
    assert kv(model, 256).kv_bytes == 2 * (2 + 4 + 6 + 8) * 64 * 2 * 256
    assert kv(model, 256, flash_attn="off").kv_bytes == (20 + 4 * 8) * 64 * 2 * 256


def test_attention_free_model_has_a_state_and_no_cache() -> None:
    model = header(
        "rwkv7",
        block_count=24,
        embedding_length=2048,
        context_length=4096,
        wkv__head_size=64,
        vocab_size=65536,
    )
    report = plan_memory(model, Settings(n_ctx=4096, n_seq_max=4))
    assert report.kv_bytes == 0
    assert report.state_bytes == 4 * 24 * 4 * (2 * 2048 + 2048 * 64)
    assert report.compute_bytes > 0


def test_draft_blocks_are_not_cached() -> None:
    with_draft = dense(25, 8, 8, 64, arch="glm4moe", nextn_predict_layers=1)
    assert kv(with_draft, 4096).kv_bytes == kv(dense(24, 8, 8, 64, arch="glm4moe"), 4096).kv_bytes


def test_glm_5_2_without_its_own_list_has_indexers_on_every_fourth_layer() -> None:
    keys = {
        "attention__indexer__key_length": 128,
        "attention__kv_lora_rank": 512,
        "attention__key_length": 576,
    }
    mla = {"attention__key_length_mla": 192, "attention__value_length_mla": 128}
    model = dense(78, 64, 1, 96, arch="glm-dsa", **keys, **mla)
    assert sum(read_hparams(model).is_indexer_full) == 78
    model.metadata["glm-dsa.context_length"] = 1 << 20
    assert sum(read_hparams(model).is_indexer_full) == 21
    tensors = context_tensors(read_hparams(model), resolved(model, Settings(n_ctx=4096)))
    assert sum(tensor.row_elements == 128 for tensor in tensors) == 21


# --- settings as llama.cpp resolves them


@pytest.mark.parametrize(
    ("n_ctx", "n_seq_max", "unified", "cells", "per_sequence"),
    [
        (4096, 1, False, 4096, 4096),
        (4100, 3, False, 4608, 1536),
        (1024, 3, False, 1536, 512),
        (4100, 3, True, 4352, 4352),
        (100, 1, False, 256, 256),
    ],
)
def test_cells_are_rounded_up(
    n_ctx: int, n_seq_max: int, unified: bool, cells: int, per_sequence: int
) -> None:
    model = dense(2, 2, 2, 64)
    settings = resolved(model, Settings(n_ctx=n_ctx, n_seq_max=n_seq_max, kv_unified=unified))
    assert (settings.n_ctx, settings.n_ctx_seq) == (cells, per_sequence)
    assert settings.n_stream == (1 if unified else n_seq_max)


def test_batches_are_bounded_by_the_context_before_it_is_rounded() -> None:
    settings = resolved(dense(2, 2, 2, 64), Settings(n_ctx=100, n_batch=2048, n_ubatch=512))
    assert (settings.n_batch, settings.n_ubatch) == (100, 100)
    encoder = resolved(dense(2, 2, 2, 64, arch="llada"), Settings(n_ctx=100, n_batch=2048, n_ubatch=512))
    assert (encoder.n_batch, encoder.n_ubatch) == (2048, 512)


def test_one_row_of_logits_a_sequence_unless_told_otherwise() -> None:
    model = dense(2, 2, 2, 64)
    assert resolved(model, Settings(n_ctx=4096, n_seq_max=3)).n_outputs_max == 3
    assert resolved(model, Settings(n_ctx=4096, n_seq_max=3, n_outputs_max=0)).n_outputs_max == 2048
    assert resolved(model, Settings(n_ctx=4096, n_seq_max=3, n_outputs_max=17)).n_outputs_max == 17


@pytest.mark.parametrize(
    ("model", "settings", "code"),
    [
        (dense(2, 2, 2, 64), Settings(n_ctx=512, type_v="q8_0", flash_attn="off"),
         "quantized_v_without_flash_attn"),
        (dense(2, 2, 2, 80), Settings(n_ctx=512, type_k="q8_0"), "k_block"),
        (dense(2, 2, 2, 80), Settings(n_ctx=512, type_v="q4_0"), "v_block"),
        (dense(2, 2, 1, 80), Settings(n_ctx=512, type_k="q8_0", flash_attn="off"), "row_block"),
        (dense(2, 2, 2, 64), Settings(n_ctx=512, n_batch=0, n_ubatch=0), "no_batch"),
        (dense(2, 2, 2, 64), Settings(n_ctx=512, n_seq_max=257), "n_seq_max"),
        (dense(2, 2, 1, 64, arch="deepseek4", hyper_connection__count=4, attention__sliding_window=128),
         Settings(n_ctx=512, type_k="q8_0"), "kv_types_differ"),
    ],
)  # fmt: skip
def test_refused_settings_say_why(model: GGUFHeader, settings: Settings, code: str) -> None:
    report = plan_memory(model, settings)
    assert report.rejection_code == code
    assert report.rejected is not None and report.rejected.endswith(".")
    assert report.devices == ()


def test_quantized_values_switch_flash_attention_on_and_grok_switches_it_off() -> None:
    assert resolved(dense(2, 2, 2, 64), Settings(n_ctx=512, type_v="q8_0")).flash_attn == "on"
    assert resolved(dense(2, 2, 2, 64, arch="grok"), Settings(n_ctx=512, flash_attn="on")).flash_attn == "off"


def test_context_of_zero_is_the_trained_one() -> None:
    model = dense(2, 2, 2, 64)
    assert resolved(model, Settings(n_ctx=0)).n_ctx == 131072
    model.metadata["llama.context_length"] = 0
    assert isinstance(resolve(read_hparams(model), Settings(n_ctx=0)), Rejection)


def test_engine_configuration_becomes_the_same_settings() -> None:
    from edgeserve.config import EngineConfig

    config = EngineConfig("m.gguf", n_ctx=3072, n_seq_max=3, type_k="q8_0", type_v="q8_0", kv_unified=True)
    settings = settings_of(config)
    assert (settings.n_ctx, settings.n_seq_max, settings.type_k, settings.kv_unified) == (
        3072,
        3,
        "q8_0",
        True,
    )
    assert settings.n_outputs_max is None


# --- headers that lack something


@pytest.mark.parametrize("key", ["block_count", "embedding_length", "context_length"])
def test_missing_key_is_named(key: str) -> None:
    model = dense(2, 2, 2, 64)
    del model.metadata[f"llama.{key}"]
    with pytest.raises(GGUFError, match=rf"Cannot size this model: the key llama\.{key} is missing"):
        plan_memory(model, Settings(n_ctx=512))


def test_missing_state_key_is_named() -> None:
    model = header("mamba", block_count=2, embedding_length=64, context_length=512, ssm__inner_size=128)
    with pytest.raises(GGUFError, match=r"mamba\.ssm\.state_size"):
        ModelMemory(model)


def test_absurd_layer_count_is_refused() -> None:
    with pytest.raises(GGUFError, match="says 0 layers"):
        plan_memory(dense(0, 2, 2, 64), Settings(n_ctx=512))


def test_unknown_architecture_is_an_upper_bound_and_says_so() -> None:
    report = plan_memory(dense(4, 8, 8, 64, arch="novel"), Settings(n_ctx=4096))
    assert report.context_source == "upper bound"
    assert report.context_low_bytes == 0 < report.context_bytes == 4 * 2 * 8 * 64 * 2 * 4096
    assert "unknown" in report.notes[0]


def test_unknown_architecture_without_attention_keys_is_not_sized_at_nan() -> None:
    model = header("novel", block_count=2, embedding_length=64, context_length=512, vocab_size=100)
    report = plan_memory(model, Settings(n_ctx=512))
    assert report.kv_bytes == 0
    assert any("no attention keys" in note for note in report.notes)


# --- the table


def test_table_has_every_architecture_of_its_release_that_stands_alone() -> None:
    assert len(ARCHITECTURES) == 150
    assert not {"clip", "dflash", "gemma4-assistant"} & ARCHITECTURES.keys()
    assert {line.memory for line in ARCHITECTURES.values()} == set(Memory)
