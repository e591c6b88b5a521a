"""`edgeserve tune`: measure which settings are fastest here, and keep them for later starts."""

from __future__ import annotations

import json
import sys

from edgeserve.commands.engine_start import load_model
from edgeserve.commands.model_file import find
from edgeserve.engine.tuning import tuning_path, write_tuning
from edgeserve.ggml import cpu_name
from edgeserve.settings.sources import Settings
from edgeserve.tune import DEPTH, Measurement, TuneResult, tune

_HEAD = ("flash attention", "threads", "decode", f"at depth {DEPTH}", "small steps", "large steps", "request")


def run(settings: Settings, *, as_json: bool) -> int:
    """Measure, show the table, keep the choice. Raises ModelError and so on."""
    path = find(settings)
    loaded = load_model(settings, path, lambda part: None)
    result = tune(loaded.model, loaded.config, on_progress=_say)
    rows = [item.row() for item in result.measurements]
    kept_at = tuning_path(path, cpu_name())
    write_tuning(kept_at, result.tuning, rows)
    if as_json:
        print(json.dumps({"reason": result.reason, "measurements": rows, "kept_at": str(kept_at)}, indent=2))
    else:
        print("\n".join(lines(result)))
        _say(f"Kept for later starts of this model: {kept_at}")
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def lines(result: TuneResult) -> list[str]:
    """The table and the choice, for people."""
    rows = [_HEAD, *(_cells(item) for item in result.measurements)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    table = ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]
    return [*table, "", f"Fastest here: {result.reason}"]


def _cells(item: Measurement) -> tuple[str, ...]:
    return (
        item.flash_attn,
        str(item.n_threads),
        f"{item.decode_ms:.1f} ms",
        f"{item.decode_deep_ms:.1f} ms",
        f"{item.prefill_small_tok_s:.0f} tok/s",
        f"{item.prefill_large_tok_s:.0f} tok/s",
        f"{item.request_s:.1f} s",
    )
