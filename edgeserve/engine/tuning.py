"""What was measured for a model on this machine, kept for later starts: which settings are fastest here.

Owns the file that remembers it and the key under which it is found. Measuring is tune.py's work.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from platformdirs import user_cache_path

from edgeserve.config import FlashAttention


@dataclass(frozen=True, slots=True)
class Tuning:
    """The fastest settings of those measured. `n_threads` is for decoding, `n_threads_batch` for prompts."""

    flash_attn: FlashAttention
    n_threads: int
    n_threads_batch: int


def tuning_path(model_path: str | Path, cpu: str) -> Path:
    """Where the tuning of a model file on this CPU, with this release of the library, is kept."""
    size = Path(model_path).stat().st_size if Path(model_path).exists() else 0
    release = metadata.version("llama-cpp-python")
    key = f"{Path(model_path).name}|{size}|{cpu}|{release}"
    folder = os.environ.get("EDGESERVE_TUNING_DIR") or user_cache_path("edgeserve") / "tuning"
    return Path(folder) / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"


def read_tuning(path: Path) -> Tuning | None:
    """What is kept there; None when nothing is, or nothing that can be used."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        kept = json.loads(path.read_text(encoding="utf-8"))["tuning"]
        tuning = Tuning(kept["flash_attn"], int(kept["n_threads"]), int(kept["n_threads_batch"]))
        if tuning.flash_attn in ("on", "off") and tuning.n_threads > 0 and tuning.n_threads_batch > 0:
            return tuning
    return None


def write_tuning(path: Path, tuning: Tuning, table: list[dict[str, object]]) -> None:
    """Keep a tuning with the measurements it rests on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({"tuning": asdict(tuning), "table": table}, indent=1), encoding="utf-8")
    partial.replace(path)
