"""`edgeserve doctor`: with a model that is here already, since an examination downloads nothing."""

from __future__ import annotations

from pathlib import Path

from edgeserve import models
from edgeserve.doctor.doctor import run_doctor
from edgeserve.errors import ModelNotFoundError
from edgeserve.model_list import read_models_list


def run(reference: str | None, *, as_json: bool) -> int:
    """The exit code. Raises ModelNotFoundError for a model that was named and is not here."""
    return run_doctor(_model(reference), as_json=as_json)


def _model(reference: str | None) -> Path | None:
    if reference is not None:
        return models.locate(reference, offline=True)
    try:
        return models.locate(read_models_list()[0].name, offline=True)
    except ModelNotFoundError:
        return None
