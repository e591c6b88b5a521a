"""docs/api.md says what the server does: every route, every limit, every error code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from edgeserve.config import ServerConfig
from edgeserve.engine.request import RequestTimings
from edgeserve.engine.sampling_params import (
    MAX_LOGIT_BIAS,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_TOP_LOGPROBS,
)
from edgeserve.server.app import build_app
from edgeserve.server.limits import Limits
from edgeserve.server.metrics_export import OUTCOMES
from edgeserve.server.state import ServerState
from edgeserve.server.tally import timings_document

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")


def test_every_route_is_documented() -> None:
    for route in build_app(ServerState(ServerConfig())).routes:
        path = route.path.replace("{model:path}", "NAME").replace("{request_id}", "ID")
        assert f"{path}`" in TEXT, path


def test_every_error_code_is_documented() -> None:
    sources = [ROOT / "edgeserve" / "errors.py", *(ROOT / "edgeserve" / "server").glob("*.py")]
    code = re.compile(r'\bcode(?:: str \| None)? ?= ?"(\w+)"')
    codes = {found for path in sources for found in code.findall(path.read_text(encoding="utf-8"))}
    # Never reach a client as such: its connection is closed, or a more particular code is given.
    codes -= {"client_left", "unavailable"}
    assert {name for name in codes if f"`{name}`" not in TEXT} == set()


@pytest.mark.parametrize(
    "number",
    [
        f"{Limits().max_messages:,}",
        f"| {Limits().max_n} |",
        f"| {Limits().max_prompts} |",
        f"{Limits().header_s:g} s",
        f"{Limits().body_s:g} s",
        f"{Limits().template_render_s:g} s",
        f"{Limits().max_template_chars:,}",
        f"{Limits().max_rendered_chars:,}",
        f"{ServerConfig().max_body_bytes >> 20} MiB",
        f"up to {MAX_STOP_STRINGS}, of up to {MAX_STOP_CHARS} characters",
        f"up to {MAX_LOGIT_BIAS}",
        f"up to {MAX_TOP_LOGPROBS};",
    ],
)
def test_limits_are_quoted_as_they_are(number: str) -> None:
    assert number in TEXT


def test_timings_and_outcomes_are_all_explained() -> None:
    names = [*timings_document(RequestTimings(1, 0, 1, 1)), *OUTCOMES]
    assert [name for name in names if f"`{name}`" not in TEXT] == []
