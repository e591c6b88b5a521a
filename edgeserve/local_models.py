"""GGUF models that are on this machine already, downloaded by whatever program.

Owns where other programs keep their models and how to name one. Reads only: nothing here creates, moves or
deletes a file. Knows nothing of lists or downloads, and opens no model file.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from edgeserve import hub
from edgeserve.folders import data_dir
from edgeserve.gguf import SPLIT_NAME
from edgeserve.gguf_checks import is_model_file_name

MAX_FILES: Final = 20_000
MAX_MANIFEST_BYTES: Final = 1 << 20
_OLLAMA_MODEL_LAYER: Final = "application/vnd.ollama.image.model"
_DIGEST: Final = re.compile(r"sha256[:-]([0-9a-f]{64})")
_OLLAMA_PART: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class LocalModel:
    """A model on this machine. `reference` is what to give edgeserve for it; `n_bytes` counts all parts."""

    reference: str
    path: Path
    n_bytes: int
    source: str
    num_parts: int = 1


def models_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """edgeserve's own folder: EDGESERVE_MODELS_DIR, or `models` in the user's data folder."""
    chosen = environ.get("EDGESERVE_MODELS_DIR")
    return Path(chosen).expanduser() if chosen else data_dir(environ) / "models"


def find_local_models(environ: Mapping[str, str] = os.environ) -> list[LocalModel]:
    """All models found, each file once, by source and reference. Unreadable folders are skipped."""
    found = [
        *_in_folder(models_dir(environ), "edgeserve"),
        *_in_hub_cache(hub.cache_dir(environ)),
        *(model for folder in _lm_studio_folders() for model in _in_folder(folder, "LM Studio")),
        *(model for folder in _llama_cpp_folders() for model in _in_folder(folder, "llama.cpp")),
        *(model for folder in ollama_folders(environ) for model in _in_ollama(folder)),
    ]
    unique: dict[Path, LocalModel] = {}
    for model in found:
        unique.setdefault(model.path.resolve(), model)
    return sorted(unique.values(), key=lambda model: (model.source, model.reference))


def _lm_studio_folders() -> list[Path]:
    return [Path.home() / ".lmstudio" / "models", Path.home() / ".cache" / "lm-studio" / "models"]


def lm_studio_files(repo: str) -> dict[str, Path]:
    """Model files that LM Studio downloaded from the hub repository `repo`, by name."""
    return {path.name: path for folder in _lm_studio_folders() for path in _gguf_files(folder / repo)}


def _llama_cpp_folders() -> list[Path]:
    if sys.platform == "darwin":
        return [Path.home() / "Library" / "Caches" / "llama.cpp"]
    return [Path.home() / ".cache" / "llama.cpp"]


def ollama_folders(environ: Mapping[str, str] = os.environ) -> list[Path]:
    if environ.get("OLLAMA_MODELS"):
        return [Path(environ["OLLAMA_MODELS"]).expanduser()]
    # The second is where the Linux service keeps its models; it is often not readable for others.
    return [Path.home() / ".ollama" / "models", Path("/usr/share/ollama/.ollama/models")]


def _gguf_files(folder: Path) -> list[Path]:
    """Model files below `folder`, sorted; links to folders are not followed, so it cannot go round."""
    found: list[Path] = []
    for root, _, names in os.walk(folder, onerror=None, followlinks=False):
        found += [Path(root) / name for name in names if is_model_file_name(name)]
        if len(found) > MAX_FILES:
            break
    return sorted(found)


def _in_folder(folder: Path, source: str) -> list[LocalModel]:
    return _models(_gguf_files(folder), source)


def all_parts(path: Path) -> list[Path]:
    """The files of the model that `path` is, or is a part of."""
    match = SPLIT_NAME.match(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    return [path.with_name(f"{match['prefix']}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)]


def _models(
    paths: Iterable[Path], source: str, references: Mapping[Path, str] | None = None
) -> list[LocalModel]:
    """One model a file; split ones by their first part with the size of all, if all are there."""
    models: list[LocalModel] = []
    for path in paths:
        parts = all_parts(path)
        size = _total_bytes(parts)
        if path == parts[0] and size is not None:
            models.append(LocalModel((references or {}).get(path, str(path)), path, size, source, len(parts)))
    return models


def _total_bytes(parts: list[Path]) -> int | None:
    """Bytes of all parts; None if one is missing or cannot be looked at."""
    try:
        return sum(path.stat().st_size for path in parts)
    except OSError:
        return None


def _in_hub_cache(folder: Path) -> list[LocalModel]:
    """One model a repository file, from the newest snapshot that has it, named hf:ORG/REPO/FILE."""
    models: list[LocalModel] = []
    for repo_folder in sorted(folder.glob("models--*--*")):
        repo = repo_folder.name.removeprefix("models--").replace("--", "/")
        if not hub.is_repo_name(repo):
            continue
        files = {
            name: path for name, path in hub.cached_files_in(repo_folder).items() if is_model_file_name(name)
        }
        references = {path: f"hf:{repo}/{name}" for name, path in files.items()}
        models += _models(sorted(files.values()), "hub cache", references)
    return models


def _in_ollama(folder: Path) -> list[LocalModel]:
    manifests = folder / "manifests"
    models: list[LocalModel] = []
    for root, _, names in os.walk(manifests, onerror=None, followlinks=False):
        for name in names:
            path = ollama_blob(folder, Path(root) / name)
            size = _total_bytes([path]) if path else None
            if path and size is not None:
                parts = (Path(root) / name).relative_to(manifests).parts
                models.append(LocalModel(_ollama_reference(parts), path, size, "Ollama"))
    return models


def _ollama_reference(parts: tuple[str, ...]) -> str:
    *where, name, tag = parts
    short = where == ["registry.ollama.ai", "library"]
    return f"ollama:{name if short else '/'.join([*where, name])}:{tag}"


def ollama_model(name: str, environ: Mapping[str, str] = os.environ) -> Path | None:
    """The model blob of `name[:tag]` (or `host/namespace/name[:tag]`), if Ollama has it here."""
    path, _, tag = name.partition(":")
    parts = path.split("/")
    where = {1: ["registry.ollama.ai", "library"], 2: ["registry.ollama.ai"], 3: []}.get(len(parts))
    if where is None or not all(_OLLAMA_PART.fullmatch(part) for part in [*parts, tag or "latest"]):
        return None
    for folder in ollama_folders(environ):
        blob = ollama_blob(folder, folder.joinpath("manifests", *where, *parts, tag or "latest"))
        if blob and blob.is_file():
            return blob
    return None


def ollama_blob(folder: Path, manifest: Path) -> Path | None:
    """Path of the model layer that a manifest names: 64 hex digits, which cannot lead elsewhere."""
    try:
        if manifest.stat().st_size > MAX_MANIFEST_BYTES:
            return None
        layers = json.loads(manifest.read_bytes())["layers"]
        digests = [layer["digest"] for layer in layers if layer["mediaType"] == _OLLAMA_MODEL_LAYER]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    match = _DIGEST.fullmatch(digests[0]) if digests and isinstance(digests[0], str) else None
    return folder / "blobs" / f"sha256-{match[1]}" if match else None
