"""Read a GGUF header from disk: one file or all shards of a split model, without the model runtime.

Owns opening files, merging shards and writing header-only copies for dry runs. Knows nothing of the network
(see `gguf_remote`) and judges nothing: `check_loadable`, re-exported here, does that.

    header = read_header("model.gguf")
    header.architecture, header.arch_get_int("block_count"), header.tensors[0].n_bytes
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import BinaryIO, Final

from edgeserve.errors import GGUFError, ModelNotFoundError
from edgeserve.gguf_checks import check_loadable, foreign_format_error
from edgeserve.gguf_header import ArrayLength, GGUFHeader, Shard, TensorInfo, Value
from edgeserve.gguf_parse import MAGIC, ParsedHeader, parse_header

__all__ = [
    "ArrayLength",
    "GGUFHeader",
    "Shard",
    "TensorInfo",
    "Value",
    "check_loadable",
    "merge_shards",
    "read_header",
    "shard_names",
    "write_header_copy",
]

MIXED_UP_HINT: Final = "Parts of two models may be mixed up: download all parts again into an empty folder."
SPLIT_NAME: Final = re.compile(r"^(?P<prefix>.+)-(?P<index>\d{5})-of-(?P<count>\d{5})\.gguf$", re.DOTALL)


def read_header(path: str | os.PathLike[str]) -> GGUFHeader:
    """Header of the model at `path`; any one shard of a split model stands for all of them.

    ModelNotFoundError if there is no such file, GGUFError for everything else that can be wrong with it.
    """
    first = Path(path)
    parsed, shard = _read_file(first)
    names = shard_names(first.name, parsed)
    if len(names) == 1:
        return merge_shards([(parsed, shard)])
    paths = [first.with_name(name) for name in names]
    missing = [p.name for p in paths if not p.exists()]
    if missing:
        raise GGUFError(
            f"{len(missing)} of the {len(names)} parts of this model are missing: {_some(missing)}.",
            f"All parts belong in one folder: {first.parent}.",
        )
    return merge_shards([_read_file(p) for p in paths])


def shard_names(name: str, parsed: ParsedHeader) -> list[str]:
    """File names of all parts, in order, of the model that the file called `name` belongs to."""
    count = parsed.metadata.get("split.count", 1)
    if not isinstance(count, int) or count <= 1:
        return [name]
    match = SPLIT_NAME.match(name)
    if match is None:
        raise GGUFError(
            f"{name} is one of {count} parts, but its name does not end like -00001-of-{count:05d}.gguf.",
            "Give the parts their original names back, so that the others can be found.",
        )
    if int(match["count"]) != count:
        raise GGUFError(
            f"{name} says in its header that the model has {count} parts.",
            f"Its name says {int(match['count'])}. {MIXED_UP_HINT}",
        )
    return [f"{match['prefix']}-{index:05d}-of-{count:05d}.gguf" for index in range(1, count + 1)]


def merge_shards(parts: list[tuple[ParsedHeader, Shard]]) -> GGUFHeader:
    """One header out of all parts, in order. GGUFError names the part that disagrees with the first."""
    first = parts[0][0]
    if len(parts) > 1:
        _check_agreement(parts)
    tensors = tuple(t._replace(shard=i) if i else t for i, (p, _) in enumerate(parts) for t in p.tensors)
    if len({tensor.name for tensor in tensors}) != len(tensors):
        raise GGUFError("The same tensor is in two parts of this model.", MIXED_UP_HINT)
    return GGUFHeader(
        metadata=first.metadata,
        tensors=tensors,
        shards=tuple(shard for _, shard in parts),
        version=first.version,
        alignment=first.alignment,
        big_endian=first.big_endian,
    )


def write_header_copy(source: GGUFHeader | str | os.PathLike[str], dest: str | os.PathLike[str]) -> Path:
    """Write a sparse file of the model's full size that holds only its header; returns the path to load.

    A split model becomes several files beside `dest`, named as llama.cpp wants them. On a file system without
    sparse files the copy takes the model's full size. GGUFError if it cannot be written.
    """
    header = source if isinstance(source, GGUFHeader) else read_header(source)
    target = Path(dest)
    targets = [target]
    if header.is_split:
        stem = SPLIT_NAME.match(target.name)
        prefix = stem["prefix"] if stem else target.stem
        count = header.split_count
        targets = [target.with_name(f"{prefix}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)]
    for shard, path in zip(header.shards, targets, strict=True):
        _write_sparse(shard, path, header.alignment)
    return targets[0]


def _read_file(path: Path) -> tuple[ParsedHeader, Shard]:
    file_bytes = _regular_file_bytes(path)
    try:
        with path.open("rb") as file:
            parsed = _parse_file(file, path, file_bytes)
    except OSError as error:
        raise GGUFError(f"{path} cannot be read: {error.strerror or error}.") from error
    except GGUFError as error:
        raise GGUFError(f"{path.name}: {error.message}", error.hint) from error
    return parsed, Shard(str(path), path, parsed.data_offset, file_bytes, parsed.expected_bytes)


def _regular_file_bytes(path: Path) -> int:
    # Looked at before it is opened: opening a named pipe would wait for a writer for ever.
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise ModelNotFoundError(f"There is no file {path}.") from None
    except (OSError, ValueError) as error:
        raise GGUFError(f"{str(path)!r} cannot be read: {error}.") from error
    if stat.S_ISDIR(status.st_mode):
        raise GGUFError(f"{path} is a folder, not a model file.", "Give the .gguf file inside it.")
    if not stat.S_ISREG(status.st_mode):
        raise GGUFError(f"{path} is not a regular file.")
    return status.st_size


def _parse_file(file: BinaryIO, path: Path, file_bytes: int) -> ParsedHeader:
    head = file.read(512)
    if head[:4] != MAGIC:
        raise foreign_format_error(head, path.name)

    def read(num_bytes: int) -> bytes:
        file.seek(0)
        return file.read(num_bytes)

    return parse_header(read, file_bytes)


def _check_agreement(parts: list[tuple[ParsedHeader, Shard]]) -> None:
    first = parts[0][0]
    for index, (parsed, shard) in enumerate(parts):
        wrong = _disagreement(first, parsed, index, len(parts))
        if wrong:
            raise GGUFError(
                f"{Path(shard.source).name} does not belong to this model: {wrong}.",
                MIXED_UP_HINT,
            )
    total = first.metadata.get("split.tensors.count")
    found = sum(len(parsed.tensors) for parsed, _ in parts)
    if isinstance(total, int) and total != found:
        raise GGUFError(
            f"The parts hold {found} tensors; the first part promises {total}.",
            MIXED_UP_HINT,
        )


def _disagreement(first: ParsedHeader, parsed: ParsedHeader, index: int, count: int) -> str:
    if parsed.metadata.get("split.count") != count:
        return f"split.count is {parsed.metadata.get('split.count')}, not {count}"
    if parsed.metadata.get("split.no") != index:
        return f"split.no is {parsed.metadata.get('split.no')}, not {index}"
    if parsed.big_endian != first.big_endian:
        return "its byte order differs from the first part's"
    architecture = parsed.metadata.get("general.architecture")
    if architecture not in (None, first.metadata.get("general.architecture")):
        return f"its architecture is {architecture}"
    return ""


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _write_sparse(shard: Shard, dest: Path, alignment: int) -> None:
    end = (shard.expected_bytes + alignment - 1) // alignment * alignment
    try:
        with shard.header_path.open("rb") as source:
            head = source.read(shard.data_offset)
        with dest.open("wb") as copy:
            copy.write(head)
            copy.truncate(max(end, shard.file_bytes))
    except (OSError, OverflowError) as error:
        raise GGUFError(f"A header copy of {shard.source} cannot be written to {dest}: {error}.") from error
