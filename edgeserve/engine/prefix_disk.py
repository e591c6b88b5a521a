"""The disk tier of the prefix cache: saved prefixes as files of one directory, within a bound, for after a
restart.

Owns the directory, the index of what is in it, and the two threads that read and write there. What waits to
be written is bounded too: a prefix that comes while enough others wait is not kept. Files that are not whole,
or that another model, build or setting made, are passed over; they count in the bound and give way like the
others. Knows nothing of contexts.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np

from edgeserve.engine.prefix_file import (
    Head,
    file_bytes,
    namespace_digest,
    read_head,
    read_prefix,
    write_prefix,
)
from edgeserve.engine.saved_prefix import SavedPrefix, Tokens, common_prefix_length, usable
from edgeserve.errors import UsageError

_OURS = re.compile(r"[0-9a-f]{16}-[0-9a-f]{32}\.prefix")
_LEFTOVER = re.compile(r"[0-9a-f]{16}-[0-9a-f]{32}\.prefix\.\d+\.tmp")
_LEFTOVER_AGE_S = 3600.0
_MOST_PENDING_BYTES = 256 << 20
"""Prefixes that wait to be written stay in memory: one, or several of no more than this together."""


@dataclass(frozen=True, slots=True, eq=False)
class DiskEntry:
    """A prefix on disk, as far as it is known without reading its state."""

    path: Path
    namespace: str
    token_ids: Tokens
    cut_from: int
    stops: tuple[int, ...]

    @classmethod
    def of(cls, path: Path, head: Head, token_ids: Tokens) -> DiskEntry:
        return cls(path, head.namespace, token_ids, head.cut_from, tuple(n for n, _ in head.checkpoints))

    def usable_tokens(self, token_ids: Tokens, most: int) -> int:
        return usable(common_prefix_length(self.token_ids, token_ids), most, self.cut_from, self.stops)


class DiskTier:
    """What the engine's thread may call takes no disk time, but for `close` and a write that waits."""

    def __init__(self, directory: Path, limit_bytes: int, identity: str) -> None:
        """`identity` names what a state fits into. Reads the heads of the files that are there. Raises
        UsageError when the directory cannot be made one's own."""
        self.limit_bytes = limit_bytes
        self._directory = _own_directory(directory)
        self._identity = identity
        self._lock = threading.Lock()
        self._index: dict[Path, DiskEntry] = {}
        self._pending: dict[Path, DiskEntry] = {}
        """Handed over and not yet written."""
        self._pending_bytes = 0
        self.num_bytes = 0
        self.num_failed = 0
        """Prefixes that could not be written: a full disk, or a directory that went away."""
        # A prompt that waits for its prefix does not wait for others' to be written.
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="edgeserve-prefix-reader")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="edgeserve-prefix-writer")
        self._scan()

    def __len__(self) -> int:
        return len(self._index)

    def close(self) -> None:
        """Return when all that was handed over is written. Idempotent."""
        self._writer.shutdown(wait=True)
        self._reader.shutdown(wait=False, cancel_futures=True)

    def find(self, namespace: str, token_ids: Tokens, most: int) -> tuple[DiskEntry, int] | None:
        """The file that spares a prompt the most tokens, and how many; None when there is none."""
        digest = namespace_digest(namespace)
        with self._lock:
            entries = [entry for entry in self._index.values() if entry.namespace == digest]
        found = [(entry, entry.usable_tokens(token_ids, most)) for entry in entries]
        best = max(found, key=lambda item: item[1], default=None)
        return best if best and best[1] else None

    def num_covered(self, namespace: str, token_ids: Tokens) -> int:
        """How many of these tokens are on disk, or will be soon, in the file that has most of them."""
        digest = namespace_digest(namespace)
        with self._lock:
            entries = [*self._index.values(), *self._pending.values()]
        own = (entry.token_ids for entry in entries if entry.namespace == digest)
        return max((common_prefix_length(theirs, token_ids) for theirs in own), default=0)

    def load(self, entry: DiskEntry, namespace: str, then: Callable[[SavedPrefix | None], None]) -> None:
        """Read a prefix; `then` gets it, or None, on the reader's thread."""
        self._reader.submit(self._load, entry, namespace, then)

    def takes(self, num_bytes: int) -> bool:
        """Whether a prefix of so many bytes would be written: not when too much waits already, or when it
        never fits."""
        with self._lock:
            waiting = self._pending_bytes + num_bytes
            return num_bytes <= self.limit_bytes and waiting <= max(num_bytes, _MOST_PENDING_BYTES)

    def write(self, prefix: SavedPrefix, *, wait: bool = False) -> None:
        """Hand a prefix over to be written, if it is taken; `wait` until it is done."""
        size = file_bytes(prefix)
        if not self.takes(size):
            return
        with self._lock:
            self._pending_bytes += size
            entry = self._entry_of(prefix)
            self._pending[entry.path] = entry
        done = self._writer.submit(self._write, prefix, entry)
        if wait:
            done.result()

    # -- from here on: the disk's threads -------------------------------------------------------------------

    def _load(self, entry: DiskEntry, namespace: str, then: Callable[[SavedPrefix | None], None]) -> None:
        prefix = read_prefix(entry.path, namespace)
        if prefix is None or not np.array_equal(prefix.token_ids, entry.token_ids):
            prefix = None
            self._remove(entry.path)
        else:
            with contextlib.suppress(OSError):
                os.utime(entry.path)  # the oldest gives way first
        then(prefix)

    def _write(self, prefix: SavedPrefix, entry: DiskEntry) -> None:
        try:
            self._make_room(file_bytes(prefix))
            write_prefix(entry.path, prefix, self._identity)
            with self._lock:
                self._index[entry.path] = entry
            self._remove_continued(prefix, entry)
        except OSError:
            self.num_failed += 1
        finally:
            with self._lock:
                self._pending_bytes -= file_bytes(prefix)
                self._pending.pop(entry.path, None)
            self._measure()

    def _make_room(self, num_bytes: int) -> None:
        """Delete the files unused for longest until so many bytes are free: before any is written."""
        files = self._files()
        used = sum(size for path, size, _ in files)
        for path, size, _ in sorted(files, key=lambda item: item[2]):
            if used + num_bytes <= self.limit_bytes:
                return
            self._remove(path)
            used -= size

    def _remove_continued(self, prefix: SavedPrefix, entry: DiskEntry) -> None:
        """Files whose whole state can be had from the longer one that was just written."""
        with self._lock:
            others = [other for other in self._index.values() if other.path != entry.path]
        for other in others:
            n = len(other.token_ids)
            if other.namespace == entry.namespace and prefix.usable_tokens(other.token_ids, n) == n:
                self._remove(other.path)

    def _remove(self, path: Path) -> None:
        with self._lock:
            self._index.pop(path, None)
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)

    def _files(self) -> list[tuple[Path, int, float]]:
        """All prefixes of the directory, whoever made them: path, bytes, last use."""
        found = []
        for path in self._directory.iterdir():
            if _OURS.fullmatch(path.name):
                with contextlib.suppress(OSError):
                    about = path.lstat()
                    found.append((path, about.st_size, about.st_mtime))
        return found

    def _measure(self) -> None:
        with contextlib.suppress(OSError):
            self.num_bytes = sum(size for _, size, _ in self._files())

    # -- at the start ---------------------------------------------------------------------------------------

    def _scan(self) -> None:
        for path in self._directory.iterdir():
            if _OURS.fullmatch(path.name) and path.name.startswith(self._identity[:16]):
                read = read_head(path)
                if read and read[0].identity == self._identity:
                    self._index[path] = DiskEntry.of(path, *read)
            elif _LEFTOVER.fullmatch(path.name):
                _remove_leftover(path)
        self._measure()

    def _entry_of(self, prefix: SavedPrefix) -> DiskEntry:
        namespace = namespace_digest(prefix.namespace)
        digest = blake2b(namespace.encode() + prefix.token_ids.tobytes(), digest_size=16).hexdigest()
        path = self._directory / f"{self._identity[:16]}-{digest}.prefix"
        stops = tuple(checkpoint.num_tokens for checkpoint in prefix.checkpoints)
        return DiskEntry(path, namespace, prefix.token_ids, prefix.cut_from, stops)


def _own_directory(directory: Path) -> Path:
    """Make the directory, and let nobody else in: it holds what people wrote."""
    directory = directory.expanduser()
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if stat.S_IMODE(directory.stat().st_mode) != 0o700:
            directory.chmod(0o700)
        if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as error:
        raise UsageError(
            f"The directory {directory} cannot be used for the prefix cache: {error.strerror}.",
            "Name one of your own with --cache-disk: it is made readable for you alone.",
        ) from None
    return directory


def _remove_leftover(path: Path) -> None:
    """What a process that ended while writing left; not what another one is writing now."""
    with contextlib.suppress(OSError):
        if time.time() - path.lstat().st_mtime > _LEFTOVER_AGE_S:
            path.unlink()
