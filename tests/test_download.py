from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from file_server import FileServer, Served, file_server

from edgeserve import download
from edgeserve.download import FileDownload, Meter, Progress, check_space, inside, verify
from edgeserve.errors import DownloadError

BODY = random.Random(1).randbytes(300_000)
SHA256 = hashlib.sha256(BODY).hexdigest()


@pytest.fixture
def server() -> Iterator[FileServer]:
    with file_server() as running:
        yield running


@pytest.fixture
def dest(tmp_path: Path) -> Path:
    return tmp_path / "models" / "model.gguf"


def fetch(server: FileServer, dest: Path, reports: list[Progress] | None = None, **expected: object) -> Path:
    options: dict = {"n_bytes": len(BODY), "sha256": SHA256} | expected
    report = reports.append if reports is not None else download.no_report
    return FileDownload(server.url + "/model", dest, report=report, pause_s=0.01, **options).run()


def left_over(dest: Path) -> list[str]:
    return sorted(path.name for path in dest.parent.iterdir() if path != dest)


# -- whole downloads ----------------------------------------------------------------------------------------


def test_downloads_and_leaves_nothing_else(server: FileServer, dest: Path) -> None:
    server.paths["/model"] = Served(BODY)
    reports: list[Progress] = []
    assert fetch(server, dest, reports) == dest
    assert dest.read_bytes() == BODY
    assert left_over(dest) == []
    assert [r.phase for r in reports][:2] == ["connect", "download"]
    assert reports[0].total_bytes == len(BODY)
    assert reports[-1].phase == "verify"


def test_reports_before_the_server_answers(server: FileServer, dest: Path) -> None:
    reports: list[Progress] = []
    seen: list[int] = []
    server.paths["/model"] = Served(BODY, on_request=lambda served: seen.append(len(reports)))
    fetch(server, dest, reports)
    assert seen == [1]


@pytest.mark.parametrize("body", [BODY[:-1] + b"x", BODY[::-1]])
def test_a_wrong_hash_is_never_a_model(server: FileServer, dest: Path, body: bytes) -> None:
    server.paths["/model"] = Served(body)
    with pytest.raises(DownloadError, match="SHA-256"):
        fetch(server, dest)
    assert list(dest.parent.iterdir()) == []


def test_a_wrong_size_is_never_a_model(server: FileServer, dest: Path) -> None:
    server.paths["/model"] = Served(BODY[:-1])
    with pytest.raises(DownloadError, match="299,999 bytes instead of 300,000"):
        fetch(server, dest)
    assert list(dest.parent.iterdir()) == []


def test_more_bytes_than_promised_are_not_stored(server: FileServer, dest: Path) -> None:
    server.paths["/model"] = Served(BODY * 20)
    with pytest.raises(DownloadError, match="sends more than 300,000 bytes"):
        fetch(server, dest)
    assert sum(path.stat().st_size for path in dest.parent.iterdir()) == 0


def test_unknown_size_and_hash(server: FileServer, dest: Path) -> None:
    server.paths["/model"] = Served(BODY)
    fetch(server, dest, n_bytes=None, sha256=None)
    assert dest.read_bytes() == BODY


@pytest.mark.parametrize("status", [404, 403, 500, 204])
def test_other_answers_are_errors(server: FileServer, dest: Path, status: int) -> None:
    server.paths["/model"] = Served(b"" if status == 204 else b"sorry", status=status)
    with pytest.raises(DownloadError, match=f"status {status}"):
        fetch(server, dest)
    assert not dest.exists()


def test_nobody_listens(dest: Path) -> None:
    with pytest.raises(DownloadError, match=r"127\.0\.0\.1 cannot be reached") as caught:
        FileDownload("http://127.0.0.1:9/model", dest, pause_s=0).run()
    assert "offline" in caught.value.hint


def test_two_at_once(server: FileServer, dest: Path) -> None:
    server.paths["/model"] = Served(BODY)
    dest.parent.mkdir()
    with dest.with_name("model.gguf.partial").open("ab") as other:
        download._lock(other, "model.gguf")
        with pytest.raises(DownloadError, match="another process"):
            fetch(server, dest)
    fetch(server, dest)


