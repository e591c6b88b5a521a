from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import gguf_builder as build
import pytest
from file_server import FileServer, Served, file_server
from gguf_builder import U16, Typed

from edgeserve import gguf_remote
from edgeserve.errors import DownloadError, GGUFError
from edgeserve.gguf import check_loadable, read_header, write_header_copy
from edgeserve.gguf_remote import read_remote_header

TENSORS = [("w", (1024, 4096), 0, 4 * 1024 * 4096)]
SMALL_HEADER = build.header_bytes(tensors=TENSORS)
SMALL = SMALL_HEADER + b"\x5a" * TENSORS[0][3]
LONG_METADATA = build.TINY_METADATA | {"tokenizer.ggml.tokens": ["token" * 6] * 60_000}
LONG = build.header_bytes(LONG_METADATA, TENSORS) + b"\x5a" * TENSORS[0][3]


@pytest.fixture
def server() -> Iterator[FileServer]:
    with file_server() as running:
        yield running


def test_reads_only_the_header(server: FileServer, tmp_path: Path) -> None:
    server.paths["/org/model.gguf"] = Served(SMALL)
    header = read_remote_header(server.url + "/org/model.gguf", folder=tmp_path)
    assert header.architecture == "llama"
    assert header.tensors[0].n_bytes == TENSORS[0][3]
    assert header.file_bytes == header.total_bytes == len(SMALL)
    assert [asked["range"] for asked in server.asked("/org/model.gguf")] == ["bytes=0-1048575"]
    assert not header.is_local
    with pytest.raises(GGUFError, match="Only the header"):
        check_loadable(header)


def test_a_long_header_comes_in_growing_steps(server: FileServer, tmp_path: Path) -> None:
    server.paths["/m.gguf"] = Served(LONG)
    header = read_remote_header(server.url + "/m.gguf", folder=tmp_path)
    assert header.n_vocab == 60_000
    ranges = [asked["range"] for asked in server.asked("/m.gguf")]
    assert ranges == ["bytes=0-1048575", "bytes=1048576-4194303"]


def test_a_server_that_ignores_ranges(server: FileServer, tmp_path: Path) -> None:
    server.paths["/m.gguf"] = Served(LONG, ranges=False)
    header = read_remote_header(server.url + "/m.gguf", folder=tmp_path)
    assert header.n_vocab == 60_000
    assert header.file_bytes == len(LONG)


def test_the_cache_saves_the_rest_and_works_offline(server: FileServer, tmp_path: Path) -> None:
    url = server.url + "/m.gguf"
    with pytest.raises(DownloadError, match="not in the cache"):
        read_remote_header(url, folder=tmp_path, offline=True)
    server.paths["/m.gguf"] = Served(LONG)
    first = read_remote_header(url, folder=tmp_path)
    server.requests.clear()
    assert read_remote_header(url, folder=tmp_path) == first
    assert len(server.asked("/m.gguf")) == 1
    server.requests.clear()
    assert read_remote_header(url, folder=tmp_path, offline=True) == first
    assert server.requests == []
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < first.data_offset + 1000


def test_a_changed_file_is_read_again(server: FileServer, tmp_path: Path) -> None:
    url = server.url + "/m.gguf"
    server.paths["/m.gguf"] = Served(SMALL)
    read_remote_header(url, folder=tmp_path)
    renamed = build.TINY_METADATA | {"general.name": "Tidy"}
    server.paths["/m.gguf"] = Served(build.model_bytes(renamed, TENSORS), etag='"v2"')
    assert read_remote_header(url, folder=tmp_path).name == "Tidy"
    assert read_remote_header(url, folder=tmp_path, offline=True).name == "Tidy"


@pytest.mark.parametrize("damage", ["cut", "notes", "other"])
def test_a_damaged_cache_is_not_believed(server: FileServer, tmp_path: Path, damage: str) -> None:
    url = server.url + "/m.gguf"
    server.paths["/m.gguf"] = Served(SMALL)
    first = read_remote_header(url, folder=tmp_path)
    (kept,) = tmp_path.glob("*.gguf-header")
    if damage == "notes":
        kept.with_suffix(".json").write_text("[]")
    else:
        kept.write_bytes(kept.read_bytes()[:100] if damage == "cut" else b"nonsense" * 99)
    assert read_remote_header(url, folder=tmp_path) == first
    assert read_remote_header(url, folder=tmp_path, offline=True) == first


