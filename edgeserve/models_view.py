"""Models as text for people: the list, and where a download stands.

Owns the wording. Knows nothing of terminals: it returns lines, and whoever prints them decides where.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edgeserve.download import Progress
from edgeserve.local_models import LocalModel
from edgeserve.model_list import FIT_FACTOR, ModelEntry, read_models_list
from edgeserve.models import path_of_entry


@dataclass(frozen=True)
class ModelRow:
    """One line of `edgeserve models`: an entry, where it is if it is here, and whether it should fit."""

    entry: ModelEntry
    path: Path | None
    fits: bool | None


def list_rows(usable_bytes: int | None = None) -> list[ModelRow]:
    """The whole list with what is here; `fits` by the rule of `entries_that_fit`, None if not known."""
    rows = []
    for entry in read_models_list():
        known = usable_bytes is not None and entry.n_bytes is not None
        fits = (entry.n_bytes or 0) * FIT_FACTOR <= (usable_bytes or 0) if known else None
        rows.append(ModelRow(entry, path_of_entry(entry), fits))
    return rows


def render_list(rows: list[ModelRow], local: list[LocalModel]) -> str:
    """The list for people: the entries, then other models found on this machine."""
    width = max((len(row.entry.name) for row in rows), default=0)
    lines = ["Models by name:"]
    for row in rows:
        here = "here" if row.path else "too big" if row.fits is False else ""
        lines.append(
            f"  {row.entry.name:<{width}}  {_size(row.entry.n_bytes):>8}  {here:<7}  {row.entry.licence:<10}"
            f"  {row.entry.note}"
        )
    listed = {row.path for row in rows}
    others = [model for model in local if model.path not in listed]
    if others:
        lines += ["", "Also on this machine:"]
        lines += [f"  {_size(model.n_bytes):>8}  {model.source:<9}  {model.reference}" for model in others]
    return "\n".join(lines)


def _size(n_bytes: int | None) -> str:
    if n_bytes is None:
        return "?"
    return f"{n_bytes / 1e9:.1f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:.0f} MB"


def progress_line(progress: Progress) -> str:
    """One line for people, such as "model.gguf  42 %  1.2 of 2.9 GB  31.0 MB/s  55 s left"."""
    doing = {"connect": "connecting", "unpack": "unpacking", "verify": "verifying", "done": "ready"}
    parts = [progress.name]
    if progress.phase in doing:
        parts.append(doing[progress.phase])
    if progress.total_bytes and progress.phase != "connect":
        share = 100 * progress.done_bytes // progress.total_bytes
        parts += [f"{share} %", f"{_size(progress.done_bytes)} of {_size(progress.total_bytes)}"]
    if progress.rate_bytes_s is not None:
        parts.append(f"{progress.rate_bytes_s / 1e6:.1f} MB/s")
    if progress.eta_s is not None:
        parts.append(_left(progress.eta_s))
    return "  ".join(parts)


def _left(eta_s: float) -> str:
    minutes, seconds = divmod(round(eta_s), 60)
    return f"{minutes} min {seconds} s left" if minutes else f"{seconds} s left"
