"""One saved prefix as a file: its layout, and the checks without which nothing of it is believed.

    magic, length of the head (u32, little-endian), head (JSON), BLAKE2b of the head (32 bytes),
    token ids (int32, little-endian), state, states of the checkpoints

The head names the identity of the model and of everything that decides the state's layout, and digests of
what follows. Knows nothing of directories, budgets or contexts.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeserve.engine.saved_prefix import Checkpoint, SavedPrefix, Tokens

_MAGIC = b"edgeserve prefix 1\n"
_DIGEST_BYTES = 32
_MOST_HEAD_BYTES = 1 << 20
_TOKEN = np.dtype("<i4")


@dataclass(frozen=True, slots=True)
class Head:
    """What a file says of itself. `namespace` is a digest; `checkpoints` are (tokens, bytes)."""

    identity: str
    namespace: str
    num_tokens: int
    cut_from: int
    num_state_bytes: int
    checkpoints: tuple[tuple[int, int], ...]
    tokens_digest: str
    state_digest: str

    @property
    def num_body_bytes(self) -> int:
        return _TOKEN.itemsize * self.num_tokens + self.num_state_bytes + sum(n for _, n in self.checkpoints)


def namespace_digest(namespace: str) -> str:
    """What stands for a namespace on disk."""
    return hashlib.sha256(b"edgeserve namespace\n" + namespace.encode()).hexdigest()[:32]


def file_bytes(prefix: SavedPrefix) -> int:
    """About how large the file of a prefix is."""
    return prefix.num_bytes + 4096


def write_prefix(path: Path, prefix: SavedPrefix, identity: str) -> None:
    """Write a prefix, readable by its owner alone, and only then give it its name. Raises OSError."""
    tokens = prefix.token_ids.astype(_TOKEN)
    states = [prefix.state, *(checkpoint.state for checkpoint in prefix.checkpoints)]
    head = Head(
        identity=identity,
        namespace=namespace_digest(prefix.namespace),
        num_tokens=prefix.num_tokens,
        cut_from=prefix.cut_from,
        num_state_bytes=prefix.state.nbytes,
        checkpoints=tuple((checkpoint.num_tokens, checkpoint.num_bytes) for checkpoint in prefix.checkpoints),
        tokens_digest=_digest([tokens]).hex(),
        state_digest=_digest(states).hex(),
    )
    encoded = json.dumps(asdict(head)).encode()
    partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOFOLLOW", 0)
    try:
        with os.fdopen(os.open(partial, flags, 0o600), "wb") as file:
            file.write(_MAGIC + len(encoded).to_bytes(4, "little") + encoded)
            file.write(hashlib.blake2b(encoded, digest_size=_DIGEST_BYTES).digest())
            file.write(tokens.data)
            for state in states:
                file.write(state.data)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def read_head(path: Path) -> tuple[Head, Tokens] | None:
    """A file's head and tokens; None when it is not such a file, is not whole, or says what cannot be."""
    try:
        with path.open("rb") as file:
            head = _read_head(file)
            if head is None or os.fstat(file.fileno()).st_size != file.tell() + head.num_body_bytes:
                return None
            tokens = np.frombuffer(file.read(_TOKEN.itemsize * head.num_tokens), _TOKEN)
    except (OSError, ValueError, TypeError, KeyError):
        return None
    if len(tokens) != head.num_tokens or _digest([tokens]).hex() != head.tokens_digest:
        return None
    return head, tokens.astype(np.int32)


def read_prefix(path: Path, namespace: str) -> SavedPrefix | None:
    """A whole prefix; None when anything in the file is not as it was written. `namespace` is the one that
    the caller knows by its digest."""
    read = read_head(path)
    if read is None:
        return None
    head, tokens = read
    try:
        with path.open("rb") as file:
            file.seek(-head.num_body_bytes + tokens.nbytes, os.SEEK_END)
            state = _read_state(file, head.num_state_bytes)
            checkpoints = tuple(Checkpoint(n, _read_state(file, size)) for n, size in head.checkpoints)
    except OSError:
        return None
    if _digest([state, *(checkpoint.state for checkpoint in checkpoints)]).hex() != head.state_digest:
        return None
    return SavedPrefix(namespace, tokens, state, head.cut_from, checkpoints)


def _read_head(file: BufferedReader) -> Head | None:
    if file.read(len(_MAGIC)) != _MAGIC:
        return None
    length = int.from_bytes(file.read(4), "little")
    if length > _MOST_HEAD_BYTES:
        return None
    encoded = file.read(length)
    if hashlib.blake2b(encoded, digest_size=_DIGEST_BYTES).digest() != file.read(_DIGEST_BYTES):
        return None
    fields: dict[str, Any] = json.loads(encoded)
    return Head(**fields | {"checkpoints": tuple((n, size) for n, size in fields["checkpoints"])})


def _read_state(file: BufferedReader, num_bytes: int) -> NDArray[np.uint8]:
    state = np.empty(num_bytes, np.uint8)
    if file.readinto(state.data) != num_bytes:
        raise OSError("the file is shorter than it says")
    return state


def _digest(parts: Iterable[NDArray[Any]]) -> bytes:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        digest.update(part.data)
    return digest.digest()
