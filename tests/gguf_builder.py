"""Small made-up GGUF files, well-formed or broken on purpose.

Independent of the reader: it is written from the format's description, so that the two check each other.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
LETTERS = {
    U8: "B",
    I8: "b",
    U16: "H",
    I16: "h",
    U32: "I",
    I32: "i",
    F32: "f",
    BOOL: "?",
    U64: "Q",
    I64: "q",
    F64: "d",
}

# (name, shape, ggml type id, bytes)
TINY_TENSORS: list[tuple[str, tuple[int, ...], int, int]] = [
    ("token_embd.weight", (64, 32), 8, 64 // 32 * 34 * 32),
    ("blk.0.attn_q.weight", (64, 64), 1, 64 * 64 * 2),
    ("output_norm.weight", (64,), 0, 64 * 4),
]

TINY_METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "general.name": "Tiny",
    "llama.block_count": 1,
    "llama.context_length": 128,
    "llama.embedding_length": 64,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": [2],
    "llama.rope.freq_base": 10000.0,
    "tokenizer.ggml.tokens": [f"t{i}" for i in range(32)],
    "tokenizer.ggml.scores": [0.5] * 32,
    "tokenizer.chat_template": "{{ messages[0].content }}",
    "tokenizer.ggml.add_bos_token": False,
}


class Typed:
    """A value whose GGUF type is given, not guessed: `Typed(U16, 3)`, `Typed(ARRAY, (U64, [1, 2]))`."""

    def __init__(self, type_id: int, value: Any) -> None:
        self.type_id = type_id
        self.value = value


def text(value: str | bytes, order: str = "<") -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack(order + "Q", len(raw)) + raw


def typed_value(value: Any) -> Typed:
    if isinstance(value, Typed):
        return value
    if isinstance(value, bool):
        return Typed(BOOL, value)
    if isinstance(value, (list, tuple)):
        return Typed(ARRAY, (typed_value(value[0]).type_id if value else I32, list(value)))
    return Typed({int: U32, float: F32, str: STRING, bytes: STRING}[type(value)], value)


def value_bytes(value: Any, order: str = "<") -> bytes:
    """Type and value, as they follow a key."""
    typed = typed_value(value)
    head = struct.pack(order + "I", typed.type_id)
    if typed.type_id == STRING:
        return head + text(typed.value, order)
    if typed.type_id != ARRAY:
        return head + struct.pack(order + LETTERS[typed.type_id], typed.value)
    item_type, items = typed.value
    head += struct.pack(order + "IQ", item_type, len(items))
    if item_type == STRING:
        return head + b"".join(text(item, order) for item in items)
    return head + struct.pack(f"{order}{len(items)}{LETTERS[item_type]}", *items)


def header_bytes(
    metadata: Mapping[str, Any] | Sequence[tuple[str, Any]] = TINY_METADATA,
    tensors: Sequence[tuple[str, tuple[int, ...], int, int]] = TINY_TENSORS,
    *,
    order: str = "<",
    version: int = 3,
    alignment: int = 32,
    num_tensors: int | None = None,
    num_keys: int | None = None,
    offsets: Sequence[int] | None = None,
) -> bytes:
    """A header, padded to where its data starts. `num_tensors`, `num_keys`, `offsets` override the truth."""
    pairs = list(metadata.items()) if isinstance(metadata, Mapping) else list(metadata)
    counts = (
        len(tensors) if num_tensors is None else num_tensors,
        len(pairs) if num_keys is None else num_keys,
    )
    out = bytearray(b"GGUF" + struct.pack(order + "IQQ", version, *counts))
    for key, value in pairs:
        out += text(key, order) + value_bytes(value, order)
    offset = 0
    for index, (name, ne, type_id, n_bytes) in enumerate(tensors):
        place = offset if offsets is None else offsets[index]
        out += text(name, order) + struct.pack(f"{order}I{len(ne)}QIQ", len(ne), *ne, type_id, place)
        offset += n_bytes + -n_bytes % alignment
    return bytes(out) + bytes(-len(out) % alignment)


def model_bytes(*args: Any, **options: Any) -> bytes:
    """A whole file: the header and data that is not zero, so that no file system makes a hole of it."""
    tensors = args[1] if len(args) > 1 else options.get("tensors", TINY_TENSORS)
    alignment = options.get("alignment", 32)
    data_bytes = sum(t[3] + -t[3] % alignment for t in tensors)
    return header_bytes(*args, **options) + b"\x5a" * data_bytes


def save(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def with_metadata(**changes: object) -> dict[str, object]:
    renamed = {key.replace("__", "."): value for key, value in changes.items()}
    return TINY_METADATA | renamed
