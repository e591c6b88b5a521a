from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf_builder as build
import pytest
from gguf_builder import U16, Typed
from model_files import MODEL, cached, ollama, own_home, write

from edgeserve import hub
from edgeserve.errors import ModelNotFoundError
from edgeserve.local_models import find_local_models
from edgeserve.models import locate, resolve


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return own_home(tmp_path, monkeypatch)


def test_the_cache_comes_before_the_network(home: Path) -> None:
    path = cached(home, "org/repo", "m-Q8_0.gguf")
    assert locate("org/repo") == path
    assert locate("hf:org/repo:q8_0", offline=True) == path
    assert locate("hf:org/repo/m-Q8_0.gguf") == path
    with pytest.raises(ModelNotFoundError, match="--offline"):
        locate("org/repo:Q2_K", offline=True)


def test_offline_by_the_hubs_own_variable(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelNotFoundError, match="not on this machine"):
        locate("org/repo")
    with pytest.raises(ModelNotFoundError, match="not on this machine"):
        locate("qwen3-4b")


def test_split_models_in_the_cache(home: Path) -> None:
    names = [f"m-Q4_K_M-0000{i}-of-00002.gguf" for i in (1, 2)]
    bodies = []
    for index in range(2):
        metadata = {"split.no": Typed(U16, index), "split.count": Typed(U16, 2)}
        metadata |= build.TINY_METADATA if index == 0 else {}
        bodies.append(build.model_bytes(metadata, [(f"w{index}", (32,), 0, 128)]))
    first = cached(home, "org/repo", names[0], bodies[0])
    assert hub.cached_model("org/repo", None) is None
    second = cached(home, "org/repo", names[1], bodies[1], commit="b" * 40)
    assert hub.cached_model("org/repo", None) is None
    second.unlink()
    cached(home, "org/repo", names[1], bodies[1])
    assert locate("org/repo") == first
    assert locate("org/repo:Q4_K_M") == first


def test_broken_links_in_the_cache_are_no_models(home: Path) -> None:
    path = cached(home, "org/repo", "m-Q8_0.gguf")
    path.resolve().unlink()
    assert hub.cached_files("org/repo") == {}
    assert find_local_models() == []


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "HOME/.cache/huggingface/hub"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/huggingface/hub"),
        ({"XDG_CACHE_HOME": "/x", "HF_HOME": "/h"}, "/h/hub"),
        ({"HF_HOME": "/h", "HUGGINGFACE_HUB_CACHE": "/g"}, "/g"),
        ({"HUGGINGFACE_HUB_CACHE": "/g", "HF_HUB_CACHE": "/c"}, "/c"),
        ({"HF_HUB_CACHE": "/c", "LLAMA_CACHE": "/l"}, "/l"),
    ],
)
def test_where_the_cache_is(home: Path, variables: dict[str, str], expected: str) -> None:
    assert hub.cache_dir(variables) == Path(expected.replace("HOME", str(home)))


def test_ollama(home: Path) -> None:
    blob = ollama(home, "registry.ollama.ai/library/smollm2/latest")
    ollama(home, "registry.ollama.ai/someone/tuned/q4")
    ollama(home, "hf.co/org/repo/Q4_K_M")
    assert locate("ollama:smollm2") == blob
    assert locate("ollama:smollm2:latest") == blob
    assert locate("ollama:someone/tuned:q4") == blob
    assert locate("ollama:hf.co/org/repo:Q4_K_M") == blob
    with pytest.raises(ModelNotFoundError, match="Ollama has no smollm2:1b"):
        locate("ollama:smollm2:1b")


@pytest.mark.parametrize("digest", ["sha256:../../../etc/passwd", "sha256:" + "c" * 63, "c" * 64, 7, None])
def test_ollama_digests_cannot_lead_elsewhere(home: Path, digest: Any) -> None:
    ollama(home, "registry.ollama.ai/library/bad/latest", digest)
    with pytest.raises(ModelNotFoundError):
        locate("ollama:bad")


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"layers": 3}', b'{"layers": [3]}', b"[" * 100_000])
def test_broken_ollama_manifests(home: Path, body: bytes) -> None:
    write(home / ".ollama/models/manifests/registry.ollama.ai/library/bad/latest", body)
    with pytest.raises(ModelNotFoundError):
        locate("ollama:bad")
    assert find_local_models() == []


def test_what_other_programs_have(home: Path) -> None:
    cached(home, "org/repo", "sub/m-Q8_0.gguf")
    cached(home, "org/repo", "mmproj-m.gguf")
    studio = write(home / ".lmstudio/models/maker/model-GGUF/model-Q4_K_M.gguf")
    old = write(home / ".cache/llama.cpp/org_repo_old.gguf")
    own = write(home / "own/own.gguf")
    blob = ollama(home, "registry.ollama.ai/library/smollm2/latest")
    for index in (1, 2):
        write(home / f".lmstudio/models/maker/big/b-0000{index}-of-00002.gguf")
    write(home / ".lmstudio/models/maker/half/h-00001-of-00002.gguf")
    write(home / ".lmstudio/models/maker/half/still.gguf.partial")
    found = {model.reference: model for model in find_local_models()}
    big = str(home / ".lmstudio/models/maker/big/b-00001-of-00002.gguf")
    assert set(found) == {
        "hf:org/repo/sub/m-Q8_0.gguf",
        str(studio),
        str(old),
        str(own),
        "ollama:smollm2:latest",
        big,
    }
    assert found[big].n_bytes == 2 * len(MODEL)
    assert found[big].num_parts == 2
    assert found["ollama:smollm2:latest"].path == blob
    for reference, model in found.items():
        assert resolve(reference, offline=True) == model.path
    assert locate("maker/model-GGUF") == studio


def test_finding_changes_nothing(home: Path) -> None:
    cached(home, "org/repo", "m-Q8_0.gguf")
    ollama(home, "registry.ollama.ai/library/smollm2/latest")
    before = sorted((str(p), p.lstat().st_mtime_ns) for p in home.rglob("*"))
    assert len(find_local_models()) == 2
    assert sorted((str(p), p.lstat().st_mtime_ns) for p in home.rglob("*")) == before
