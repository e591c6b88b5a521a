"""A plan's surroundings as a table: context by cache type by layers on the GPU, what fits, and how fast.

Owns which settings are in the table and its layouts. Every figure is for the number of sequences that the
table names; bytes are from closed forms and the estimate, so that hundreds of cells take no time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from edgeserve.config import FlashAttention
from edgeserve.planner.fit import Sizer, pool_uses, with_n_ctx_seq
from edgeserve.planner.plan import Plan
from edgeserve.planner.plan_speed import PlanSpeed, Speeds
from edgeserve.planner.settings import Settings
from edgeserve.planner.words import number, size

CONTEXTS = (2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144)
CACHE_TYPES = ("f16", "q8_0", "q4_0")


@dataclass(frozen=True, slots=True)
class Cell:
    """One choice of settings. `need_bytes` by pool, upper bounds; `rejected` when llama.cpp would refuse."""

    n_ctx_seq: int
    cache_type: str
    n_gpu_layers: int
    n_cpu_moe: int
    fits: bool
    need_bytes: tuple[int, ...]
    speed: PlanSpeed
    rejected: str | None


def table_of(plan: Plan, sizer: Sizer, speeds: Speeds) -> list[Cell]:
    """All cells, by context, then cache type, then layers."""
    trained = plan.model.n_ctx_train
    contexts = [n_ctx for n_ctx in CONTEXTS if not trained or n_ctx < trained]
    contexts += [trained] if trained and trained <= 2 * CONTEXTS[-1] else []
    return [
        _cell(
            with_n_ctx_seq(
                replace(base, type_k=kind, type_v=kind, flash_attn=_attention(plan, base, kind)), n
            ),
            n,
            sizer,
            speeds,
        )
        for n in contexts
        for kind in CACHE_TYPES
        for base in _placements(plan, sizer)
    ]


def _placements(plan: Plan, sizer: Sizer) -> Iterator[Settings]:
    settings = plan.settings
    if not plan.target.accelerators:
        yield settings
        return
    num_all = sizer.model.hparams.n_layer_all + 1
    yield replace(settings, n_gpu_layers=num_all, n_cpu_moe=0)
    if plan.model.num_experts:
        yield replace(settings, n_gpu_layers=num_all, n_cpu_moe=plan.model.n_layer)
    for share in (4, 2):
        yield replace(settings, n_gpu_layers=num_all * share // 6, n_cpu_moe=0)
    yield replace(settings, n_gpu_layers=0, n_cpu_moe=0)


def _attention(plan: Plan, settings: Settings, cache_type: str) -> FlashAttention:
    if plan.fixed.flash_attn is not None:
        return plan.fixed.flash_attn
    on_gpu = bool(plan.target.accelerators) and settings.n_gpu_layers != 0
    if cache_type != "f16" or on_gpu:
        return "on"
    return "on" if plan.target.flash_attn_on_cpu else "off"


def _cell(settings: Settings, n_ctx_seq: int, sizer: Sizer, speeds: Speeds) -> Cell:
    report = sizer.report(settings)
    uses = pool_uses(report, sizer.target)
    return Cell(
        n_ctx_seq,
        settings.type_k,
        settings.n_gpu_layers,
        settings.n_cpu_moe,
        report.rejected is None and all(use.fits for use in uses),
        tuple(use.high_bytes for use in uses),
        speeds.at(settings, n_ctx_seq),
        report.rejected,
    )


def table_json(cells: Sequence[Cell], plan: Plan) -> dict[str, Any]:
    from edgeserve.planner.plan_json import interval_json

    return {
        "num_sequences": plan.settings.n_seq_max,
        "pools": [{"name": pool.name, "usable_bytes": pool.usable_bytes} for pool in plan.target.pools],
        "cells": [
            {
                "n_ctx_seq": cell.n_ctx_seq,
                "cache_type": cell.cache_type,
                "n_gpu_layers": cell.n_gpu_layers,
                "n_cpu_moe": cell.n_cpu_moe,
                "fits": cell.fits,
                "need_bytes": list(cell.need_bytes),
                "rejected": cell.rejected,
                "decode_tok_s": interval_json(cell.speed.decode_tok_s),
                "decode_full_context_tok_s": interval_json(cell.speed.full_tok_s),
            }
            for cell in cells
        ],
    }


def table_lines(cells: Sequence[Cell], plan: Plan) -> list[str]:
    """One line for each context and cache type, one column for each placement."""
    columns = list(dict.fromkeys((cell.n_gpu_layers, cell.n_cpu_moe) for cell in cells))
    rows = [["context", "cache", *(_column_name(*column) for column in columns)]]
    for n_ctx_seq, kind in dict.fromkeys((cell.n_ctx_seq, cell.cache_type) for cell in cells):
        own = [cell for cell in cells if (cell.n_ctx_seq, cell.cache_type) == (n_ctx_seq, kind)]
        rows.append([f"{n_ctx_seq:,}", kind, *(_cell_text(cell) for cell in own)])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in rows]
    pools = ", ".join(f"{size(pool.usable_bytes)} {pool.name}" for pool in plan.target.pools)
    sequences = "1 sequence" if plan.settings.n_seq_max == 1 else f"{plan.settings.n_seq_max} sequences"
    return [
        f"{plan.model.name} {plan.model.quant} on {plan.target.name}: usable {pools}",
        f"{sequences}, tokens of each; memory at most; tok/s of one sequence, context empty/full",
        *lines,
    ]


def _column_name(n_gpu_layers: int, n_cpu_moe: int) -> str:
    if n_gpu_layers <= 0:
        return "CPU only"
    return f"-ngl {n_gpu_layers}" + (f" --n-cpu-moe {n_cpu_moe}" if n_cpu_moe else "")


def _cell_text(cell: Cell) -> str:
    if cell.rejected:
        return "not valid"
    need = "+".join(size(n_bytes) for n_bytes in cell.need_bytes)
    if not cell.fits:
        return f"no: {need}"
    empty, full = cell.speed.decode_tok_s, cell.speed.full_tok_s
    speed = f"{number(empty.mid)}/{number(full.mid)} tok/s" if empty and full else "n/a"
    return f"{need}  {speed}"
