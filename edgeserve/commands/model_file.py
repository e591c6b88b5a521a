"""The model's file for a command: found on this machine, or fetched with a line that shows how far it is."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from edgeserve import models
from edgeserve.commands.progress import ProgressLine
from edgeserve.model_list import read_models_list
from edgeserve.settings.sources import Settings


def reference_of(settings: Settings) -> str:
    """What was asked for; the list's first model when nothing was."""
    return settings.text("model") or read_models_list()[0].name


def check_reference(settings: Settings) -> None:
    """Raise ModelNotFoundError for a model that does not exist, without fetching one that does."""
    with closing(ProgressLine()) as progress:
        models.resolve(reference_of(settings), offline=settings["offline"] is True, progress=progress)


def find(settings: Settings) -> Path:
    """The model's file, its header checked. Raises ModelNotFoundError, DownloadError or GGUFError."""
    with closing(ProgressLine()) as progress:
        return models.locate(reference_of(settings), offline=settings["offline"] is True, progress=progress)
