"""`edgeserve models fit`: which models of the list a machine can run, how well, and which it cannot.

Models whose header is here (the file, or a header read before) get a plan; of the others only the size is
known, and they are judged by it. Nothing is downloaded.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from edgeserve import models
from edgeserve.commands.plan import Request, goals_of, target_of
from edgeserve.errors import EdgeserveError
from edgeserve.gguf_header import GGUFHeader
from edgeserve.model_list import FIT_FACTOR, ModelEntry, read_models_list
from edgeserve.planner.goals import Goals
from edgeserve.planner.plan import Plan, make_plan
from edgeserve.planner.plan_json import interval_json
from edgeserve.planner.target import Target
from edgeserve.planner.words import rate, size


@dataclass(frozen=True, slots=True)
class FitRow:
    """One model of the list. `plan` None: only the file's size is known. `fits` None: not even that."""

    entry: ModelEntry
    plan: Plan | None
    fits: bool | None


def run(
    device: str | None, backend: str, memory: str | None, gpu_memory: str | None, *, as_json: bool
) -> int:
    request = Request(None, device, backend, memory=memory, gpu_memory=gpu_memory)
    goals = goals_of(request)
    target = target_of(request, goals)
    rows = [fit_row(entry, target, goals) for entry in read_models_list()]
    print(_json(rows, target) if as_json else "\n".join(lines(rows, target)))
    return 0


def fit_row(entry: ModelEntry, target: Target, goals: Goals) -> FitRow:
    header = _known_header(entry.name)
    if header is not None:
        plan = make_plan(header, target, goals, dry_run=False)
        return FitRow(entry, plan, plan.fits)
    usable = sum(pool.usable_bytes for pool in target.pools)
    return FitRow(entry, None, entry.n_bytes * FIT_FACTOR <= usable if entry.n_bytes else None)


def _known_header(name: str) -> GGUFHeader | None:
    try:
        return models.read_model_header(name, offline=True)
    except EdgeserveError:
        return None


def lines(rows: list[FitRow], target: Target) -> list[str]:
    """One line a model, aligned."""
    table = [["model", "size", "fits", "sequences × tokens", "decode", "placement"]]
    table += [_cells(row) for row in rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    shown = [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]
    pools = ", ".join(f"{size(pool.usable_bytes)} {pool.name}" for pool in target.pools)
    note = "~: judged by the file's size; `edgeserve plan NAME` reads the header and says more."
    return [f"{target.name}: {pools} usable", *shown, note]


_PLACES = {"gpu": "all on the GPU", "experts": "experts on the CPU", "split": "part on the GPU", "cpu": "CPU"}


def _cells(row: FitRow) -> list[str]:
    file_size = size(row.entry.n_bytes) if row.entry.n_bytes else "n/a"
    word = {True: "yes", False: "no", None: "n/a"}[row.fits]
    if row.plan is None:
        return [row.entry.name, file_size, f"~{word}" if row.fits is not None else word, "", "", ""]
    best = row.plan.best
    context = f"{best.settings.n_seq_max} × {best.choice.n_ctx_seq:,}" if row.plan.fits else ""
    place = _PLACES[best.choice.family] if row.plan.fits else ""
    return [row.entry.name, file_size, word, context, rate(best.speed.decode_tok_s), place]


def _json(rows: list[FitRow], target: Target) -> str:
    document: list[dict[str, Any]] = [
        {
            "name": row.entry.name,
            "n_bytes": row.entry.n_bytes,
            "fits": row.fits,
            "is_planned": row.plan is not None,
            "n_seq_max": row.plan.settings.n_seq_max if row.plan else None,
            "n_ctx_seq": row.plan.best.choice.n_ctx_seq if row.plan else None,
            "placement": row.plan.best.choice.family if row.plan else None,
            "decode_tok_s": interval_json(row.plan.best.speed.decode_tok_s) if row.plan else None,
        }
        for row in rows
    ]
    pools = [asdict(pool) for pool in target.pools]
    return json.dumps({"device": target.name, "pools": pools, "models": document}, indent=1, allow_nan=False)