def test_the_cache_does_not_grow_for_ever(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_remote, "MAX_KEPT", 2)
    for index in range(4):
        server.paths[f"/{index}.gguf"] = Served(SMALL)
        read_remote_header(f"{server.url}/{index}.gguf", folder=tmp_path)
    assert len(list(tmp_path.iterdir())) == 4


def test_split_models(server: FileServer, tmp_path: Path) -> None:
    for index in range(2):
        metadata = {"split.no": Typed(U16, index), "split.count": Typed(U16, 2)}
        metadata |= build.TINY_METADATA if index == 0 else {}
        body = build.model_bytes(metadata, [(f"w{index}", (32,), 0, 128)])
        server.paths[f"/a%20b/m-0000{index + 1}-of-00002.gguf"] = Served(body)
    header = read_remote_header(server.url + "/a%20b/m-00002-of-00002.gguf?download=true", folder=tmp_path)
    assert [tensor.name for tensor in header.tensors] == ["w0", "w1"]
    assert header.architecture == "llama"
    del server.paths["/a%20b/m-00001-of-00002.gguf"]
    with pytest.raises(DownloadError, match="nothing at"):
        read_remote_header(server.url + "/a%20b/m-00002-of-00002.gguf", folder=tmp_path)


def test_header_copy_of_a_remote_model(server: FileServer, tmp_path: Path) -> None:
    server.paths["/m.gguf"] = Served(SMALL)
    header = read_remote_header(server.url + "/m.gguf", folder=tmp_path / "cache")
    copy = write_header_copy(header, tmp_path / "copy.gguf")
    assert copy.stat().st_size == len(SMALL)
    assert copy.stat().st_blocks * 512 < 1 << 20
    assert read_header(copy).tensors == header.tensors


def test_foreign_and_broken_files(server: FileServer, tmp_path: Path) -> None:
    server.paths["/page.gguf"] = Served(b"<!doctype html><html>log in</html>")
    with pytest.raises(GGUFError, match="web page"):
        read_remote_header(server.url + "/page.gguf", folder=tmp_path)
    server.paths["/cut.gguf"] = Served(SMALL[:500])
    with pytest.raises(GGUFError, match=r"cut.gguf: .*past the end"):
        read_remote_header(server.url + "/cut.gguf", folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_header_without_end_is_not_fetched_for_ever(server: FileServer, tmp_path: Path) -> None:
    body = build.header_bytes({"general.license": "x" * 10_000}, [], num_keys=4096)
    server.paths["/m.gguf"] = Served(body[:10_000] + b"\xff" * 40_000_000)
    with pytest.raises(GGUFError):
        read_remote_header(server.url + "/m.gguf", folder=tmp_path)


@pytest.mark.parametrize(
    ("status", "says"), [(404, "nothing at"), (401, "needs a login"), (403, "login"), (500, "500")]
)
def test_other_answers(server: FileServer, tmp_path: Path, status: int, says: str) -> None:
    server.paths["/m.gguf"] = Served(b"x", status=status)
    with pytest.raises(DownloadError, match=says):
        read_remote_header(server.url + "/m.gguf", folder=tmp_path)


def test_a_file_that_changes_between_two_steps(server: FileServer, tmp_path: Path) -> None:
    def change(served: Served) -> None:
        if len(server.requests) > 1:
            served.etag = '"v2"'

    server.paths["/m.gguf"] = Served(LONG, on_request=change)
    with pytest.raises(DownloadError, match="changed while it was read"):
        read_remote_header(server.url + "/m.gguf", folder=tmp_path)


def test_a_connection_that_breaks(server: FileServer, tmp_path: Path) -> None:
    server.paths["/m.gguf"] = Served(LONG, cuts=[1000])
    with pytest.raises(DownloadError):
        read_remote_header(server.url + "/m.gguf", folder=tmp_path)


def test_tokens_go_to_the_named_host_only(server: FileServer, tmp_path: Path) -> None:
    server.paths["/m.gguf"] = Served(SMALL)
    url = server.url + "/m.gguf"
    read_remote_header(url, folder=tmp_path, token="secret")
    assert server.asked("/m.gguf")[0]["authorization"] == "Bearer secret"
    server.requests.clear()
    read_remote_header(url, folder=tmp_path, token="secret", trusted="http://127.0.0.1:1")
    assert "authorization" not in server.asked("/m.gguf")[0]


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "http://example.org/m.gguf", "https://10.0.0.1/m.gguf", "m.gguf"]
)
def test_addresses_that_are_not_asked(tmp_path: Path, url: str) -> None:
    with pytest.raises(DownloadError):
        read_remote_header(url, folder=tmp_path)
