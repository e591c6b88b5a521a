"""`edgeserve doctor`: with a model that is here already, since an examination downloads nothing."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from edgeserve import models
from edgeserve.doctor.doctor import run_doctor
from edgeserve.errors import ModelNotFoundError, UsageError
from edgeserve.model_list import read_models_list


def run(reference: str | None, *, as_json: bool) -> int:
    """The exit code. Raises ModelNotFoundError for a model that was named and is not here."""
    return run_doctor(_model(reference), as_json=as_json)


def run_diagnosis(
    reference: str | None,
    url: str | None,
    api_key: str | None,
    window_s: float,
    bench: Path | None,
    *,
    as_json: bool,
) -> int:
    """A server's figures, looked at twice or taken from a benchmark; 1 when there is a problem."""
    from edgeserve.doctor import server_check

    if reference or (url and bench):
        raise UsageError("Only one thing can be examined: a model, --url or --bench.")
    if bench is not None:
        return server_check.report(server_check.check_bench(bench), as_json=as_json)
    assert url is not None
    key = api_key or os.environ.get("EDGESERVE_API_KEY") or None
    seen = server_check.check_server(url, key, window_s, lambda text: print(text, file=sys.stderr))
    return server_check.report(seen, as_json=as_json, roof=server_check.roof_above(seen, url))


def _model(reference: str | None) -> Path | None:
    if reference is not None:
        return models.locate(reference, offline=True)
    try:
        return models.locate(read_models_list()[0].name, offline=True)
    except ModelNotFoundError:
        return None
