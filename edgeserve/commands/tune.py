"""`edgeserve tune`: measure which settings are fastest here, and keep them for later starts."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from edgeserve.commands.engine_start import load_model
from edgeserve.commands.model_file import find
from edgeserve.engine.tuning import tuning_path, write_tunings
from edgeserve.settings.sources import Settings
from edgeserve.settings.values import engine_config
from edgeserve.tune import CHUNKS, TuneResult, tune
from edgeserve.tune_choice import NUM_STREAMS
from edgeserve.tune_probe import DEPTH

_HEAD = (
    "flash attention",
    "threads",
    "decode",
    f"behind {DEPTH}",
    f"{NUM_STREAMS} at once",
    *(f"in {size}" for size in CHUNKS),
    "alone",
    "beside",
)


def run(settings: Settings, *, as_json: bool) -> int:
    """Measure, show the table, keep the choice. Raises ModelError and so on."""
    path = find(settings)
    loaded = load_model(settings, path, lambda part: None, is_tuned=False)
    result = tune(loaded.model, loaded.config, on_progress=_say)
    kept_at = tuning_path(path, engine_config(settings, path))
    write_tunings(kept_at, result.tunings, result.table, result.reasons)
    if as_json:
        document = {
            "reasons": result.reasons,
            "measurements": result.table,
            "layouts_ms": result.layouts,
            "kept_at": str(kept_at),
        }
        print(json.dumps(document, indent=2))
    else:
        print("\n".join(lines(result)))
        _say(f"Kept for later starts of this model: {kept_at}")
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def lines(result: TuneResult) -> list[str]:
    """The table and the choice, for people. Prompts are read in tokens per second, by chunks of so many."""
    rows = [_HEAD, *(_cells(row) for row in result.table)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    table = ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]
    return [*table, "", "Fastest here:", *(f"  {reason}" for reason in result.reasons)]


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        row["flash_attn"],
        str(row["n_threads"]),
        _text(row["decode_ms"], " ms"),
        _text(row["decode_deep_ms"], " ms"),
        _text(row["streams_ms"], " ms"),
        *(_text(row["prefill_tok_s"].get(size), "", digits=0) for size in CHUNKS),
        _text(row["request_s"], " s"),
        _text(row["request_beside_s"], " s"),
    )


def _text(value: float | None, unit: str, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}{unit}"
