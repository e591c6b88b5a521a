"""What tests of models share: a home of their own, a fake hub, files in caches, a small wheel."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import gguf_builder as build
import pytest
from file_server import FileServer, Served

from edgeserve.model_list import ModelEntry

MODEL = build.model_bytes()
SHA256 = hashlib.sha256(MODEL).hexdigest()
COMMIT = "a" * 40


def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of its own, so that no test sees or touches the models of whoever runs it."""
    folder = tmp_path / "home"
    folder.mkdir()
    for variable in list(os.environ):
        if variable.startswith(
            ("HF_", "HUGGINGFACE", "XDG_", "LLAMA_", "PIP_", "UV_", "OLLAMA", "EDGESERVE")
        ):
            monkeypatch.delenv(variable)
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("EDGESERVE_TUNE", "off")
    monkeypatch.setenv("EDGESERVE_MODELS_DIR", str(folder / "own"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    return folder


class FakeHub:
    """As much of the hub as its client library asks for."""

    def __init__(self, server: FileServer) -> None:
        self.server = server

    def repo(self, name: str, files: dict[str, bytes], *, lies: dict[str, Any] | None = None) -> None:
        siblings = []
        for file, body in files.items():
            sha256 = hashlib.sha256(body).hexdigest()
            lfs = {"size": len(body), "sha256": sha256, "pointerSize": 130}
            siblings.append({"rfilename": file, "size": len(body), "lfs": lfs} | (lies or {}))
            headers = {
                "X-Repo-Commit": COMMIT,
                "X-Linked-Size": str(len(body)),
                "X-Linked-Etag": f'"{sha256}"',
            }
            self.server.paths[f"/{name}/resolve/main/{file}"] = Served(
                body, etag=f'"{sha256}"', headers=headers
            )
        info = {"id": name, "sha": COMMIT, "siblings": siblings, "tags": [], "downloads": 0, "private": False}
        body = json.dumps(info).encode()
        self.server.paths[f"/api/models/{name}"] = Served(body, headers={"Content-Type": "application/json"})


def write(path: Path, data: bytes = MODEL) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def cached(home: Path, repo: str, name: str, data: bytes = MODEL, commit: str = COMMIT) -> Path:
    """A file in the hub's cache as the hub's library lays it out: a blob and a link to it."""
    folder = home / ".cache/huggingface/hub" / f"models--{repo.replace('/', '--')}"
    blob = write(folder / "blobs" / hashlib.sha256(data + name.encode()).hexdigest(), data)
    pointer = folder / "snapshots" / commit / name
    pointer.parent.mkdir(parents=True, exist_ok=True)
    pointer.symlink_to(os.path.relpath(blob, pointer.parent))
    return pointer


def entry(**changes: Any) -> ModelEntry:
    fields = {"name": "tiny", "source": "hf:org/repo", "file": "m-Q4_K_M.gguf", "n_bytes": len(MODEL)}
    return ModelEntry(**(fields | {"sha256": SHA256, "licence": "MIT", "note": ""} | changes))


def ollama(home: Path, manifest: str, digest: str = "sha256:" + "c" * 64) -> Path:
    layers = [
        {"mediaType": "application/vnd.ollama.image.template", "digest": "sha256:" + "d" * 64},
        {"mediaType": "application/vnd.ollama.image.model", "digest": digest},
    ]
    folder = home / ".ollama/models"
    write(folder / "manifests" / manifest, json.dumps({"layers": layers}).encode())
    return write(folder / "blobs" / ("sha256-" + "c" * 64))
