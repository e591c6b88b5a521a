"""Where things are kept: a variable moves each folder, and no test meets the user's own."""

from __future__ import annotations

from pathlib import Path

import platformdirs
import pytest

from edgeserve import folders
from edgeserve.chat.input import open_history
from edgeserve.config import EngineConfig
from edgeserve.engine.tuning import tuning_path
from edgeserve.gguf_remote import headers_dir
from edgeserve.local_models import models_dir
from edgeserve.planner.calibration_store import store_path
from edgeserve.settings.sources import default_config_path

KINDS = {
    "EDGESERVE_CONFIG_DIR": (folders.config_dir, platformdirs.user_config_path),
    "EDGESERVE_DATA_DIR": (folders.data_dir, platformdirs.user_data_path),
    "EDGESERVE_CACHE_DIR": (folders.cache_dir, platformdirs.user_cache_path),
    "EDGESERVE_STATE_DIR": (folders.state_dir, platformdirs.user_state_path),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_variable_moves_a_folder_and_without_it_the_platform_says(name: str) -> None:
    ours, platforms = KINDS[name]
    assert ours({name: "~/elsewhere"}) == Path.home() / "elsewhere"
    assert ours({name: ""}) == ours({}) == platforms("edgeserve")


def test_all_that_is_kept_lies_in_one_of_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in KINDS:
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.delenv("EDGESERVE_MODELS_DIR")
    monkeypatch.delenv("EDGESERVE_TUNING_DIR")
    kept = [
        default_config_path(),
        store_path(),
        models_dir(),
        tuning_path("m.gguf", EngineConfig("m.gguf")),
        headers_dir(),
    ]
    assert all(path.is_relative_to(tmp_path) for path in kept)
    open_history()
    assert [path.name for path in tmp_path.iterdir()] == ["EDGESERVE_STATE_DIR"]


def test_no_test_meets_what_its_user_keeps() -> None:
    for ours, platforms in KINDS.values():
        assert ours() != platforms("edgeserve")