def test_no_space(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match="GB are free") as caught:
        check_space(tmp_path, 1 << 60)
    assert "EDGESERVE_MODELS_DIR" in caught.value.hint


def test_no_space_is_noticed_before_anything_is_stored(server: FileServer, dest: Path) -> None:
    server.paths["/model"] = Served(BODY)
    with pytest.raises(DownloadError, match="are needed"):
        fetch(server, dest, n_bytes=1 << 60)
    assert dest.with_name("model.gguf.partial").stat().st_size == 0


# -- resuming -----------------------------------------------------------------------------------------------


def test_cut_at_half_goes_on_from_there(server: FileServer, dest: Path) -> None:
    server.paths["/model"] = Served(BODY, cuts=[150_000])
    fetch(server, dest)
    assert dest.read_bytes() == BODY
    first, second = server.asked("/model")
    assert "range" not in first
    assert second["range"] == "bytes=150000-"
    assert second["if-range"] == '"v1"'
    assert left_over(dest) == []


def interrupted(server: FileServer, dest: Path) -> None:
    """A run that gave up half-way, as after a lost network."""
    server.paths["/model"] = Served(BODY, cuts=[100_000, 20_000, 20_000, 10_000])
    with pytest.raises(DownloadError, match="broke off 4 times"):
        fetch(server, dest)
    assert not dest.exists()
    assert dest.with_name("model.gguf.partial").stat().st_size == 150_000
    server.requests.clear()


def test_a_later_run_goes_on(server: FileServer, dest: Path) -> None:
    interrupted(server, dest)
    reports: list[Progress] = []
    fetch(server, dest, reports)
    assert dest.read_bytes() == BODY
    assert [headers["range"] for headers in server.asked("/model")] == ["bytes=150000-"]
    assert next(r.done_bytes for r in reports if r.phase == "download") == 150_000


def test_server_that_ignores_ranges(server: FileServer, dest: Path) -> None:
    interrupted(server, dest)
    server.paths["/model"] = Served(BODY, ranges=False)
    fetch(server, dest)
    assert dest.read_bytes() == BODY


def test_etag_changed(server: FileServer, dest: Path) -> None:
    interrupted(server, dest)
    new = BODY[::-1]
    server.paths["/model"] = Served(new, etag='"v2"')
    fetch(server, dest, sha256=hashlib.sha256(new).hexdigest())
    assert dest.read_bytes() == new


def test_etag_changed_and_if_range_ignored(server: FileServer, dest: Path) -> None:
    interrupted(server, dest)
    new = BODY[::-1]

    def forget_if_range(served: Served) -> None:
        server.requests[-1][2].pop("if-range", None)

    server.paths["/model"] = Served(new, etag='"v2"', on_request=forget_if_range)
    fetch(server, dest, sha256=hashlib.sha256(new).hexdigest())
    assert dest.read_bytes() == new


def test_416_starts_over(server: FileServer, dest: Path) -> None:
    interrupted(server, dest)
    server.paths["/model"] = Served(BODY, range_status=416)
    fetch(server, dest)
    assert dest.read_bytes() == BODY


def test_a_range_that_starts_elsewhere_starts_over(server: FileServer, dest: Path) -> None:
    interrupted(server, dest)

    def honest_next_time(served: Served) -> None:
        if len(server.requests) > 1:
            served.range_lie = 0

    server.paths["/model"] = Served(BODY, range_lie=7, on_request=honest_next_time)
    fetch(server, dest)
    assert dest.read_bytes() == BODY


@pytest.mark.parametrize("etag", [None, 'W/"v1"'])
def test_without_a_strong_etag_only_a_hash_allows_to_go_on(
    server: FileServer, dest: Path, etag: str | None
) -> None:
    server.paths["/model"] = Served(BODY, etag=etag, cuts=[150_000])
    fetch(server, dest, sha256=None)
    assert dest.read_bytes() == BODY
    assert all("range" not in headers for headers in server.asked("/model"))
    server.requests.clear()
    server.paths["/model"].cuts = [150_000]
    fetch(server, dest)
    assert dest.read_bytes() == BODY
    assert [headers.get("range") for headers in server.asked("/model")] == [None, "bytes=150000-"]
    assert all("if-range" not in headers for headers in server.asked("/model"))


