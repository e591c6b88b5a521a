"""What was measured for a model on this machine, kept for later starts: which settings are fastest here.

Owns the file that remembers it and the key under which it is found: the model file, the build of llama.cpp,
the processor with the threads that are allowed, and the settings that change what a step costs. Measuring is
tune.py's work.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edgeserve.config import EngineConfig, FlashAttention
from edgeserve.folders import cache_dir
from edgeserve.host import cpu_budget, processor_name

_FORMAT = 3
_HEAD_BYTES = 1 << 20
_SETTINGS = ("type_k", "type_v", "offload_kqv", "use_extra_bufts", "n_gpu_layers", "n_cpu_moe")
"""Settings that make another tuning: they change what a step costs."""


@dataclass(frozen=True, slots=True)
class StepSample:
    """A measured step: its decodes, its prompt tokens, its seconds."""

    num_decodes: int
    num_prefill: int
    duration_s: float


@dataclass(frozen=True, slots=True)
class Tuning:
    """The fastest settings of those measured. `n_threads` is for decoding, `n_threads_batch` for prompts;
    `steps` are what they cost, for the scheduler's first guesses."""

    flash_attn: FlashAttention
    n_threads: int
    n_threads_batch: int
    kv_unified: bool = False
    steps: tuple[StepSample, ...] = ()


@dataclass(frozen=True, slots=True)
class Tunings:
    """The fastest settings for who runs one sequence, and for who serves several."""

    alone: Tuning
    beside: Tuning

    def of(self, n_seq_max: int) -> Tuning:
        return self.alone if n_seq_max == 1 else self.beside


def tuning_path(model_path: str | Path, config: EngineConfig) -> Path:
    """Where the tuning of a model file on this machine, with this build and these settings, is kept.
    `config` is what was asked for, before a plan filled it in."""
    parts = [
        _FORMAT,
        _identity(Path(model_path)),
        processor_name(),
        cpu_budget().n_threads,
        _build(),
        *(getattr(config, name) for name in _SETTINGS),
    ]
    key = "|".join(map(str, parts))
    return _folder() / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"


def _folder() -> Path:
    chosen = os.environ.get("EDGESERVE_TUNING_DIR")
    return Path(chosen) if chosen else cache_dir() / "tuning"


def _identity(path: Path) -> str:
    """A file's size and the hash of its beginning, which holds its header: it may be moved and copied."""
    with suppress(OSError), path.open("rb") as file:
        return f"{path.stat().st_size} {hashlib.sha256(file.read(_HEAD_BYTES)).hexdigest()}"
    return ""


def _build() -> str:
    """The libraries of the installed runtime by name and size, without loading them."""
    spec = importlib.util.find_spec("llama_cpp")
    places = (spec.submodule_search_locations if spec else None) or ()
    folders = [Path(place) / "lib" for place in places]
    files = [file for folder in folders if folder.is_dir() for file in folder.iterdir() if file.is_file()]
    return " ".join(sorted(f"{file.name}:{file.stat().st_size}" for file in files))


def read_tunings(path: Path) -> Tunings | None:
    """What is kept there; None when nothing is, or nothing that can be used."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        kept = json.loads(path.read_text(encoding="utf-8"))
        return Tunings(_tuning(kept["alone"]), _tuning(kept["beside"]))
    return None


def _tuning(kept: dict[str, Any]) -> Tuning:
    """Raises ValueError, TypeError or KeyError for what is no tuning."""
    steps = tuple(StepSample(**step) for step in kept["steps"])
    n_threads, n_threads_batch = int(kept["n_threads"]), int(kept["n_threads_batch"])
    tuning = Tuning(kept["flash_attn"], n_threads, n_threads_batch, kept["kv_unified"] is True, steps)
    if tuning.flash_attn not in ("on", "off", "auto") or n_threads < 1 or n_threads_batch < 1:
        raise ValueError("no tuning")
    return tuning


def write_tunings(path: Path, tunings: Tunings, table: list[dict[str, object]], reasons: list[str]) -> None:
    """Keep tunings with the measurements they rest on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    document = {**asdict(tunings), "reasons": reasons, "table": table}
    partial.write_text(json.dumps(document, indent=1), encoding="utf-8")
    partial.replace(path)
