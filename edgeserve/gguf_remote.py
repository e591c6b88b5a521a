"""Read the header of a model that is not here: by HTTP ranges, only as far as the header goes, and keep it.

Owns the fetching in growing steps and the cache on disk, keyed by URL and proved by ETag and size. Knows
nothing of repositories or lists: it takes the URL of a file. What it returns can be planned with, not loaded.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote, unquote, urlsplit

import httpx2

from edgeserve.errors import DownloadError, GGUFError
from edgeserve.folders import cache_dir
from edgeserve.gguf import merge_shards, shard_names
from edgeserve.gguf_checks import foreign_format_error
from edgeserve.gguf_header import GGUFHeader, Shard
from edgeserve.gguf_parse import MAGIC, READ_STEPS_BYTES, ParsedHeader, parse_header
from edgeserve.http_fetch import open_url, origin, without_secrets

MAX_PARTS: Final = 512
MAX_KEPT: Final = 64
_CONTENT_RANGE: Final = re.compile(r"^bytes (\d+)-(\d+)/(\d+)$")


def headers_dir() -> Path:
    return cache_dir() / "headers"


def read_remote_header(
    url: str,
    *,
    offline: bool = False,
    folder: Path | None = None,
    token: str | None = None,
    trusted: str | None = None,
) -> GGUFHeader:
    """Header of the GGUF file at `url`, all parts of a split model merged.

    `folder` is the cache (the user's cache folder by default), `token` a bearer token for the URL's own
    origin, `trusted` the URL that the user's settings named when `url` came from there. With `offline` only
    the cache is read. DownloadError if the file cannot be had, GGUFError if it is not a usable GGUF file.
    """
    source = _Source(folder or headers_dir(), offline, token, trusted)
    name = unquote(urlsplit(url).path.rsplit("/", 1)[-1])
    parsed, shard = source.read(url)
    names = shard_names(name, parsed)
    if len(names) == 1:
        return merge_shards([(parsed, shard)])
    if len(names) > MAX_PARTS:
        raise GGUFError(f"{name} claims to be one of {len(names)} parts.", "No published model has so many.")
    return merge_shards(
        [(parsed, shard) if other == name else source.read(_beside(url, other)) for other in names]
    )


def _beside(url: str, name: str) -> str:
    parts = urlsplit(url)
    return parts._replace(path=parts.path.rsplit("/", 1)[0] + "/" + quote(name)).geturl()


@dataclass(frozen=True)
class _Known:
    """What is kept of a header: enough to see whether the server still has the same file."""

    url: str
    etag: str
    file_bytes: int


class _Source:
    def __init__(self, folder: Path, offline: bool, token: str | None, trusted: str | None) -> None:
        self.folder, self.offline, self.token, self.trusted = folder, offline, token, trusted

    def read(self, url: str) -> tuple[ParsedHeader, Shard]:
        stem = hashlib.sha256(url.encode()).hexdigest()[:32]
        kept = self.folder / f"{stem}.gguf-header"
        known = self._known(kept, url)
        if self.offline:
            if known is None:
                raise DownloadError(
                    f"The header of {without_secrets(url)} is not in the cache.",
                    "Read it once without --offline.",
                )
            return self._parse_kept(kept, known)
        fetched = _RangeReader(url, self.token, self.trusted)
        head = fetched.first()
        if known is not None and known == _Known(url, fetched.etag, fetched.file_bytes):
            try:
                return self._parse_kept(kept, known)
            except GGUFError:
                kept.unlink(missing_ok=True)
        parsed = self._parse(fetched, head, url)
        self._keep(kept, fetched.read(parsed.data_offset), _Known(url, fetched.etag, fetched.file_bytes))
        return parsed, _shard(url, kept, parsed, fetched.file_bytes)

    def _parse(self, fetched: _RangeReader, head: bytes, url: str) -> ParsedHeader:
        name = urlsplit(url).path.rsplit("/", 1)[-1]
        if head[:4] != MAGIC:
            raise foreign_format_error(head[:512], name)
        try:
            return parse_header(fetched.read, fetched.file_bytes)
        except GGUFError as error:
            raise GGUFError(f"{name}: {error.message}", error.hint) from error

    def _parse_kept(self, kept: Path, known: _Known) -> tuple[ParsedHeader, Shard]:
        data = kept.read_bytes()
        parsed = parse_header(lambda num_bytes: data[:num_bytes], max(known.file_bytes, len(data)))
        if parsed.data_offset > len(data):
            raise GGUFError("The kept header is incomplete.")
        return parsed, _shard(known.url, kept, parsed, known.file_bytes)

    def _known(self, kept: Path, url: str) -> _Known | None:
        try:
            known = _Known(**json.loads(kept.with_suffix(".json").read_text()))
        except (OSError, ValueError, TypeError):
            return None
        return known if kept.is_file() and known.url == url and isinstance(known.file_bytes, int) else None

    def _keep(self, kept: Path, data: bytes, known: _Known) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        notes = kept.with_suffix(".json")
        # Notes last and gone first: a header without them is not used.
        notes.unlink(missing_ok=True)
        _replace(kept, data)
        _replace(notes, json.dumps(known.__dict__).encode())
        for old in sorted(self.folder.glob("*.gguf-header"), key=_age)[MAX_KEPT:]:
            old.unlink(missing_ok=True)
            old.with_suffix(".json").unlink(missing_ok=True)


def _shard(url: str, kept: Path, parsed: ParsedHeader, file_bytes: int) -> Shard:
    return Shard(
        without_secrets(url), kept, parsed.data_offset, file_bytes, parsed.expected_bytes, local=False
    )


def _age(path: Path) -> float:
    """For sorting newest first; a file that has just gone counts as old."""
    try:
        return -path.stat().st_mtime
    except OSError:
        return 0.0


def _replace(path: Path, data: bytes) -> None:
    """Write a file in one step, so that no reader and no second writer sees half of it."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_bytes(data)
    partial.replace(path)


class _RangeReader:
    """The first n bytes of a URL, fetched once each; a server that ignores ranges is read and hung up on."""

    # The parser's own first step, so that most small headers take one request.
    FIRST_BYTES = READ_STEPS_BYTES[0]

    def __init__(self, url: str, token: str | None, trusted: str | None) -> None:
        self.url, self.token, self.trusted = url, token, trusted
        self.data = b""
        self.etag = ""
        self.file_bytes = 0

    def first(self) -> bytes:
        """The first request: it also brings the size and the ETag. Returns the bytes that came."""
        self._request(self.FIRST_BYTES)
        return self.data

    def read(self, num_bytes: int) -> bytes:
        wanted = min(num_bytes, self.file_bytes)
        if wanted > len(self.data):
            self._request(wanted)
        return self.data[:num_bytes]

    def _request(self, wanted: int) -> None:
        have = len(self.data)
        headers = {"Range": f"bytes={have}-{wanted - 1}"}
        # A token is for the host that the user's settings name, and for no other URL.
        if self.token and (self.trusted is None or origin(self.trusted) == origin(self.url)):
            headers["Authorization"] = f"Bearer {self.token}"
        with open_url(self.url, headers, trusted=self.trusted) as response:
            start = self._check(response, have)
            data = _take(response, wanted - start)
        self.data = self.data[:start] + data
        if len(self.data) < min(wanted, self.file_bytes):
            raise DownloadError(f"{without_secrets(self.url)} broke off after {len(self.data):,} bytes.")

    def _check(self, response: httpx2.Response, have: int) -> int:
        """Where the body starts in the file; sets or compares size and ETag."""
        match = _CONTENT_RANGE.match(response.headers.get("content-range", ""))
        if response.status_code == 206 and match and int(match[1]) == have:
            start, file_bytes = have, int(match[3])
        elif response.status_code == 200 and response.headers.get("content-length", "").isdigit():
            start, file_bytes = 0, int(response.headers["content-length"])
        else:
            raise _status_error(self.url, response.status_code)
        etag = response.headers.get("etag", "")
        if have and (file_bytes, etag) != (self.file_bytes, self.etag):
            raise DownloadError(f"{without_secrets(self.url)} changed while it was read.", "Try again.")
        self.file_bytes, self.etag = file_bytes, etag
        return start


def _take(response: httpx2.Response, num_bytes: int) -> bytes:
    parts: list[bytes] = []
    left = num_bytes
    for chunk in response.iter_raw():
        parts.append(chunk[:left])
        left -= len(parts[-1])
        if left <= 0:
            break
    return b"".join(parts)


def _status_error(url: str, status: int) -> DownloadError:
    shown = without_secrets(url)
    if status in (401, 403):
        return DownloadError(
            f"{shown} needs a login (status {status}).", "Set HF_TOKEN, or accept its licence there."
        )
    if status == 404:
        return DownloadError(f"There is nothing at {shown}.", "Check the address.")
    return DownloadError(
        f"{shown} answers with status {status}, without a size.", "Download the file instead."
    )
