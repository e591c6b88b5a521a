"""Can llama.cpp load this? If not: what is it, and what should be given instead?

Owns the judgement on headers and on files that are not GGUF at all. Knows nothing of parsing; it never looks
at tensor data, only at whether any is there.
"""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Final

from edgeserve.errors import GGUFError
from edgeserve.gguf_header import GGUFHeader, Shard

NOT_MODEL_NAMES: Final = ("mmproj", "imatrix", "mtp-", "eagle3-", "dflash-", "dspark-")
CONVERT_HINT: Final = "llama.cpp reads GGUF: look for a GGUF version of this model, or convert it."


def is_model_file_name(name: str) -> bool:
    """Whether a file called `name` can be a language model by itself, by the naming rules of llama.cpp."""
    base = name.replace("\\", "/").rsplit("/", 1)[-1]
    return base.endswith(".gguf") and not any(part in base for part in NOT_MODEL_NAMES)


def check_loadable(header: GGUFHeader) -> None:
    """GGUFError, with what to do instead, unless the runtime may be handed these files."""
    _check_kind(header)
    if header.big_endian != (sys.byteorder == "big"):
        order, host = ("big", "little") if header.big_endian else ("little", "big")
        raise GGUFError(
            f"{_name(header)} is a {order}-endian file and this is a {host}-endian machine.",
            "Its size can be planned with, but to run it get the file converted for this machine.",
        )
    if not header.tensors:
        raise GGUFError(f"{_name(header)} holds no tensors, only a header.", "Get the complete model file.")
    if not header.is_local:
        raise GGUFError(f"Only the header of {header.source} was read.", "Download the model to run it.")
    _check_layout(header)
    for shard in header.shards:
        _check_data(shard)


def _check_kind(header: GGUFHeader) -> None:
    kind = header.get_str("general.type", "model")
    if header.architecture == "clip" or kind == "mmproj":
        raise GGUFError(
            f"{_name(header)} is a vision projector, not a model; vision is not supported yet.",
            _model_beside(header),
        )
    if kind == "adapter":
        raise GGUFError(f"{_name(header)} is a LoRA adapter, not a model.", "Give the model it was made for.")
    if kind == "imatrix" or header.architecture == "imatrix":
        raise GGUFError(
            f"{_name(header)} is an importance matrix, used to quantize a model.", _model_beside(header)
        )
    if not header.architecture:
        raise GGUFError(
            f"{_name(header)} does not say which architecture it has.", "llama.cpp's tools did not write it."
        )


def _model_beside(header: GGUFHeader) -> str:
    """Point at the most likely model file in the same folder: the largest."""
    if not header.is_local:
        return "Give the model file itself."
    here = Path(header.source)
    candidates: list[tuple[int, str]] = []
    try:
        for path in here.parent.glob("*.gguf"):
            if path.name != here.name and is_model_file_name(path.name):
                candidates.append((path.stat().st_size, path.name))
    except OSError:
        pass
    return f"The model is probably {max(candidates)[1]}." if candidates else "Give the model file itself."


def _check_layout(header: GGUFHeader) -> None:
    """llama.cpp wants a file's tensors back to back, each padded to the alignment, in the table's order."""
    expected = [0] * len(header.shards)
    for tensor in header.tensors:
        if tensor.offset != expected[tensor.shard]:
            raise GGUFError(
                f"In {_name(header)} tensor {tensor.name!r} is at {tensor.offset:,} instead of"
                f" {expected[tensor.shard]:,}.",
                "The file is damaged or was edited: download it again.",
            )
        padding = -tensor.n_bytes % header.alignment
        expected[tensor.shard] += tensor.n_bytes + padding


def _check_data(shard: Shard) -> None:
    name = Path(shard.source).name
    if shard.file_bytes <= shard.data_offset < shard.expected_bytes:
        raise GGUFError(f"{name} ends after its header: the weights are not in it.", "Download it again.")
    if shard.file_bytes < shard.expected_bytes:
        raise GGUFError(
            f"{name} is cut short: it has {shard.file_bytes:,} of {shard.expected_bytes:,} bytes.",
            "The download probably stopped early: download it again.",
        )
    if shard.expected_bytes > shard.data_offset and _is_hole(shard):
        raise GGUFError(f"{name} is a header-only copy, without weights.", "Give the model it was made from.")


def _is_hole(shard: Shard) -> bool:
    """True if the file system says that nothing was ever written after the header."""
    if not hasattr(os, "SEEK_DATA"):
        return False
    try:
        with Path(shard.source).open("rb") as file:
            # A header's last block holds the start of the data section too, so look beyond that block.
            beyond = min(shard.data_offset + (1 << 16), shard.expected_bytes - 1)
            os.lseek(file.fileno(), beyond, os.SEEK_DATA)
    except OSError as error:
        # ENXIO is the answer to "where is the next data" when there is none.
        return error.errno == errno.ENXIO
    return False


def _name(header: GGUFHeader) -> str:
    return Path(header.source).name


def foreign_format_error(head: bytes, name: str) -> GGUFError:
    """The error for a file that does not start with GGUF, naming what its first bytes look like."""
    what, hint = _guess_format(head, name)
    return GGUFError(f"This is not a GGUF file: {what}.", hint)


def _guess_format(head: bytes, name: str) -> tuple[str, str]:
    text = head.lstrip().lower()
    if not head:
        return "it is empty", "The download probably failed: download it again."
    if head.count(0) == len(head):
        return "it starts with zeros", "The download probably never finished: download it again."
    if text.startswith(b"version https://git-lfs"):
        return (
            "it is a Git LFS pointer, a note of where the real file is",
            "Run `git lfs pull` in that checkout, or download the file itself.",
        )
    if text.startswith((b"<!doctype", b"<html", b"<?xml")):
        return "it is a web page, saved under this name", "Use the download link, not the page that shows it."
    if head.startswith(b"PK\x03\x04"):
        return "it looks like a PyTorch checkpoint or another zip archive", CONVERT_HINT
    if head.startswith((b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")):
        return "it looks like a Python pickle, such as a PyTorch checkpoint", CONVERT_HINT
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 1 << 30:
        return "it looks like a safetensors file", CONVERT_HINT
    if head[:4] in (b"lmgg", b"tjgg", b"fmgg", b"algg"):
        return "it is a ggml model from before GGUF", "llama.cpp no longer reads that: get a GGUF version."
    if text.startswith((b"{", b"[")):
        return "it looks like JSON", "Download the .gguf file itself."
    if ".part" in name or ".gguf-split" in name:
        return (
            "it looks like a later piece of a file cut in parts",
            "Join the pieces first, in order, with `cat`.",
        )
    return f"it starts with {head[:4]!r}", CONVERT_HINT