def test_two_halves_of_different_files_are_noticed(server: FileServer, dest: Path) -> None:
    def other_file(served: Served) -> None:
        served.body = BODY if len(server.requests) > 1 else BODY[::-1]

    server.paths["/model"] = Served(etag=None, cuts=[150_000], on_request=other_file)
    fetch(server, dest)
    assert dest.read_bytes() == BODY
    assert [headers.get("range") for headers in server.asked("/model")] == [None, "bytes=150000-", None]


def test_a_bad_first_half_is_noticed_and_fetched_again(server: FileServer, dest: Path) -> None:
    interrupted(server, dest)
    partial = dest.with_name("model.gguf.partial")
    partial.write_bytes(b"\0" * 150_000)
    fetch(server, dest)
    assert dest.read_bytes() == BODY
    assert ["range" in headers for headers in server.asked("/model")] == [True, False]


def test_a_partial_file_without_notes_is_not_trusted(server: FileServer, dest: Path) -> None:
    dest.parent.mkdir()
    for notes in (None, "{", '{"url": "x"}', '{"url": 1, "etag": 2, "total_bytes": "3", "more": 4}', "[]"):
        dest.with_name("model.gguf.partial").write_bytes(BODY[:1000])
        if notes is not None:
            dest.with_name("model.gguf.partial.json").write_text(notes)
        server.requests.clear()
        server.paths["/model"] = Served(BODY)
        fetch(server, dest, sha256=None)
        assert "range" not in server.asked("/model")[0]
        dest.unlink()


def test_complete_partial_needs_no_network(server: FileServer, dest: Path) -> None:
    interrupted(server, dest)
    dest.with_name("model.gguf.partial").write_bytes(BODY)
    fetch(server, dest)
    assert dest.read_bytes() == BODY
    assert server.requests == []


# -- names, sizes, progress ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../x",
        "a/../../x",
        "/etc/passwd",
        "a//b",
        "a/",
        "a\\b",
        "..\\x",
        "a\0b",
        "C:x",
        "a/./b",
    ],
)
def test_names_that_could_escape(tmp_path: Path, name: str) -> None:
    with pytest.raises(DownloadError, match="not a file name"):
        inside(tmp_path, name)


def test_names_through_a_symlink(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "out").symlink_to(tmp_path)
    (folder / "file.gguf").symlink_to(tmp_path / "elsewhere.gguf")
    assert inside(folder, "ok/model.gguf") == folder / "ok" / "model.gguf"
    for name in ("out/x.gguf", "file.gguf"):
        with pytest.raises(DownloadError, match="leads out of"):
            inside(folder, name)


def test_verify(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(BODY)
    verify(path, len(BODY), SHA256.upper())
    verify(path, None, None)
    with pytest.raises(DownloadError):
        verify(path, 1, None)


def test_rate_and_eta_over_the_last_seconds() -> None:
    now = 100.0
    reports: list[Progress] = []
    meter = Meter("m", reports.append, clock=lambda: now)
    meter.begin("download", 1000)
    assert reports == [Progress("m", "download", 0, 1000, None, None)]
    for _ in range(8):
        now += 1.0
        meter.add(100)
    assert reports[-1] == Progress("m", "download", 800, 1000, 100.0, 2.0)
    # Three slow seconds; then the fast ones have left the window.
    for _ in range(6):
        now += 1.0
        meter.add(10)
    assert reports[-1].rate_bytes_s == pytest.approx(10.0)


def test_reports_are_at_most_ten_a_second() -> None:
    now = 0.0
    reports: list[Progress] = []
    meter = Meter("m", reports.append, clock=lambda: now)
    meter.begin("download", None)
    for _ in range(1000):
        now += 0.001
        meter.add(1)
    assert len(reports) <= 12
    assert reports[-1].eta_s is None
