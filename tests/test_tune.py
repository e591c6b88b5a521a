"""Measuring settings on this machine, on a tiny model; what is kept, and what later starts make of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgeserve.config import EngineConfig
from edgeserve.engine.resolve import resolve
from edgeserve.engine.tuning import Tuning, read_tuning, tuning_path, write_tuning
from edgeserve.ggml import cpu_name
from edgeserve.llama import Model
from edgeserve.tune import Measurement, tune


@pytest.fixture(autouse=True)
def tuning_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGESERVE_TUNING_DIR", str(tmp_path))
    return tmp_path


def measurement(flash_attn: str, n_threads: int, deep_ms: float, small_tok_s: float) -> Measurement:
    return Measurement(flash_attn, n_threads, 10.0, deep_ms, small_tok_s, 300.0)


def test_a_request_is_its_prompt_in_small_steps_and_its_answer_at_depth() -> None:
    assert measurement("off", 2, deep_ms=10.0, small_tok_s=250.0).request_s == pytest.approx(4 + 2)


def test_the_fastest_request_decides(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = {("off", 4): (12, 250), ("off", 2): (11, 200), ("on", 4): (30, 300), ("on", 2): (31, 310)}
    monkeypatch.setattr("edgeserve.tune.measure", lambda m, c, fa, n: measurement(fa, n, *speeds[fa, n]))
    asked: list[str] = []
    result = tune(model, EngineConfig(model.path, n_threads=4), asked.append)
    assert result.tuning == Tuning("off", 4, 4)
    assert len(result.measurements) == len(asked) == 4
    assert "against" in result.reason


def test_decoding_and_prompts_may_want_other_thread_counts(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    speeds = {("off", 4): (30, 250), ("off", 2): (10, 240), ("on", 4): (90, 250), ("on", 2): (90, 250)}
    monkeypatch.setattr("edgeserve.tune.measure", lambda m, c, fa, n: measurement(fa, n, *speeds[fa, n]))
    assert tune(model, EngineConfig(model.path, n_threads=4)).tuning == Tuning("off", 2, 4)


def test_a_quantized_v_cache_is_measured_with_flash_attention_only(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgeserve.tune.measure", lambda m, c, fa, n: measurement(fa, n, 10, 100))
    result = tune(model, EngineConfig(model.path, n_threads=2, type_k="q8_0", type_v="q8_0"))
    assert {item.flash_attn for item in result.measurements} == {"on"}


def test_a_real_measurement_has_every_speed(model: Model) -> None:
    from edgeserve.tune import measure

    found = measure(model, resolve(EngineConfig(model.path, n_threads=1), model), "off", 1)
    assert all(value > 0 for value in (found.decode_ms, found.decode_deep_ms))
    assert all(value > 0 for value in (found.prefill_small_tok_s, found.prefill_large_tok_s))


def test_later_starts_use_what_was_kept_and_a_typed_setting_wins(model: Model) -> None:
    write_tuning(tuning_path(model.path, cpu_name()), Tuning("on", 1, 1), [])
    resolved = resolve(EngineConfig(model.path), model)
    assert (resolved.flash_attn, resolved.n_threads, resolved.n_threads_batch) == ("on", 1, 1)
    typed = resolve(EngineConfig(model.path, flash_attn="off", n_threads=2), model)
    assert (typed.flash_attn, typed.n_threads, typed.n_threads_batch) == ("off", 2, 2)


def test_another_file_or_another_machine_has_its_own_tuning(model: Model, tmp_path: Path) -> None:
    other = tmp_path / Path(model.path).name
    other.write_bytes(b"other size")
    paths = {tuning_path(model.path, "cpu a"), tuning_path(model.path, "cpu b"), tuning_path(other, "cpu a")}
    assert len(paths) == 3


@pytest.mark.parametrize("text", ["", "{}", '{"tuning": {"flash_attn": "maybe", "n_threads": 1}}', "[1]"])
def test_a_damaged_file_counts_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    assert read_tuning(tmp_path / "x.json") is None
    assert read_tuning(tmp_path / "missing.json") is None
