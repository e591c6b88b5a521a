"""`edgeserve doctor --url` and `--bench`: a running server or a measured one, examined by its figures.

Owns the two scrapes, and how findings are shown with the figures behind them. Does not know the rules
(diagnosis.py).
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import textwrap
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from edgeserve.client import Client, server_root
from edgeserve.doctor.diagnosis import MIN_REQUESTS, Diagnosis, diagnose, has_evidence
from edgeserve.doctor.from_bench import observe_bench
from edgeserve.doctor.observed import Observed
from edgeserve.doctor.roofline import RoofPoint, peaks_of, roofline, roofline_json, roofline_lines
from edgeserve.doctor.scrape import Scrape, observe, read_scrape
from edgeserve.errors import EdgeserveError, RequestError, ServerUnreachableError, UsageError
from edgeserve.gguf import read_header
from edgeserve.ink import Ink, ink_for, printable
from edgeserve.planner.here import here
from edgeserve.planner.model_work import model_work

DEFAULT_WINDOW_S = 10.0
_COLUMNS = 96
_INDENT = " " * 10
_STYLES = {"ok": ("dim",), "note": ("bold",), "problem": ("stalled",), "speed": ("dim",)}


def check_server(
    url: str, api_key: str | None, window_s: float, say: Callable[[str], None] = lambda text: None
) -> Observed:
    """Look at a server twice, `window_s` apart. Raises ServerUnreachableError, RequestError, UsageError."""
    if not 0 < window_s <= 3600:
        raise UsageError("The window must be above 0 and at most 3600 seconds.")
    return asyncio.run(_check(url, api_key, window_s, say))


async def _check(url: str, api_key: str | None, window_s: float, say: Callable[[str], None]) -> Observed:
    async with Client(url, api_key) as client:
        say(f"watching {client.root} for {window_s:g} s")
        return await observe_while(client, lambda: asyncio.sleep(window_s))


async def observe_while(client: Client, window: Callable[[], Awaitable[object]]) -> Observed:
    """The figures of the time that `window` takes. Raises as `check_server` does."""
    first = await _scrape(client)
    await window()
    return observe(first, await _scrape(client))


async def _scrape(client: Client) -> Scrape:
    try:
        metrics = await client.get_text("/metrics")
    except ServerUnreachableError:
        raise
    except RequestError as error:
        raise UsageError(
            f"{client.root} publishes no /metrics ({error.message}).",
            "llama-server needs --metrics; any server can be measured: `edgeserve bench --url` with --out,"
            " then `edgeserve doctor --bench`.",
        ) from error
    at_s = time.perf_counter()
    return read_scrape(at_s, metrics, await _page(client, "/slots"), await _page(client, "/props"))


async def _page(client: Client, path: str) -> Any:
    """None where the server has no such page."""
    try:
        return await client.get_json(path)
    except ServerUnreachableError:
        raise
    except RequestError:
        return None


def check_bench(path: Path) -> Observed:
    """A summary.json, or the folder that holds it. Raises UsageError."""
    path = path / "summary.json" if path.is_dir() else path
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is not a benchmark's summary.json: {error}.") from error
    if not isinstance(document, dict):
        raise UsageError(f"{path} is not a benchmark's summary.json.")
    return observe_bench(document)


def roof_above(seen: Observed, url: str) -> list[RoofPoint]:
    """Speeds against the bounds of this machine; none where the server or its model's file is not here."""
    path = Path(seen.model_path or "")
    is_here = urlsplit(server_root(url)).hostname in ("localhost", "127.0.0.1", "::1")
    if not is_here or not path.is_file():
        return []
    types = [str(seen.settings.get(name, "f16")) for name in ("type_k", "type_v")]
    num_gpu_layers = seen.settings.get("n_gpu_layers", 0)
    try:
        work = model_work(read_header(str(path)), *types)
        peaks = peaks_of(here(), work, num_gpu_layers if isinstance(num_gpu_layers, int) else 0)
    except EdgeserveError:
        return []
    return [] if peaks is None else roofline(seen, work, peaks)


def report(seen: Observed, *, as_json: bool, roof: Sequence[RoofPoint] = ()) -> int:
    """Print the findings; 1 when one of them is a problem."""
    found = diagnose(seen)
    is_ok = all(item.level != "problem" for item in found)
    if as_json:
        observed = {name: value for name, value in asdict(seen).items() if value is not None}
        document = {
            "ok": is_ok,
            "has_evidence": has_evidence(seen),
            "findings": [asdict(item) for item in found],
            "observed": observed,
            "roofline": roofline_json(roof),
        }
        print(json.dumps(document, indent=1))
    else:
        ink = ink_for(sys.stdout, os.environ)
        lines = report_lines(seen, found, ink)
        print("\n".join([*lines, *(_head("speed", text, ink) for text in roofline_lines(roof))]))
    return int(not is_ok)


def report_lines(seen: Observed, found: Sequence[Diagnosis], ink: Ink) -> list[str]:
    """Sentence, figures, remedy and expectation of each finding, or one line that all is well."""
    lines = [line for item in found for line in _finding_lines(item, ink)]
    num_requests = seen.num_requests or 0
    if not has_evidence(seen):
        # Silence would read as health.
        text = (
            f"{num_requests} answered requests seen, fewer than the {MIN_REQUESTS} that a judgement needs:"
            " ask it something meanwhile, widen --window, or measure with `edgeserve bench`"
        )
        return [*lines, _head("note", text, ink)]
    if not found:
        lines.append(
            _head("ok", f"healthy: none of the known causes of delay shows in {num_requests} requests", ink)
        )
    return lines


def _finding_lines(item: Diagnosis, ink: Ink) -> list[str]:
    figures = "; ".join(f"{name} {value}" for name, value in item.figures.items())
    return [
        _head(item.level, item.sentence, ink),
        *_wrapped("seen", figures),
        *_wrapped("change", item.remedy),
        *_wrapped("expect", item.expect),
    ]


def _head(level: str, text: str, ink: Ink) -> str:
    first, *others = textwrap.wrap(printable(text), _COLUMNS - len(_INDENT))
    head = f" {ink(level, *_STYLES[level])}{' ' * (len(_INDENT) - 1 - len(level))}{first}"
    return "\n".join([head, *(f"{_INDENT}{line}" for line in others)])


def _wrapped(label: str, text: str) -> list[str]:
    lines = textwrap.wrap(printable(text), _COLUMNS - len(_INDENT) - 8)
    return [f"{_INDENT}{label if index == 0 else '':8}{line}" for index, line in enumerate(lines)]
