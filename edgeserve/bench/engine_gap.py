"""The engine alone against the same model behind HTTP: where a token's time goes on the way to a client.

Owns the matching of rows (`bench --engine`) with decode cases (`bench --scenario decode`), and the
differences. Does not know how either was measured.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from edgeserve.bench.engine_rows import SCHEMA
from edgeserve.bench.tables import UNDEFINED, Table
from edgeserve.errors import UsageError
from edgeserve.ink import format_ms

_STREAMS = re.compile(r"decode, (\d+) streams?")
HEADS = ("streams", "engine alone", "in the server", "at the client", "scheduling, sampling", "HTTP", "kept")
NOTE = (
    "Time per token. Engine alone: T_TG / TG. In the server: its own time from the first token to the last."
    " Kept: engine alone / at the client."
)


def is_engine_result(path: Path) -> bool:
    """Whether this is an engine.json, or a folder that holds one and no summary.json."""
    if path.is_dir():
        return (path / "engine.json").is_file() and not (path / "summary.json").is_file()
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(document, dict) and document.get("schema") == SCHEMA


def read_engine(path: Path) -> dict[str, Any]:
    """Raises UsageError for what is no result of `edgeserve bench --engine`."""
    path = path / "engine.json" if path.is_dir() else path
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}.") from error
    return document


def gap_rows(engine: Mapping[str, Any], served: Mapping[str, Any]) -> list[dict[str, float | None]]:
    """One a number of streams that both measured; seconds per token. Raises UsageError where there is none.

    Of several prompt lengths the shortest counts: decode cases have short prompts.
    """
    alone: dict[int, float] = {}
    for row in sorted(engine.get("rows", []), key=lambda row: -row["pp"]):
        alone[row["pl"]] = row["t_tg"] / row["tg"]
    rows = list(_rows(alone, served))
    if not rows:
        raise UsageError(
            "The two have no number of streams in common.",
            "Measure `bench --engine -npl 1,4` and `bench --scenario decode --streams 1,4`.",
        )
    return rows


def _rows(alone: Mapping[int, float], served: Mapping[str, Any]) -> Iterator[dict[str, float | None]]:
    for case in served.get("cases", []):
        match = _STREAMS.fullmatch(case["label"])
        figures = case.get("figures", {})
        client = figures.get("tpot_p50_s")
        if match is None or case.get("server") != "A" or client is None or int(match[1]) not in alone:
            continue
        server = figures.get("server_tpot_s")
        yield {
            "streams": int(match[1]),
            "engine_s": alone[int(match[1])],
            "server_s": server["median"] if server else None,
            "client_s": client["median"],
        }


def gap_table(rows: list[dict[str, float | None]]) -> Table:
    return Table("engine alone and behind HTTP", HEADS, tuple(_cells(row) for row in rows), NOTE)


def _cells(row: Mapping[str, float | None]) -> tuple[str, ...]:
    engine, server, client = row["engine_s"], row["server_s"], row["client_s"]
    return (
        f"{row['streams']:.0f}",
        *(UNDEFINED if value is None else format_ms(value) for value in (engine, server, client)),
        _difference(engine, server),
        _difference(server, client),
        f"{100 * engine / client:.0f} %" if engine and client else UNDEFINED,
    )


def _difference(before: float | None, after: float | None) -> str:
    """With its sign: noise can make the longer way look shorter."""
    if before is None or after is None:
        return UNDEFINED
    sign = "−" if after < before else "+"
    return f"{sign}{format_ms(abs(after - before))}"
