"""Measuring settings on this machine: the choice over made-up times, the real steps, and what is kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgeserve.config import EngineConfig
from edgeserve.engine.resolve import resolve
from edgeserve.engine.tuning import (
    StepSample,
    Tuning,
    Tunings,
    read_tunings,
    tuning_path,
    write_tunings,
)
from edgeserve.llama import Model
from edgeserve.tune import Deadline, candidates, tune
from edgeserve.tune_choice import (
    NUM_STREAMS,
    Candidate,
    Turns,
    choose,
    choose_layout,
    is_clearly_faster,
)
from edgeserve.tune_probe import DEPTH, SEED_TOKENS, STREAM_TOKENS, Probe, Streams

OFF, ON = Candidate("off", 4), Candidate("on", 4)


def turns(
    deep_ms: float, small_tok_s: float, count: int = 5, streams_ms: float = 20, large_tok_s: float = 250
) -> Turns:
    """As many turns, all alike but for a little noise that they share."""
    noise = [1, 1.1, 0.95, 1.3, 1.02, 0.9, 1.05][:count]
    return Turns(
        [0.01 * f for f in noise],
        [deep_ms / 1e3 * f for f in noise],
        {32: [32 / small_tok_s * f for f in noise], 128: [128 / large_tok_s * f for f in noise]},
        [streams_ms / 1e3 * f for f in noise],
    )


# --- the choice --------------------------------------------------------------------------------------------


def test_a_request_is_its_prompt_in_small_steps_and_its_answer_at_depth() -> None:
    one = turns(10, 200, count=1, streams_ms=25, large_tok_s=250)
    assert one.alone_s == pytest.approx([4 + 2])
    assert one.beside_s == pytest.approx([5 + 1 + 2.5])
    del one.chunk_s[128]
    assert one.alone_s == pytest.approx([5 + 2]), "small chunks where large ones took too long"


@pytest.mark.parametrize(
    ("challenger", "default", "wins"),
    [
        ([9, 9, 9], [10, 10, 10], True),
        ([9.8, 9.8, 9.8], [10, 10, 10], False),  # within the margin
        ([9, 9], [10, 10], False),  # too few turns
        ([8, 8, 11, 8, 11], [10, 10, 10, 10, 10], False),  # not in nearly all turns
        ([18, 9, 27], [20, 10, 30], True),  # a machine that is slow for both in a turn
        ([], [], False),
    ],
)
def test_only_what_is_clearly_faster_wins(challenger: list[float], default: list[float], wins: bool) -> None:
    assert is_clearly_faster(challenger, default) is wins


def test_flash_attention_is_chosen_by_the_whole_request() -> None:
    slow_prompts = {OFF: turns(12, 250), ON: turns(10, 150)}
    assert choose(OFF, slow_prompts)[0].beside.flash_attn == "off"
    fast = {OFF: turns(12, 250), ON: turns(6, 250)}
    tunings, reasons = choose(OFF, fast)
    assert tunings.alone.flash_attn == "on"
    assert "5.3 s" in reasons[0] and "6.5 s" in reasons[0]


def test_who_serves_several_may_want_other_attention_than_who_runs_one() -> None:
    """As on two Zen 4 cores: rows of other sequences are cheaper with it, one row is cheaper without."""
    measured = {OFF: turns(10, 240, streams_ms=31), ON: turns(11, 240, streams_ms=24)}
    tunings, reasons = choose(OFF, measured)
    assert (tunings.of(1).flash_attn, tunings.of(2).flash_attn, tunings.of(8).flash_attn) == (
        "off",
        "on",
        "on",
    )
    assert reasons[0].startswith("One sequence: flash attention off")
    assert reasons[1].startswith("Several sequences: flash attention on")
    assert StepSample(NUM_STREAMS, 0, pytest.approx(0.02448)) in tunings.beside.steps


def test_a_small_difference_leaves_the_default_and_says_so() -> None:
    tunings, reasons = choose(OFF, {OFF: turns(10, 250), ON: turns(9.9, 250)})
    assert tunings.alone.flash_attn == "off"
    assert "too small" in reasons[0]


def test_decoding_and_prompts_may_want_other_thread_counts() -> None:
    table = {OFF: turns(30, 250), Candidate("off", 2): turns(10, 240), ON: turns(90, 250)}
    tunings, reasons = choose(OFF, table)
    tuning = tunings.alone
    assert (tuning.n_threads, tuning.n_threads_batch) == (2, 4)
    assert "2: 10.2 ms" in reasons[2]
    assert [step.num_prefill for step in tuning.steps] == [0, 0, 32, 128]


def test_what_was_not_measured_leaves_the_default() -> None:
    tunings, reasons = choose(OFF, {OFF: turns(10, 250), ON: Turns()})
    tuning = tunings.beside
    assert (tuning.flash_attn, tuning.n_threads, tuning.n_threads_batch) == ("off", 4, 4)
    assert "not measured" in reasons[0]
    assert choose(OFF, {OFF: Turns(), ON: Turns()})[0].alone.steps == ()


def test_cells_are_split_unless_unified_ones_are_clearly_faster() -> None:
    assert choose_layout({"split": [10.0] * 7, "unified": [9.9] * 7})[0] is False
    assert choose_layout({"split": [10.0] * 7, "unified": [8.0] * 7})[0] is True


def test_a_quantized_v_cache_is_measured_with_flash_attention_only() -> None:
    base = EngineConfig("m", type_k="q8_0", type_v="q8_0")
    assert {item.flash_attn for item in candidates(Candidate("on", 4), base)} == {"on"}


def test_half_the_threads_are_tried_where_there_are_many() -> None:
    base = EngineConfig("m")
    assert {item.n_threads for item in candidates(OFF, base)} == {4, 2}
    assert {item.n_threads for item in candidates(Candidate("off", 2), base, is_short=True)} == {2}
    assert {item.n_threads for item in candidates(Candidate("off", 1), base)} == {1}


# --- real steps --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flash_attn", ["off", "on"])
def test_steps_are_timed_at_a_depth_that_nobody_computed(model: Model, flash_attn: str) -> None:
    probe = Probe(model, resolve(EngineConfig(model.path, n_threads=1), model), flash_attn, n_ubatch=128)
    assert probe.step(1, 1) > 0
    probe.deepen()
    assert probe.depth == DEPTH == probe.context.seq_pos_max(0) + 1
    assert probe.step(1, 1) > 0
    assert probe.context.seq_pos_max(0) + 1 == DEPTH
    probe.close()


def test_a_repeated_prefix_is_the_text_repeated(model: Model) -> None:
    """What copying puts there answers as what computing puts there does."""
    base = resolve(EngineConfig(model.path, n_threads=1), model)
    probe = Probe(model, base, "off", n_ubatch=128)
    probe._extend(SEED_TOKENS)
    assert probe.context.repeat_prefix(SEED_TOKENS, 1)
    assert probe.context.seq_pos_max(0) + 1 == SEED_TOKENS
    assert probe.context.repeat_prefix(SEED_TOKENS, 3)
    assert probe.context.seq_pos_max(0) + 1 == 3 * SEED_TOKENS
    probe.close()


@pytest.mark.parametrize("unified", [False, True])
def test_streams_are_timed_together_and_left_as_they_were(model: Model, unified: bool) -> None:
    base = resolve(EngineConfig(model.path, n_threads=1), model)
    streams = Streams(model, base, 3, unified=unified)
    assert streams.step(1) > 0
    assert [streams.context.seq_pos_max(seq_id) + 1 for seq_id in range(3)] == [STREAM_TOKENS] * 3
    streams.close()


def test_a_short_measurement_has_every_time_and_says_why(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgeserve.tune._SHORT_ROUNDS", 1)
    parts: list[str] = []
    result = tune(model, EngineConfig(model.path, n_threads=1), parts.append, is_short=True)
    assert [(row["flash_attn"], row["n_threads"]) for row in result.table] == [("off", 1), ("on", 1)]
    for row in result.table:
        assert all(row[name] > 0 for name in ("decode_ms", "decode_deep_ms", "streams_ms", "request_s"))
        assert set(row["prefill_tok_s"]) == {32, 128}
    tuning = result.tunings.beside
    assert (tuning.n_threads, tuning.n_threads_batch) == (1, 1)
    assert {step.num_prefill for step in tuning.steps} == {0, 32, 128}
    assert {step.num_decodes for step in tuning.steps} == {0, 1, NUM_STREAMS}
    assert parts and result.reasons


def test_a_slow_model_is_measured_in_small_chunks_only(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgeserve.tune._SHORT_ROUNDS", 1)
    slow = Deadline()
    monkeypatch.setattr(slow, "has_time_for", lambda duration_s: duration_s < 160 * 1e-3)
    monkeypatch.setattr(Probe, "step", lambda probe, num_tokens, n_threads: num_tokens * 1e-3)
    result = tune(model, EngineConfig(model.path, n_threads=1), deadline=slow, is_short=True)
    assert [set(row["prefill_tok_s"]) for row in result.table] == [{32}, {32}]


def test_a_measurement_ends_when_it_is_told_to(model: Model) -> None:
    calls = iter(range(1000))
    result = tune(
        model,
        EngineConfig(model.path, n_threads=1),
        deadline=Deadline(is_stopped=lambda: next(calls) > 3),
        is_short=True,
    )
    assert result.tunings.alone.flash_attn == result.tunings.beside.flash_attn == "off"
    none = tune(model, EngineConfig(model.path, n_threads=1), deadline=Deadline(0.0))
    assert none.tunings.alone.steps == ()


# --- what is kept ------------------------------------------------------------------------------------------


@pytest.fixture
def model_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGESERVE_TUNING_DIR", str(tmp_path / "tuning"))
    path = tmp_path / "m.gguf"
    path.write_bytes(b"some model")
    return path


def test_what_is_kept_comes_back(model_file: Path) -> None:
    tuning = Tuning("on", 3, 4, True, (StepSample(1, 0, 0.01), StepSample(0, 32, 0.2)))
    kept = Tunings(Tuning("off", 4, 4), tuning)
    path = tuning_path(model_file, EngineConfig(str(model_file)))
    assert read_tunings(path) is None
    write_tunings(path, kept, [{"flash_attn": "on"}], ["because"])
    assert read_tunings(path) == kept


def test_a_moved_file_keeps_its_tuning_and_another_one_has_its_own(model_file: Path) -> None:
    config = EngineConfig(str(model_file))
    before = tuning_path(model_file, config)
    moved = model_file.rename(model_file.with_name("renamed.gguf"))
    assert tuning_path(moved, config) == before
    moved.write_bytes(b"some_model")
    assert tuning_path(moved, config) != before


@pytest.mark.parametrize("changes", [{"type_k": "q8_0"}, {"n_gpu_layers": 0}, {"use_extra_bufts": False}])
def test_settings_that_change_the_cost_of_a_step_have_their_own(
    model_file: Path, changes: dict[str, object]
) -> None:
    plain = tuning_path(model_file, EngineConfig(str(model_file)))
    assert tuning_path(model_file, EngineConfig(str(model_file), **changes)) != plain
    assert tuning_path(model_file, EngineConfig(str(model_file), n_ctx=512)) == plain


def test_another_processor_has_its_own(model_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(str(model_file))
    before = tuning_path(model_file, config)
    monkeypatch.setattr("edgeserve.engine.tuning.processor_name", lambda: "another")
    assert tuning_path(model_file, config) != before


@pytest.mark.parametrize("text", ["", "{}", '{"alone": {}, "beside": {}}', "[1]"])
def test_a_damaged_file_counts_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    assert read_tunings(tmp_path / "x.json") is None
    assert read_tunings(tmp_path / "missing.json") is None


@pytest.mark.parametrize("wrong", [{"flash_attn": "maybe"}, {"n_threads": 0}, {"steps": [{"x": 1}]}])
def test_a_setting_that_cannot_be_counts_as_none(tmp_path: Path, wrong: dict[str, object]) -> None:
    path = tmp_path / "x.json"
    write_tunings(path, Tunings(Tuning("on", 1, 1), Tuning("on", 1, 1)), [], [])
    assert read_tunings(path)
    kept = json.loads(path.read_text())
    path.write_text(json.dumps(kept | {"beside": kept["beside"] | wrong}))
    assert read_tunings(path) is None
