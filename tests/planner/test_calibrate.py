"""Measuring this machine: rows as a child would give them, what becomes of them, and where they are kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import plan_cases as cases
import pytest
from plan_cases import GIB

from edgeserve.errors import UsageError
from edgeserve.planner import calibration_store
from edgeserve.planner.calibrate import as_profile, calibrate
from edgeserve.planner.calibration_store import MeasuredRow
from edgeserve.planner.device import parse_profile, profile_to_toml
from edgeserve.planner.device_search import find_profile
from edgeserve.planner.here import here, machine_now
from edgeserve.planner.target import described_target

SMALL = {"n_layer": 8, "n_embd": 1024, "n_ff": 2048, "n_head": 8, "n_head_kv": 4, "n_ctx_train": 8192}


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "data" / "calibration.json"
    monkeypatch.setattr(calibration_store, "store_path", lambda: path)
    return path


def machine_of(slowness: float, attention: float) -> Any:
    """A child that answers for a machine so slow; with flash attention it takes `attention` times as long."""

    def ask(request: dict[str, Any], timeout_s: float) -> list[dict[str, Any]]:
        rows = []
        for mode in request["flash_attn"]:
            factor = slowness * (attention if mode == "on" else 1.0)
            base = {"n_prompt": 1, "num_resident": 0, "num_sequences": 1, "n_ubatch": 512, "count": 3}
            base["flash_attn"] = mode == "on"
            for kind, seconds, changes in (
                ("decode", 0.004, {"num_resident": 31}),
                ("decode", 0.006, {"num_resident": 2060}),
                ("decode", 0.009, {"num_resident": 31, "num_sequences": 4}),
                ("prefill", 0.9, {"n_prompt": 512}),
                ("prefill", 4.2, {"n_prompt": 2048}),
                ("chunked prefill", 0.3, {"n_prompt": 128}),
            ):
                rows.append({**base, "kind": kind, "seconds": seconds * factor, **changes})
        return rows

    return ask


def test_measured_steps_are_reproduced_and_used_by_plans(tmp_path: Path, store: Path) -> None:
    model = cases.header(tmp_path, **SMALL)
    before = cases.estimate(model, here())
    found, _ = calibrate([Path(model.source)], ask=machine_of(1.0, 1.4))
    assert not found.flash_attn_on_cpu
    assert found.rows
    for row in found.rows:
        assert row.predicted_s is not None
        assert 0.85 < row.predicted_s / row.seconds < 1.15, row
    calibration_store.save(found)
    assert calibration_store.load() == found
    after = cases.estimate(model, here())
    assert after.best.speed.decode_tok_s is not None
    assert before.best.speed.decode_tok_s is not None
    assert width(after.best.speed.decode_tok_s) < width(before.best.speed.decode_tok_s) / 2
    assert "Calibrated" in after.best.speed.basis


def width(interval: Any) -> float:
    return float(interval.high / interval.low)


def test_flash_attention_is_used_where_it_was_measured_to_pay(tmp_path: Path, store: Path) -> None:
    model = cases.header(tmp_path, **SMALL)
    found, _ = calibrate([Path(model.source)], ask=machine_of(1.0, 0.8))
    assert found.flash_attn_on_cpu
    calibration_store.save(found)
    assert cases.estimate(model, here()).settings.flash_attn == "on"


def test_figures_of_another_machine_are_not_used(tmp_path: Path, store: Path) -> None:
    model = cases.header(tmp_path, **SMALL)
    found, _ = calibrate([Path(model.source)], ask=machine_of(1.0, 1.4))
    calibration_store.save(replace(found, machine="another machine | cpu | 64 threads"))
    target = here()
    assert target.calibrations == {}
    assert any("another machine" in note for note in target.notes)


def test_a_damaged_file_is_a_note_and_no_failure(store: Path) -> None:
    store.parent.mkdir(parents=True)
    store.write_text('{"version": 1}')
    target = here()
    assert target.calibrations == {}
    assert any("measure again" in note for note in target.notes)


def test_a_measured_machine_can_be_given_to_others(tmp_path: Path, store: Path) -> None:
    model = cases.header(tmp_path, **SMALL)
    found, _ = calibrate([Path(model.source)], ask=machine_of(1.0, 1.4))
    machine, _ = machine_now()
    profile = as_profile(found, machine)
    assert profile.bandwidth_gb_s == pytest.approx(found.calibrations["cpu"].bandwidth_gb_s, rel=0.01)
    path = tmp_path / "mine.toml"
    path.write_text(profile_to_toml(profile), encoding="utf-8")
    assert replace(parse_profile(path.read_text(), "mine"), key=profile.key) == profile
    target = described_target(find_profile(str(path)))
    assert target.pools[0].total_bytes == pytest.approx(machine.memory.total_bytes, abs=GIB)


def test_nothing_can_be_measured_without_a_model_or_when_the_child_fails(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="needs a model"):
        calibrate([])
    missing = tmp_path / "no.gguf"
    missing.write_bytes(b"GGUF")
    with pytest.raises(UsageError, match="runtime failed"):
        calibrate([missing])


def test_a_busy_machine_is_pointed_out() -> None:
    from edgeserve.commands.machine import busy_note

    assert busy_note(3.0) == ""
    assert "other programs keep the processor 80 % busy" in busy_note(80.0)


def test_a_row_tells_its_unit() -> None:
    from edgeserve.commands.machine import row_text

    row = MeasuredRow("/m/x.gguf", "cpu", "decode", 1, 31, 4, 512, False, 0.02, 0.019)
    assert row_text(row) == "x: decode 4 × with 31 tokens resident: 200 tok/s, predicted +5 %"
