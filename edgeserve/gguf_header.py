"""What a GGUF header says, as one frozen value.

Owns the shape of the answer and the convenience of reading it. Knows nothing of how bytes are parsed, of
files or of the network; sizes are those the header promises, beside the bytes really found.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias

from edgeserve.ggml_types import GGML_TYPES


@dataclass(frozen=True)
class ArrayLength:
    """An array (or an overlong string, an array of bytes) that was skipped: only its length is known."""

    n: int
    item_type: str

    def __len__(self) -> int:
        return self.n

    def __str__(self) -> str:
        return f"[{self.n} × {self.item_type}]"


Scalar: TypeAlias = int | float | bool | str
Value: TypeAlias = Scalar | tuple[int, ...] | tuple[float, ...] | tuple[bool, ...] | ArrayLength


class TensorInfo(NamedTuple):
    """One tensor. A named tuple because a header holds thousands of them and is read in milliseconds.

    `ne` is the shape as ggml writes it, fastest dimension first and padded with ones; `offset` counts from
    the start of the data section of file number `shard` (from 0).
    """

    name: str
    ne: tuple[int, int, int, int]
    type_id: int
    offset: int
    n_bytes: int
    shard: int = 0

    @property
    def type_name(self) -> str:
        return GGML_TYPES[self.type_id].name

    @property
    def num_elements(self) -> int:
        return math.prod(self.ne)


@dataclass(frozen=True)
class Shard:
    """One file of a model: most have one, split models several.

    `header_path` is where the first `data_offset` bytes can be read (the file itself, or a cached copy of a
    remote header); `file_bytes` is the size found, `expected_bytes` the end of the last tensor; `source` the
    path or URL as given; `local` whether the tensor data can be read here.
    """

    source: str
    header_path: Path
    data_offset: int
    file_bytes: int
    expected_bytes: int
    local: bool = True


@dataclass(frozen=True)
class GGUFHeader:
    """Metadata and tensor table of a model, all shards merged.

    Long numeric arrays and all string arrays are `ArrayLength`: nothing that sizes a model needs them, and a
    vocabulary is most of a header. `alignment` is in bytes.
    """

    metadata: dict[str, Value]
    tensors: tuple[TensorInfo, ...]
    shards: tuple[Shard, ...]
    version: int
    alignment: int
    big_endian: bool = False

    def get(self, key: str, default: Value | None = None) -> Value | None:
        return self.metadata.get(key, default)

    def get_int(self, key: str, default: int | None = None) -> int | None:
        """The value if it is a whole number, else `default`: a wrong type in a file is not our error."""
        value = self.metadata.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else default

    def get_str(self, key: str, default: str = "") -> str:
        value = self.metadata.get(key)
        return value if isinstance(value, str) else default

    def arch_get(self, key: str, default: Value | None = None) -> Value | None:
        """`arch_get("block_count")` reads `llama.block_count` in a llama model."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def arch_get_int(self, key: str, default: int | None = None) -> int | None:
        return self.get_int(f"{self.architecture}.{key}", default)

    @property
    def architecture(self) -> str:
        """`general.architecture`, "" if the file does not say."""
        return self.get_str("general.architecture")

    @property
    def name(self) -> str:
        return self.get_str("general.name")

    @property
    def chat_template(self) -> str | None:
        """The model's own Jinja template; None if it has none, or one longer than a header may carry."""
        value = self.metadata.get("tokenizer.chat_template")
        return value if isinstance(value, str) else None

    @property
    def source(self) -> str:
        return self.shards[0].source

    @property
    def split_count(self) -> int:
        return len(self.shards)

    @property
    def is_split(self) -> bool:
        return len(self.shards) > 1

    @property
    def is_local(self) -> bool:
        return all(shard.local for shard in self.shards)

    @property
    def data_offset(self) -> int:
        """Where the tensor data of the first file starts, in bytes."""
        return self.shards[0].data_offset

    @property
    def file_bytes(self) -> int:
        """Size found, all files together."""
        return sum(shard.file_bytes for shard in self.shards)

    @property
    def total_bytes(self) -> int:
        """Size that the header promises, all files together."""
        return sum(shard.expected_bytes for shard in self.shards)

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors, without padding between them."""
        return sum(tensor.n_bytes for tensor in self.tensors)

    @property
    def num_parameters(self) -> int:
        return sum(tensor.num_elements for tensor in self.tensors)

    @property
    def n_vocab(self) -> int | None:
        """Tokens in the vocabulary; None in a file without one."""
        tokens = self.metadata.get("tokenizer.ggml.tokens")
        return len(tokens) if isinstance(tokens, ArrayLength) else self.arch_get_int("vocab_size")
