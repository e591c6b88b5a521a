"""`edgeserve plan --quants`: the same model in other quantizations, side by side on one machine.

Owns where the other files are looked for: beside a local file, or in the hub repository that it comes from.
Files on the hub are not opened: their weights are taken from the first one's header, scaled to the size that
the hub states, which is good to a few percent.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgeserve import hub, local_models
from edgeserve.errors import EdgeserveError
from edgeserve.gguf import read_header
from edgeserve.gguf_checks import is_model_file_name
from edgeserve.gguf_header import GGUFHeader
from edgeserve.model_list import find_entry, read_models_list
from edgeserve.model_reference import parse_hub_reference
from edgeserve.planner.plan import Plan, make_plan
from edgeserve.planner.plan_json import interval_json
from edgeserve.planner.words import rate, size


@dataclass(frozen=True, slots=True)
class QuantRow:
    """One file and its plan on the machine. `is_scaled`: its weights were taken from the size of the file."""

    file: str
    n_bytes: int
    plan: Plan
    is_scaled: bool


def compare(reference: str, header: GGUFHeader, plan: Plan, *, offline: bool) -> list[QuantRow]:
    """All quantizations that are known, smallest first; at least the one asked for."""
    repo = "" if offline else _repo(reference)
    rows = list(_in_repo(repo, header, plan)) if repo else list(_beside(header, plan))
    if not rows:
        rows = [QuantRow(Path(header.source).name, header.total_bytes, _plan(header, plan), False)]
    return sorted(rows, key=lambda row: row.n_bytes)


def _repo(reference: str) -> str:
    entry = find_entry(reference, read_models_list())
    if entry is not None:
        return entry.repo
    found = None if Path(reference).exists() else parse_hub_reference(reference)
    return found.repo if found else ""


def _plan(header: GGUFHeader, like: Plan) -> Plan:
    return make_plan(header, like.target, like.goals, like.fixed, dry_run=False)


def _in_repo(repo: str, header: GGUFHeader, plan: Plan) -> Iterator[QuantRow]:
    files = {file.name: file.n_bytes for file in hub.list_files(repo)}
    for name in hub.choose_models(files):
        parts = [part for part in local_models.all_parts(Path(name)) if part.as_posix() in files]
        sizes = [files[part.as_posix()] for part in parts]
        if sizes and None not in sizes:
            n_bytes = sum(each or 0 for each in sizes)
            yield QuantRow(name, n_bytes, _plan(_scaled(header, name, n_bytes), plan), True)


def _scaled(header: GGUFHeader, name: str, n_bytes: int) -> GGUFHeader:
    """The header with every tensor larger or smaller, so that together they make the other file."""
    wanted = max(1, n_bytes - header.data_offset)
    ratio = wanted / max(1, header.tensor_bytes)
    tensors = tuple(tensor._replace(n_bytes=round(tensor.n_bytes * ratio)) for tensor in header.tensors)
    first = replace(header.shards[0], source=name)
    return replace(header, tensors=tensors, shards=(first, *header.shards[1:]))


def _beside(header: GGUFHeader, plan: Plan) -> Iterator[QuantRow]:
    """Files of the same folder with the same architecture and layers: read, not scaled."""
    if not header.is_local:
        return
    for path in sorted(Path(header.source).parent.glob("*.gguf")):
        try:
            other = read_header(path) if is_model_file_name(path.name) else None
        except EdgeserveError:
            continue
        if other is not None and _is_same_model(header, other) and other.source == str(path):
            yield QuantRow(path.name, other.total_bytes, _plan(other, plan), False)


def _is_same_model(one: GGUFHeader, other: GGUFHeader) -> bool:
    keys = ("block_count", "embedding_length", "context_length", "attention.head_count")
    return one.architecture == other.architecture and all(
        one.arch_get(key) == other.arch_get(key) for key in keys
    )


def lines(rows: Sequence[QuantRow], plan: Plan) -> list[str]:
    """One line a file: size, whether it fits, context, and speed."""
    table = [["file", "size", "quant", "sequences × tokens", "decode", "with a full context"]]
    for row in rows:
        best = row.plan.best
        context = (
            f"{best.settings.n_seq_max} × {best.choice.n_ctx_seq:,}" if row.plan.fits else "does not fit"
        )
        table.append(
            [
                row.file,
                size(row.n_bytes),
                row.plan.model.quant,
                context,
                rate(best.speed.decode_tok_s),
                rate(best.speed.full_tok_s),
            ]
        )
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    shown = [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]
    note = "Weights are scaled from the size of the file." if any(row.is_scaled for row in rows) else ""
    return [f"{plan.model.name} on {plan.target.name}", *shown, *([note] if note else [])]


def quants_json(rows: Sequence[QuantRow]) -> str:
    """One document: a list of files with their plans' main figures."""
    document: list[dict[str, Any]] = [
        {
            "file": row.file,
            "n_bytes": row.n_bytes,
            "quant": row.plan.model.quant,
            "fits": row.plan.fits,
            "n_seq_max": row.plan.settings.n_seq_max,
            "n_ctx_seq": row.plan.best.choice.n_ctx_seq,
            "n_gpu_layers": row.plan.settings.n_gpu_layers,
            "need_bytes": {use.pool.name: use.high_bytes for use in row.plan.best.uses},
            "decode_tok_s": interval_json(row.plan.best.speed.decode_tok_s),
            "decode_full_context_tok_s": interval_json(row.plan.best.speed.full_tok_s),
            "is_scaled": row.is_scaled,
        }
        for row in rows
    ]
    return json.dumps({"quants": document}, indent=1, allow_nan=False)
