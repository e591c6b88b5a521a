"""Bring one file from a URL onto the disk: space, progress, resume, size and hash.

Owns the `.partial` file: it becomes the file only after size and hash are right. It is continued only when a
strong ETag proves that the server still has the same file, or when a known hash will prove the whole at last.
Knows nothing of models or indexes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, Literal, TypeAlias

import httpx2

from edgeserve.errors import DownloadError
from edgeserve.http_fetch import open_url, without_secrets

Phase: TypeAlias = Literal["connect", "download", "unpack", "verify", "done"]
ATTEMPTS: Final = 4
CHUNK_BYTES: Final = 1 << 20
SPACE_MARGIN_BYTES: Final = 64 << 20
_CONTENT_RANGE: Final = re.compile(r"^bytes (\d+)-(\d+)/(\d+)$")


@dataclass(frozen=True)
class Progress:
    """Where a download stands. `rate_bytes_s` is over the last few seconds, `eta_s` the rest at that rate."""

    name: str
    phase: Phase
    done_bytes: int = 0
    total_bytes: int | None = None
    rate_bytes_s: float | None = None
    eta_s: float | None = None


Report: TypeAlias = Callable[[Progress], None]


def no_report(progress: Progress) -> None:
    """For callers who want no progress."""


class Meter:
    """Counts bytes and reports at most ten times a second; the first report of a phase comes at once."""

    WINDOW_S = 5.0
    EVERY_S = 0.1

    def __init__(self, name: str, report: Report, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self.report = report
        self.clock = clock
        self.phase: Phase = "connect"
        self.done_bytes = 0
        self.total_bytes: int | None = None
        self.marks: deque[tuple[float, int]] = deque()
        self.last_report_s = 0.0

    def begin(self, phase: Phase, total_bytes: int | None = None, done_bytes: int = 0) -> None:
        self.phase, self.total_bytes, self.done_bytes = phase, total_bytes, done_bytes
        self.marks.clear()
        self._mark()
        self._send()

    def add(self, num_bytes: int) -> None:
        self.done_bytes += num_bytes
        self._mark()
        if self.clock() - self.last_report_s >= self.EVERY_S:
            self._send()

    def _mark(self) -> None:
        now = self.clock()
        self.marks.append((now, self.done_bytes))
        while len(self.marks) > 2 and now - self.marks[0][0] > self.WINDOW_S:
            self.marks.popleft()

    def _send(self) -> None:
        self.last_report_s = self.clock()
        elapsed_s = self.marks[-1][0] - self.marks[0][0]
        rate = (self.marks[-1][1] - self.marks[0][1]) / elapsed_s if elapsed_s > 0 else None
        rest = None if self.total_bytes is None else max(0, self.total_bytes - self.done_bytes)
        eta_s = rest / rate if rate and rest is not None else None
        self.report(Progress(self.name, self.phase, self.done_bytes, self.total_bytes, rate, eta_s))


def inside(folder: Path, name: str) -> Path:
    """`folder / name`, if that can only be a file within `folder`: no way up, no root, no odd separators.

    DownloadError otherwise. Existing symlinks are followed, so one that points outside is refused too.
    """
    parts = name.split("/")
    if not name or any(c in name for c in "\\\0:") or any(part in ("", ".", "..") for part in parts):
        raise DownloadError(f"{name!r} is not a file name that a model may have.")
    path = folder.joinpath(*parts)
    if not path.resolve().is_relative_to(folder.resolve()):
        raise DownloadError(f"{name!r} leads out of {folder}.")
    return path


def check_space(folder: Path, needed_bytes: int) -> None:
    """DownloadError unless `needed_bytes` and a little more fit on the disk that holds `folder`."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes + SPACE_MARGIN_BYTES:
        raise DownloadError(
            f"{needed_bytes / 1e9:.2f} GB are needed in {folder}, {free_bytes / 1e9:.2f} GB are free.",
            "Free some space, or set EDGESERVE_MODELS_DIR to a folder on another disk.",
        )


