"""Rows of the engine alone, in llama-batched-bench's columns: for people as a table, for programs as JSON.

Owns the columns and what follows from the two times of a row. Does not know how they were measured
(engine/batched_bench.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from edgeserve.bench.report import text_table
from edgeserve.bench.tables import Table
from edgeserve.errors import UsageError

SCHEMA = "edgeserve-engine-bench/1"
COLUMNS = ("PP", "TG", "B", "N_KV", "T_PP s", "S_PP t/s", "T_TG s", "S_TG t/s", "T s", "S t/s")


@dataclass(frozen=True, slots=True)
class EnginePoints:
    """What to measure: every combination of the three, `repeats` times."""

    npp: tuple[int, ...] = (128, 512)
    ntg: tuple[int, ...] = (32,)
    npl: tuple[int, ...] = (1, 4)
    is_shared: bool = False
    repeats: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("npp", "ntg", "npl"):
            values = getattr(self, name)
            if not values or min(values) < 1:
                raise UsageError(f"--{name} needs whole numbers above 0.")
        if self.repeats < 1:
            raise UsageError("--repeats must be at least 1.")


@dataclass(frozen=True, slots=True)
class EngineRow:
    """`pl` sequences, prompts of `pp` tokens, `tg` tokens generated for each. Times are of all of them
    together, one entry a repeat."""

    pp: int
    tg: int
    pl: int
    is_shared: bool
    t_pp_s: tuple[float, ...]
    t_tg_s: tuple[float, ...]

    @property
    def num_prefill(self) -> int:
        return self.pp if self.is_shared else self.pp * self.pl

    @property
    def n_kv(self) -> int:
        return self.num_prefill + self.pl * self.tg

    def json(self) -> dict[str, Any]:
        """llama-batched-bench's own keys; medians, and the times of every repeat."""
        t_pp, t_tg = median(self.t_pp_s), median(self.t_tg_s)
        return {
            "pp": self.pp,
            "tg": self.tg,
            "pl": self.pl,
            "n_kv": self.n_kv,
            "t_pp": t_pp,
            "speed_pp": _rate(self.num_prefill, t_pp),
            "t_tg": t_tg,
            "speed_tg": _rate(self.pl * self.tg, t_tg),
            "t": t_pp + t_tg,
            "speed": _rate(self.n_kv, t_pp + t_tg),
            "repeats": {"t_pp": list(self.t_pp_s), "t_tg": list(self.t_tg_s)},
        }

    @property
    def cells(self) -> tuple[str, ...]:
        found = self.json()
        counts = [f"{found[name]}" for name in ("pp", "tg", "pl", "n_kv")]
        times = [
            "n/a" if found[name] is None else f"{found[name]:.{digits}f}"
            for name, digits in (
                ("t_pp", 3), ("speed_pp", 2), ("t_tg", 3), ("speed_tg", 2), ("t", 3), ("speed", 2),
            )
        ]  # fmt: skip
        return (*counts, *times)


def _rate(count: int, seconds: float) -> float | None:
    return count / seconds if seconds > 0 and count else None


def rows_of(timings: Sequence[Mapping[str, Any]]) -> list[EngineRow]:
    """Runs of the same point become one row, in the order of their first run."""
    groups: dict[tuple[int, int, int, bool], list[Mapping[str, Any]]] = {}
    for timing in timings:
        point = timing["point"]
        groups.setdefault((point["pp"], point["tg"], point["pl"], point["is_shared"]), []).append(timing)
    return [
        EngineRow(
            *key,
            t_pp_s=tuple(timing["t_pp_s"] for timing in group),
            t_tg_s=tuple(timing["t_tg_s"] for timing in group),
        )
        for key, group in groups.items()
    ]


def text_report(rows: Sequence[EngineRow], facts: Mapping[str, Any], notes: Sequence[str]) -> str:
    """One line on what was measured, the table, what was left out."""
    num_repeats = max((len(row.t_pp_s) for row in rows), default=0)
    title = (
        f"{facts.get('model', '')} without server: n_ctx {facts.get('n_ctx', 0):,}, "
        f"{facts.get('n_threads')} threads, flash attention {facts.get('flash_attn')}, "
        f"median of {num_repeats} run{'s' if num_repeats != 1 else ''}"
    )
    table = text_table(Table(title, COLUMNS, tuple(row.cells for row in rows)))
    return table + "".join(f"\nnote  {note}" for note in notes) + "\n"


def json_report(
    rows: Sequence[EngineRow], facts: Mapping[str, Any], notes: Sequence[str], *, is_partial: bool
) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "is_partial": is_partial,
        **facts,
        "warnings": list(notes),
        "rows": [row.json() for row in rows],
    }
