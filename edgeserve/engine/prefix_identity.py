"""What a saved state fits into: the model's file, the build of llama.cpp, and the settings that decide what a
state looks like.

Owns what counts as the same. A file is known by name, size and time of its last change: hashing gigabytes at
every start would cost more than a prefix saves.
"""

from __future__ import annotations

import hashlib
import json
from importlib import metadata
from pathlib import Path

from edgeserve import ggml
from edgeserve.config import EngineConfig
from edgeserve.gguf import SPLIT_NAME
from edgeserve.llama import Model


def prefix_identity(model: Model, config: EngineConfig) -> str:
    """A digest (hexadecimal) that is the same only where a state may be loaded. `config` must be resolved."""
    parts = {
        "files": [_file(path) for path in _files(Path(model.path))],
        "model": [model.description, model.n_params, model.size_bytes],
        "build": [metadata.version("llama-cpp-python"), ggml.commit(), ggml.system_info()],
        # llama.cpp writes one part for each stream of cells, and V transposed without flash attention.
        "streams": 1 if config.kv_unified else config.n_seq_max,
        "cells": [config.type_k, config.type_v, config.flash_attn, config.swa_full],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _files(path: Path) -> list[Path]:
    split = SPLIT_NAME.match(path.name)
    if split is None:
        return [path]
    prefix, count = split["prefix"], split["count"]
    return [path.with_name(f"{prefix}-{index:05d}-of-{count}.gguf") for index in range(1, int(count) + 1)]


def _file(path: Path) -> tuple[str, int, int]:
    about = path.stat()
    return path.name, about.st_size, about.st_mtime_ns