def file_sha256(path: Path, meter: Meter | None = None) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            if meter:
                meter.add(len(chunk))
    return digest.hexdigest()


def verify(path: Path, n_bytes: int | None, sha256: str | None, meter: Meter | None = None) -> None:
    """DownloadError unless the file has this size and hash; None means that it is not known."""
    found_bytes = path.stat().st_size
    if n_bytes is not None and found_bytes != n_bytes:
        raise DownloadError(
            f"{path.name} has {found_bytes:,} bytes instead of {n_bytes:,}.", "It was deleted: pull it again."
        )
    if sha256 is None:
        return
    if meter:
        meter.begin("verify", found_bytes)
    found = file_sha256(path, meter)
    if found != sha256.lower():
        raise DownloadError(
            f"{path.name} has the SHA-256 {found} instead of {sha256}.",
            "It was deleted. Pull it again; if that does not help, its publisher has replaced it.",
        )


@dataclass(frozen=True)
class _Kept:
    """What a partial file is a part of. `total_bytes` 0: nothing ties it to what the server has now."""

    url: str = ""
    etag: str = ""
    total_bytes: int = 0


class _BrokenOffError(Exception):
    """The connection ended before the file did; what came so far is good."""


class FileDownload:
    """One file on its way. `run` ends with the verified file at `dest`, or raises DownloadError."""

    def __init__(
        self,
        url: str,
        dest: Path,
        *,
        n_bytes: int | None = None,
        sha256: str | None = None,
        report: Report = no_report,
        trusted: str | None = None,
        pause_s: float = 1.0,
    ) -> None:
        self.url, self.dest, self.n_bytes, self.sha256, self.trusted = url, dest, n_bytes, sha256, trusted
        self.partial = dest.with_name(dest.name + ".partial")
        self.notes = dest.with_name(dest.name + ".partial.json")
        self.meter = Meter(dest.name, report)
        self.pause_s = pause_s

    def run(self) -> Path:
        if not self._attempt():
            # A part from before was the bad one, or did not fit: once from the start, then it is final.
            self._forget()
            self._attempt(final=True)
        self.partial.replace(self.dest)
        self.notes.unlink(missing_ok=True)
        return self.dest

    def _attempt(self, final: bool = False) -> bool:
        """Fetch and verify. False if what was put together from several answers is not the file."""
        self.meter.begin("connect", self.n_bytes)
        self.dest.parent.mkdir(parents=True, exist_ok=True)
        with self.partial.open("ab") as file:
            _lock(file, self.dest.name)
            joined = self._fetch(file)
        try:
            verify(self.partial, self.n_bytes, self.sha256, self.meter)
        except DownloadError:
            if joined and not final:
                return False
            self._forget()
            raise
        return True

    def _fetch(self, file: BinaryIO) -> bool:
        """Fill the partial file. True if it is put together from more than one answer."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return self._fetch_once(file)
            except (_BrokenOffError, DownloadError) as error:
                if isinstance(error, DownloadError) and not (attempt > 1 and _is_transport(error)):
                    raise
                if attempt == ATTEMPTS:
                    raise DownloadError(
                        f"The download of {self.dest.name} broke off {ATTEMPTS} times: {error}.",
                        "Pull again: it goes on where it stopped, if the server allows.",
                    ) from error
                time.sleep(self.pause_s * attempt)
        raise AssertionError("unreachable")

    def _fetch_once(self, file: BinaryIO) -> bool:
        """One request. True if it went on from what was there, False if it began anew."""
        kept = self._kept()
        have_bytes = file.seek(0, os.SEEK_END)
        if have_bytes and have_bytes == kept.total_bytes:
            return True
        headers = {}
        if 0 < have_bytes < kept.total_bytes:
            headers = {"Range": f"bytes={have_bytes}-"} | ({"If-Range": kept.etag} if kept.etag else {})
        else:
            self._restart(file)
        with open_url(self.url, headers, trusted=self.trusted) as response:
            if response.status_code == 206 and headers and _continues(response, have_bytes, kept):
                self._receive(response, file, have_bytes, kept.total_bytes)
                return True
            if response.status_code == 200:
                self._restart(file)
                self._receive(response, file, 0, self._begin_notes(response))
                return False
            if headers and response.status_code in (206, 416, 412):
                # Another file by now, or a server that cannot continue: what is here is worth nothing.
                self._restart(file)
                raise _BrokenOffError("the file changed on the server")
            raise DownloadError(
                f"{without_secrets(self.url)} answers with status {response.status_code}.",
                "The address may be outdated, or the file needs a login.",
            )

    def _receive(self, response: httpx2.Response, file: BinaryIO, have_bytes: int, total_bytes: int) -> None:
        expected = self.n_bytes or total_bytes
        check_space(self.dest.parent, max(0, expected - have_bytes))
        self.meter.begin("download", expected or None, have_bytes)
        try:
            # As they come: grouped into larger chunks, those before a break would be lost.
            for chunk in response.iter_raw():
                have_bytes += len(chunk)
                if expected and have_bytes > expected:
                    self._restart(file)
                    raise DownloadError(f"{without_secrets(self.url)} sends more than {expected:,} bytes.")
                file.write(chunk)
                self.meter.add(len(chunk))
        except httpx2.HTTPError as error:
            raise _BrokenOffError(str(error) or type(error).__name__) from error
        except OSError as error:
            raise DownloadError(f"{self.partial} cannot be written: {error.strerror or error}.") from error
        finally:
            file.flush()
        if total_bytes and have_bytes < total_bytes:
            raise _BrokenOffError(f"{have_bytes:,} of {total_bytes:,} bytes came")

    def _begin_notes(self, response: httpx2.Response) -> int:
        """Note what file this is, if the server says so firmly enough to go on later; its size or 0."""
        length = response.headers.get("content-length", "")
        total_bytes = int(length) if length.isdigit() else 0
        etag = response.headers.get("etag", "")
        if total_bytes and etag and not etag.startswith("W/"):
            self.notes.write_text(json.dumps({"url": self.url, "etag": etag, "total_bytes": total_bytes}))
        return total_bytes

    def _kept(self) -> _Kept:
        """What the partial file is a part of; where a hash will tell in the end, no ETag is needed."""
        by_hash = _Kept(self.url, "", self.n_bytes) if self.n_bytes and self.sha256 else _Kept()
        try:
            kept = _Kept(**json.loads(self.notes.read_text()))
        except (OSError, ValueError, TypeError):
            return by_hash
        return kept if kept.url == self.url and isinstance(kept.total_bytes, int) and kept.etag else by_hash

    def _restart(self, file: BinaryIO) -> None:
        file.truncate(0)
        self.notes.unlink(missing_ok=True)

    def _forget(self) -> None:
        self.partial.unlink(missing_ok=True)
        self.notes.unlink(missing_ok=True)


def _is_transport(error: DownloadError) -> bool:
    """Whether the network failed, not the file: worth another try once something has been received."""
    return isinstance(error.__cause__, httpx2.TransportError)


def _continues(response: httpx2.Response, have_bytes: int, kept: _Kept) -> bool:
    """Whether a 206 carries exactly the missing rest of the very file that was begun."""
    match = _CONTENT_RANGE.match(response.headers.get("content-range", ""))
    if match is None:
        return False
    start, end, total = (int(number) for number in match.groups())
    same = not kept.etag or response.headers.get("etag", kept.etag) == kept.etag
    return same and (start, end, total) == (have_bytes, kept.total_bytes - 1, kept.total_bytes)


def _lock(file: BinaryIO, name: str) -> None:
    """Keep two processes from writing one partial file; the lock goes with the process."""
    try:
        import fcntl
    except ImportError:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise DownloadError(
            f"{name} is being downloaded by another process.", "Wait for it to finish."
        ) from None
