"""The first start of a model: it is measured once, can be skipped, and what was typed wins."""

from __future__ import annotations

import io
import signal
from pathlib import Path

import pytest

from edgeserve.commands.engine_start import make_engine
from edgeserve.commands.first_tune import FirstTune, is_wanted
from edgeserve.commands.given import read_settings
from edgeserve.commands.planned import known_tuning, planned_start
from edgeserve.config import EngineConfig, ServerConfig
from edgeserve.engine.tuning import StepSample, Tuning, Tunings, tuning_path, write_tunings
from edgeserve.errors import EngineError
from edgeserve.server.run import DrainingServer
from edgeserve.server.state import ServerState
from edgeserve.settings.sources import Settings
from edgeserve.settings.values import engine_config
from edgeserve.tune import TuneResult

ON = Tuning("on", 1, 1, steps=(StepSample(1, 0, 0.02), StepSample(0, 32, 0.25)))
FOUND = Tunings(ON, ON)


@pytest.fixture(autouse=True)
def _own_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text("")
    monkeypatch.setenv("EDGESERVE_CONFIG", str(config))
    monkeypatch.setenv("EDGESERVE_TUNING_DIR", str(tmp_path / "tuning"))
    monkeypatch.delenv("EDGESERVE_TUNE", raising=False)


def settings(**typed: str | bool) -> Settings:
    return read_settings("serve", None, {"n_ctx": "512", "n_seq_max": "1", **typed}, None)


def finds(monkeypatch: pytest.MonkeyPatch, found: Tunings = FOUND) -> list[EngineConfig]:
    """Replace the measurement, which takes seconds; returns the configurations that it was asked for."""
    asked: list[EngineConfig] = []

    def tune(model, config, on_progress, deadline, *, is_short):
        asked.append(config)
        return TuneResult(found, ["because it is."], [])

    monkeypatch.setattr("edgeserve.commands.first_tune.tune", tune)
    return asked


def start(model_path: Path, given: Settings, first_tune: FirstTune | None) -> EngineConfig:
    engine = make_engine(given, model_path, lambda part: None, first_tune).engine
    engine.start()
    engine.stop()
    return engine.config


def test_the_first_start_measures_and_later_ones_know(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, said = finds(monkeypatch), io.StringIO()
    config = start(model_path, settings(), FirstTune(said))
    assert (config.flash_attn, config.n_threads, config.n_threads_batch) == ("on", 1, 1)
    assert config.step_samples == ((1, 0, 0.02), (0, 32, 0.25))
    assert "measuring once" in said.getvalue() and "because it is" in said.getvalue()
    again = start(model_path, settings(), FirstTune(said))
    assert (again.flash_attn, again.n_threads) == ("on", 1)
    assert len(asked) == 1


def test_what_was_measured_gives_the_scheduler_its_first_guesses(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finds(monkeypatch)
    engine = make_engine(settings(), model_path, lambda part: None, FirstTune(io.StringIO())).engine
    engine.start()
    engine.stop()
    cost = engine._engine.step_cost
    assert cost.decode_s(1) == pytest.approx(0.02)
    assert cost.step_s(0, 32) == pytest.approx(0.25)


def test_what_was_typed_wins(model_path: Path) -> None:
    given = settings()
    write_tunings(tuning_path(model_path, engine_config(given, model_path)), FOUND, [], [])
    tuned = planned_start(settings(), model_path).config
    assert (tuned.flash_attn, tuned.n_threads) == ("on", 1)
    typed = planned_start(settings(flash_attn="off", n_threads="2"), model_path).config
    assert (typed.flash_attn, typed.n_threads, typed.step_samples) == ("off", 2, ())
    untuned = planned_start(settings(), model_path, is_tuned=False).config
    assert (untuned.flash_attn, untuned.n_threads) == ("off", 0)


def test_one_sequence_and_several_start_as_each_was_found_fastest(model_path: Path) -> None:
    kept_at = tuning_path(model_path, engine_config(settings(), model_path))
    write_tunings(kept_at, Tunings(ON, Tuning("off", 1, 1)), [], [])
    assert planned_start(settings(), model_path).config.flash_attn == "on"
    assert planned_start(settings(n_seq_max="4"), model_path).config.flash_attn == "off"


@pytest.mark.parametrize(
    "typed",
    [
        {"tune": False},
        {"flash_attn": "on", "n_threads": "1"},
        {"devices": "none"},
        {"override_tensor": ["blk=CPU"]},
    ],
)
def test_nothing_is_measured_when_it_is_not_wanted(model_path: Path, typed: dict[str, str]) -> None:
    given = settings(**typed)
    assert not is_wanted(given, engine_config(given, model_path))
    assert is_wanted(settings(), engine_config(settings(), model_path))


def test_skipping_goes_on_untuned_and_keeps_nothing(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, said = FirstTune(said_to := io.StringIO()), said_to

    def tune(model, config, on_progress, deadline, *, is_short):
        assert deadline.has_time_for(0)
        assert first.skip()
        assert not deadline.has_time_for(0)
        assert not first.skip(), "a second Ctrl-C is meant for the start"
        return TuneResult(FOUND, [], [])

    monkeypatch.setattr("edgeserve.commands.first_tune.tune", tune)
    assert not first.skip()
    assert start(model_path, settings(), first).flash_attn == "off"
    assert "defaults" in said.getvalue()
    assert known_tuning(engine_config(settings(), model_path)) is None
    assert not first.skip()


def test_a_measurement_that_fails_does_not_fail_the_start(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tune(*args, **options):
        raise EngineError("no")

    monkeypatch.setattr("edgeserve.commands.first_tune.tune", tune)
    assert start(model_path, settings(), FirstTune(io.StringIO())).flash_attn == "off"


def test_a_start_that_does_not_measure_uses_what_is_known(model_path: Path) -> None:
    write_tunings(tuning_path(model_path, engine_config(settings(), model_path)), FOUND, [], [])
    assert start(model_path, settings(), None).flash_attn == "on"


def test_ctrl_c_ends_the_measurement_before_it_ends_the_server() -> None:
    taken = iter((True, False))
    server = DrainingServer(ServerState(ServerConfig()), lambda: next(taken))
    server.handle_exit(signal.SIGINT, None)
    assert not server.state.is_draining
    server.handle_exit(signal.SIGINT, None)
    assert server.state.is_draining
    other = DrainingServer(ServerState(ServerConfig()), lambda: True)
    other.handle_exit(signal.SIGTERM, None)
    assert other.state.is_draining
