"""What serve and chat make of a plan: what fits, what is refused and with which words, and who set limits."""

from __future__ import annotations

from pathlib import Path

import plan_cases as cases
import pytest
from plan_cases import GIB, MIB

from edgeserve.cli import main
from edgeserve.commands.given import read_settings
from edgeserve.commands.planned import planned_start
from edgeserve.host import MemoryBudget
from edgeserve.settings.table import SETTINGS


@pytest.fixture(autouse=True)
def _own_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No calibration, tuning or configuration of the user's."""
    config = tmp_path / "config.toml"
    config.write_text("")
    monkeypatch.setenv("EDGESERVE_CONFIG", str(config))
    monkeypatch.setenv("EDGESERVE_TUNING_DIR", str(tmp_path / "tuning"))
    monkeypatch.setattr("edgeserve.planner.calibration_store.store_path", lambda: tmp_path / "cal.json")


def give_memory(monkeypatch: pytest.MonkeyPatch, n_bytes: int) -> None:
    budget = MemoryBudget(16 * GIB, n_bytes, None, "told")
    monkeypatch.setattr("edgeserve.planner.this_machine.memory_budget", lambda: budget)


def big_model(tmp_path: Path) -> Path:
    """A model of some gigabytes that takes no room: a hole, with its last bytes written."""
    header = cases.header(tmp_path)
    path = Path(header.source)
    with path.open("r+b") as file:
        file.truncate(header.total_bytes)
        file.seek(header.total_bytes - 4096)
        file.write(b"\x5a" * 4096)
    return path


def test_serve_refuses_what_does_not_fit_with_the_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    give_memory(monkeypatch, 2 * GIB)
    path = big_model(tmp_path)
    assert main(["serve", str(path), "--port", "0"]) == 6
    err = capsys.readouterr().err
    assert "does not fit: it would take" in err
    assert "1.75 GiB may be used" in err
    assert "2.0 GiB free of 16.0 (14.0 used by other programs)" in err
    assert "--force" in err


@pytest.mark.parametrize("command", ["serve", "chat"])
def test_a_start_stays_within_the_memory_that_it_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    give_memory(monkeypatch, 12 * GIB)
    path = str(big_model(tmp_path))
    start = ["serve", path, "--port", "0"] if command == "serve" else ["chat", path, "-p", "Hello"]
    assert main([*start, "--memory", "2GiB"]) == 6
    err = capsys.readouterr().err
    assert "2.00 GiB may be used. Limited to 2.00 GiB as asked." in err
    assert "The least that any settings need is 3.89 GiB. A file of at most about 1.90 GiB would fit" in err
    monkeypatch.setenv("EDGESERVE_MEMORY", "5GiB")
    assert main([*start, "-c", "65536", "-np", "1"]) == 6
    err = capsys.readouterr().err
    assert "5.00 GiB may be used. Limited to 5.00 GiB as asked." in err
    assert "It fits with -c " in err
    monkeypatch.delenv("EDGESERVE_MEMORY")
    assert main([*start, "-fitt", "11GiB"]) == 6
    assert "1.00 GiB may be used." in capsys.readouterr().err


def test_a_limit_on_memory_shortens_the_context(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    give_memory(monkeypatch, 12 * GIB)
    limited = planned_start(read_settings("serve", None, {"memory_bytes": "600M"}, None), model_path)
    assert limited.plan is not None
    assert limited.plan.best.uses[0].high_bytes <= 600 * MIB
    assert limited.config.n_ctx < 32768
    assert "of 600 MiB host RAM" in limited.notes[0]


def test_a_model_placed_by_hand_is_not_planned_and_that_is_said(model_path: Path) -> None:
    for typed, flag in (({"override_tensor": "ffn=CPU"}, "-ot"), ({"devices": "CUDA0"}, "-dev")):
        start = planned_start(read_settings("serve", None, typed, None), model_path)
        assert start.plan is None
        assert start.notes[0].startswith(f"plan       none: {flag} places the model by hand")
    alone = planned_start(read_settings("serve", None, {"devices": "none"}, None), model_path)
    assert alone.plan is not None
    assert alone.plan.target.backend == "cpu"


def test_serve_names_the_nearest_plan_that_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    give_memory(monkeypatch, 8 * GIB)
    assert main(["serve", str(big_model(tmp_path)), "--port", "0", "-c", "131072", "-np", "1"]) == 6
    err = capsys.readouterr().err
    assert "It fits with -c " in err


def test_a_start_keeps_what_was_given_and_plans_the_rest(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = planned_start(read_settings("serve", None, {"n_ctx": "1000", "n_seq_max": "2"}, None), model_path)
    assert (given.config.n_ctx, given.config.n_seq_max) == (1000, 2)
    free = planned_start(read_settings("serve", None, {}, None), model_path)
    assert free.plan is not None
    assert (free.config.n_ctx, free.config.n_seq_max) == (32768, 4)
    assert free.config.flash_attn == "off"
    assert "trained for" in free.notes[0]
    alone = planned_start(read_settings("chat", None, {}, None), model_path)
    assert (alone.config.n_ctx, alone.config.n_seq_max, alone.notes) == (8192, 1, ())
    shared = planned_start(read_settings("serve", None, {"n_ctx_seq": "2048"}, None), model_path)
    assert (shared.config.n_ctx, shared.config.n_ctx_seq) == (8192, 2048)

    give_memory(monkeypatch, 240 * MIB)
    tight = planned_start(read_settings("chat", None, {}, None), model_path)
    assert 4096 <= tight.config.n_ctx < 8192
    assert "from 8,192 trained for, because of host RAM: 0.2 GiB free of 16.0" in tight.notes[0]


def test_force_starts_what_does_not_fit(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    give_memory(monkeypatch, 32 * MIB)
    forced = planned_start(read_settings("serve", None, {"n_ctx": "4096", "force": True}, None), model_path)
    assert forced.config.n_ctx == 4096
    assert any("--force" in setting.flags for setting in SETTINGS)
