"""A live server for the TUI's tests, and folders of its own for what the screens keep."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tui_server import Live, PacedEngine, serve

from edgeserve.config import EngineConfig
from edgeserve.llama import Model

N_CTX_SEQ, NUM_SLOTS = 1024, 2


@pytest.fixture(scope="session")
def tui_engine(model: Model) -> Iterator[PacedEngine]:
    config = EngineConfig(
        model.path,
        n_ctx=N_CTX_SEQ * NUM_SLOTS,
        n_seq_max=NUM_SLOTS,
        n_threads=1,  # the application in the same process needs the other one
        itl_target_ms=80,
        max_waiting=2,
    )
    engine = PacedEngine(model, config)
    engine.start()
    yield engine
    engine.stop()


@pytest.fixture(scope="session")
def live(tui_engine: PacedEngine) -> Iterator[Live]:
    """edgeserve's own server around the small model."""
    with serve(tui_engine) as live:
        yield live


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the screens keep goes to the test's own folder, never to the user's."""
    monkeypatch.setenv("EDGESERVE_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("EDGESERVE_CONFIG_DIR", str(tmp_path / "config"))
    return tmp_path
