"""Bytes -> GGUF header: every count and length is checked before anything is allocated or skipped.

Owns the wire format (versions 2 and 3, either byte order) and the hard limits. Knows nothing of files,
shards or the network: it gets a function that reads the first n bytes, and the size of the whole file.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from edgeserve.errors import GGUFError
from edgeserve.ggml_types import GGML_TYPES, REMOVED_TYPES, row_bytes
from edgeserve.gguf_header import ArrayLength, TensorInfo, Value

MAGIC: Final = b"GGUF"
ALIGNMENT_KEY: Final = "general.alignment"
DEFAULT_ALIGNMENT: Final = 32
TYPE_U32: Final = 4
TYPE_STRING: Final = 8
TYPE_ARRAY: Final = 9
# GGUF value type -> (struct letter, bytes, name for people)
SCALARS: Final[dict[int, tuple[str, int, str]]] = {
    0: ("B", 1, "u8"), 1: ("b", 1, "i8"), 2: ("H", 2, "u16"), 3: ("h", 2, "i16"), 4: ("I", 4, "u32"),
    5: ("i", 4, "i32"), 6: ("f", 4, "f32"), 7: ("?", 1, "bool"), 10: ("Q", 8, "u64"), 11: ("q", 8, "i64"),
    12: ("d", 8, "f64"),
}  # fmt: skip

# The buffer grows in these steps; most headers end within the first. The largest seen (262,000 tokens and
# 514,000 merges) takes about 16 MiB.
READ_STEPS_BYTES: Final = (1 << 20, 4 << 20, 16 << 20, 32 << 20)
# The limits bound time and memory for any input; each is far above what published models need
# (the largest vocabulary seen has 777,000 tokens and merges, the largest tensor table 2,000 entries).
MAX_KEYS: Final = 4_096
MAX_TENSORS: Final = 4_096
MAX_STRINGS_SKIPPED: Final = 900_000
MAX_TEXT_BYTES: Final = 2 << 20
MAX_STRING_BYTES: Final = 1 << 20
MAX_KEY_BYTES: Final = 65_535
MAX_NAME_BYTES: Final = 63
MAX_ARRAY_KEPT: Final = 4_096
MAX_NUMBERS_KEPT: Final = 1 << 16
MAX_ALIGNMENT: Final = 1 << 20
MAX_DIMENSIONS: Final = 4
MAX_BYTES: Final = (1 << 63) - 1

DAMAGED_HINT: Final = "The file is damaged or was cut short: download or convert it again."


@dataclass(frozen=True)
class ParsedHeader:
    """One file's header. `expected_bytes` is the end of its last tensor, counted from the file's start."""

    version: int
    big_endian: bool
    alignment: int
    metadata: dict[str, Value]
    tensors: tuple[TensorInfo, ...]
    data_offset: int
    expected_bytes: int


class _Cursor:
    """A place in the file. All reading goes through `need`, so that no length is believed unchecked.

    `buffer` holds the file's first bytes; it grows in steps, so that little more than the header is read.
    """

    def __init__(self, read: Callable[[int], bytes], file_bytes: int) -> None:
        self.read = read
        self.file_bytes = file_bytes
        self.buffer = b""
        self.pos = 0
        self.order: Literal["<", ">"] = "<"
        self.set_order("<")
        self.text_bytes_left = MAX_TEXT_BYTES
        self.strings_left = MAX_STRINGS_SKIPPED
        self.numbers_left = MAX_NUMBERS_KEPT

    def set_order(self, order: Literal["<", ">"]) -> None:
        self.order = order
        self.u32 = struct.Struct(order + "I").unpack_from
        self.u64 = struct.Struct(order + "Q").unpack_from

    def need(self, num_bytes: int, what: str) -> None:
        """Make sure that the next `num_bytes` are in the buffer."""
        wanted = self.pos + num_bytes
        if wanted > len(self.buffer):
            self._grow(wanted, what)

    def _grow(self, wanted: int, what: str) -> None:
        if wanted > self.file_bytes:
            raise GGUFError(
                f"The header goes past the end of the file: {what} goes on to byte {wanted:,},"
                f" the file has {self.file_bytes:,}.",
                DAMAGED_HINT,
            )
        if wanted > READ_STEPS_BYTES[-1]:
            raise GGUFError(
                f"The header goes on to byte {wanted:,} at least; at most {READ_STEPS_BYTES[-1]:,} are read.",
                "No published model has a header this long: the file is probably damaged.",
            )
        step = next(step for step in READ_STEPS_BYTES if step >= wanted)
        # Let go of the old buffer first: both at once would be over the bound on memory.
        self.buffer = b""
        self.buffer = self.read(min(step, self.file_bytes))
        if len(self.buffer) < wanted:
            raise GGUFError("The file became shorter while it was read.", DAMAGED_HINT)

    def read_u32(self, what: str) -> int:
        self.need(4, what)
        value: int = self.u32(self.buffer, self.pos)[0]
        self.pos += 4
        return value

    def read_u64(self, what: str) -> int:
        self.need(8, what)
        value: int = self.u64(self.buffer, self.pos)[0]
        self.pos += 8
        return value

    def read_raw(self, num_bytes: int, what: str) -> bytes:
        self.need(num_bytes, what)
        raw = bytes(self.buffer[self.pos : self.pos + num_bytes])
        self.pos += num_bytes
        return raw

    def read_name(self, what: str, limit_bytes: int) -> str:
        """A key or a tensor name: kept whole or refused."""
        length = self.read_u64(what)
        if length > limit_bytes:
            raise GGUFError(
                f"The {what} has {length:,} bytes; at most {limit_bytes:,} are allowed.", DAMAGED_HINT
            )
        self.text_bytes_left -= length
        if self.text_bytes_left < 0:
            raise GGUFError(f"The header's names add up to more than {MAX_TEXT_BYTES:,} bytes.", DAMAGED_HINT)
        return self.read_raw(length, what).decode("utf-8", "replace")

    def read_string(self, what: str) -> str | ArrayLength:
        """A string value; one too long to keep is skipped by its length."""
        length = self.read_u64(what)
        if length > MAX_STRING_BYTES or length > self.text_bytes_left:
            self.skip(length, what)
            return ArrayLength(length, "byte")
        self.text_bytes_left -= length
        return self.read_raw(length, what).decode("utf-8", "replace")

    def skip(self, num_bytes: int, what: str) -> None:
        self.need(num_bytes, what)
        self.pos += num_bytes

    def skip_strings(self, count: int, what: str) -> None:
        """Step over `count` strings by their lengths, which are all that is looked at."""
        if count > self.strings_left:
            raise GGUFError(f"The {what} has {count:,} strings; too many to read.", DAMAGED_HINT)
        self.strings_left -= count
        pos, done = self.pos, 0
        while done < count:
            pos, skipped = self._skip_in_buffer(pos, count - done)
            done += skipped
            if done < count:
                self.need(pos + 8 - self.pos, what)
        self.need(pos - self.pos, what)
        self.pos = pos

    def _skip_in_buffer(self, pos: int, count: int) -> tuple[int, int]:
        """Skip strings from `pos` until `count` are done or the buffer ends; where that is, and how many."""
        u64, buffer = self.u64, self.buffer
        for index in range(count):
            try:
                pos += 8 + u64(buffer, pos)[0]
            except (struct.error, OverflowError, IndexError):
                return pos, index
        return pos, count


def parse_header(read: Callable[[int], bytes], file_bytes: int) -> ParsedHeader:
    """Parse the header of a file of `file_bytes` whose first n bytes are `read(n)`.

    GGUFError if it is not a sane GGUF header.
    """
    if file_bytes < 24:
        raise GGUFError(f"The file has {file_bytes} bytes; a GGUF header alone takes 24.", DAMAGED_HINT)
    cursor = _Cursor(read, file_bytes)
    version = _read_version(cursor)
    num_tensors = cursor.read_u64("tensor count")
    num_keys = cursor.read_u64("key count")
    _check_count("tensors", num_tensors, MAX_TENSORS)
    _check_count("keys", num_keys, MAX_KEYS)
    metadata = _read_metadata(cursor, num_keys)
    alignment = _alignment(metadata)
    tensors = _read_tensors(cursor, num_tensors, alignment)
    data_offset = _padded(cursor.pos, alignment) if tensors else cursor.pos
    expected_bytes = data_offset + max((t.offset + t.n_bytes for t in tensors), default=0)
    return ParsedHeader(
        version, cursor.order == ">", alignment, metadata, tensors, data_offset, expected_bytes
    )


def _read_version(cursor: _Cursor) -> int:
    if cursor.read_raw(4, "magic") != MAGIC:
        raise GGUFError("The file does not start with the letters GGUF.", DAMAGED_HINT)
    version = cursor.read_u32("version")
    # The magic is the same in both byte orders; a small version number read the wrong way round is huge.
    if version & 0xFFFF == 0:
        version = int.from_bytes(version.to_bytes(4, "little"), "big")
        cursor.set_order(">")
    if version == 1:
        raise GGUFError("This is GGUF version 1, no longer read by llama.cpp.", "Convert the model again.")
    if version not in (2, 3):
        raise GGUFError(f"GGUF version {version} is not known; versions 2 and 3 are read.", DAMAGED_HINT)
    return version


def _check_count(what: str, count: int, limit: int) -> None:
    if count > limit:
        raise GGUFError(f"The header claims {count:,} {what}; at most {limit:,} are read.", DAMAGED_HINT)


def _padded(value: int, alignment: int) -> int:
    return (value + alignment - 1) // alignment * alignment


def _read_metadata(cursor: _Cursor, num_keys: int) -> dict[str, Value]:
    metadata: dict[str, Value] = {}
    for index in range(num_keys):
        key = cursor.read_name(f"key number {index}", MAX_KEY_BYTES)
        if not key or key in metadata:
            problem = f"appears twice: {key[:80]!r}" if key else "is empty"
            raise GGUFError(f"A metadata key {problem}.", DAMAGED_HINT)
        metadata[key] = _read_value(
            cursor, repr(key[:80]), only_type=TYPE_U32 if key == ALIGNMENT_KEY else None
        )
    return metadata


def _read_value(cursor: _Cursor, key: str, only_type: int | None = None) -> Value:
    type_id = cursor.read_u32(f"type of {key}")
    if only_type is not None and type_id != only_type:
        raise GGUFError(f"The metadata value {key} must be of type {SCALARS[only_type][2]}.", DAMAGED_HINT)
    if type_id == TYPE_STRING:
        return cursor.read_string(f"value of {key}")
    if type_id == TYPE_ARRAY:
        return _read_array(cursor, key)
    letter, size, _ = _scalar(type_id, key)
    raw = cursor.read_raw(size, f"value of {key}")
    value: int | float | bool = struct.unpack(cursor.order + letter, raw)[0]
    return value


def _scalar(type_id: int, key: str) -> tuple[str, int, str]:
    if type_id not in SCALARS:
        nested = "is an array of arrays" if type_id == TYPE_ARRAY else f"has the unknown type {type_id}"
        raise GGUFError(f"The metadata value {key} {nested}.", DAMAGED_HINT)
    return SCALARS[type_id]


def _read_array(cursor: _Cursor, key: str) -> Value:
    item_type = cursor.read_u32(f"item type of {key}")
    count = cursor.read_u64(f"length of {key}")
    if item_type == TYPE_STRING:
        cursor.skip_strings(count, f"array {key}")
        return ArrayLength(count, "string")
    letter, size, name = _scalar(item_type, key)
    if count > MAX_ARRAY_KEPT or count > cursor.numbers_left:
        cursor.skip(count * size, f"array {key}")
        return ArrayLength(count, name)
    cursor.numbers_left -= count
    raw = cursor.read_raw(count * size, f"array {key}")
    return struct.unpack(f"{cursor.order}{count}{letter}", raw)


def _alignment(metadata: dict[str, Value]) -> int:
    value = metadata.get(ALIGNMENT_KEY, DEFAULT_ALIGNMENT)
    assert isinstance(value, int)
    if not 0 < value <= MAX_ALIGNMENT or value & (value - 1):
        raise GGUFError(
            f"general.alignment is {value}; it must be a power of two up to {MAX_ALIGNMENT:,}.", DAMAGED_HINT
        )
    return value


def _read_tensors(cursor: _Cursor, num_tensors: int, alignment: int) -> tuple[TensorInfo, ...]:
    tensors = tuple(_read_tensor(cursor, index, alignment) for index in range(num_tensors))
    names = {tensor.name for tensor in tensors}
    if len(names) != len(tensors):
        raise GGUFError(f"{len(tensors) - len(names)} tensor names appear twice.", DAMAGED_HINT)
    return tensors


def _read_tensor(cursor: _Cursor, index: int, alignment: int) -> TensorInfo:
    name = cursor.read_name(f"name of tensor {index}", MAX_NAME_BYTES)
    num_dimensions = cursor.read_u32(f"dimensions of tensor {name!r}")
    if num_dimensions > MAX_DIMENSIONS:
        raise GGUFError(f"Tensor {name!r} has {num_dimensions} dimensions; 4 are possible.", DAMAGED_HINT)
    size = 8 * num_dimensions + 12
    cursor.need(size, f"tensor {name!r}")
    fields = struct.unpack_from(f"{cursor.order}{num_dimensions}QIQ", cursor.buffer, cursor.pos)
    cursor.pos += size
    ne = (*fields[:num_dimensions], 1, 1, 1, 1)[:4]
    type_id, offset = fields[num_dimensions:]
    n_bytes = _tensor_bytes(name, ne, type_id)
    if offset % alignment or offset + n_bytes > MAX_BYTES:
        raise GGUFError(f"Tensor {name!r} has the impossible offset {offset:,}.", DAMAGED_HINT)
    return TensorInfo(name, ne, type_id, offset, n_bytes)


def _tensor_bytes(name: str, ne: tuple[int, ...], type_id: int) -> int:
    if type_id not in GGML_TYPES:
        if type_id in REMOVED_TYPES:
            hint = f"llama.cpp no longer reads it: get the {REMOVED_TYPES[type_id].upper()} file instead."
            raise GGUFError(f"Tensor {name!r} has the removed type {type_id}.", hint)
        raise GGUFError(f"Tensor {name!r} has the unknown type {type_id}.", "A newer edgeserve may know it.")
    try:
        n_bytes = row_bytes(type_id, ne[0]) * ne[1] * ne[2] * ne[3]
    except ValueError as error:
        raise GGUFError(f"Tensor {name!r} has an impossible row: {error}.", DAMAGED_HINT) from None
    if n_bytes > MAX_BYTES or max(ne) > MAX_BYTES:
        raise GGUFError(f"Tensor {name!r} is impossibly large: {' × '.join(map(str, ne))}.", DAMAGED_HINT)
    return n_bytes
