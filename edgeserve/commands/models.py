"""`edgeserve models`: what is known by name and what is here; fetching and removing."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import asdict

from edgeserve import models
from edgeserve.commands.progress import ProgressLine
from edgeserve.host import memory_budget
from edgeserve.local_models import LocalModel, find_local_models
from edgeserve.models_view import ModelRow, list_rows, render_list


def show_list(*, only_local: bool, as_json: bool) -> int:
    rows = [row for row in list_rows(memory_budget().available_bytes) if row.path or not only_local]
    local = find_local_models()
    if as_json:
        print(list_json(rows, local))
    elif rows:
        print(render_list(rows, local))
    else:
        print(*(model.reference for model in local), sep="\n", end="\n" if local else "")
    return 0


def list_json(rows: list[ModelRow], local: list[LocalModel]) -> str:
    """One document: `models` are the list's entries, `local` everything found on this machine."""
    listed = [
        {**asdict(row.entry), "path": str(row.path) if row.path else None, "fits": row.fits} for row in rows
    ]
    here = [{**asdict(model), "path": str(model.path)} for model in local]
    return json.dumps({"models": listed, "local": here}, indent=1)


def pull(reference: str) -> int:
    """Fetch what is not here yet, and print its path."""
    with closing(ProgressLine()) as progress:
        path = models.pull(reference, progress)
    print(path)
    return 0


def show_path(reference: str) -> int:
    print(models.path(reference))
    return 0


def remove(reference: str) -> int:
    """Delete a downloaded model, and print the files that are gone."""
    for path in models.remove(reference):
        print(path)
    return 0
