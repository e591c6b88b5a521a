from __future__ import annotations

import os
import struct
from pathlib import Path

import gguf_builder as build
import numpy as np
import pytest
from gguf import GGUFEndian, GGUFWriter
from gguf_builder import ARRAY, F64, STRING, U8, U64, Typed, save, with_metadata

from edgeserve.errors import GGUFError, ModelNotFoundError
from edgeserve.gguf import GGUFHeader, check_loadable, read_header

# -- what cannot be loaded ----------------------------------------------------------------------------------


def loading_error(path: Path) -> GGUFError:
    with pytest.raises(GGUFError) as caught:
        check_loadable(read_header(path))
    return caught.value


def test_big_endian_is_sized_but_not_loaded(tmp_path: Path) -> None:
    path = tmp_path / "big.gguf"
    writer = GGUFWriter(path, "llama", endianess=GGUFEndian.BIG)
    writer.add_block_count(7)
    writer.add_tensor("w", np.ones((4, 32), dtype=np.float32))
    for step in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
        writer.close,
    ):
        step()
    header = read_header(path)
    assert header.big_endian
    assert header.arch_get_int("block_count") == 7
    assert header.total_bytes == header.data_offset + 512
    assert "big-endian file and this is a little-endian machine" in loading_error(path).message


def test_projector_points_at_the_model_beside_it(tmp_path: Path) -> None:
    projector = save(
        tmp_path / "mmproj-x.gguf", build.model_bytes(with_metadata(general__architecture="clip"))
    )
    assert "vision projector" in loading_error(projector).message
    assert loading_error(projector).hint == "Give the model file itself."
    save(tmp_path / "x-Q4_K_M.gguf", build.model_bytes())
    save(tmp_path / "x-mmproj-f16.gguf", build.model_bytes() * 2)
    assert loading_error(projector).hint == "The model is probably x-Q4_K_M.gguf."


@pytest.mark.parametrize(
    ("kind", "says"),
    [("adapter", "LoRA adapter"), ("imatrix", "importance matrix"), ("mmproj", "vision projector")],
)
def test_other_kinds_of_gguf(tmp_path: Path, kind: str, says: str) -> None:
    path = save(tmp_path / "x.gguf", build.model_bytes(with_metadata(general__type=kind)))
    assert says in loading_error(path).message


def test_no_architecture(tmp_path: Path) -> None:
    path = save(tmp_path / "x.gguf", build.model_bytes({"general.name": "x"}))
    assert "which architecture" in loading_error(path).message


def test_vocabulary_only(tmp_path: Path) -> None:
    path = save(tmp_path / "vocab.gguf", build.model_bytes(tensors=[]))
    assert "no tensors" in loading_error(path).message


def test_cut_after_the_header_and_cut_in_the_data(tmp_path: Path) -> None:
    assert "ends after its header" in loading_error(save(tmp_path / "h.gguf", build.header_bytes())).message
    cut = loading_error(save(tmp_path / "c.gguf", build.model_bytes()[:-1]))
    assert "cut short: it has" in cut.message
    assert "download it again" in cut.hint


def test_holes_and_overlaps_between_tensors(tmp_path: Path) -> None:
    for offsets in ([0, 32, 64], [0, 2176, 20000], [64, 2176, 10368]):
        path = save(tmp_path / "o.gguf", build.model_bytes(offsets=offsets) + bytes(40000))
        assert "instead of" in loading_error(path).message


@pytest.mark.parametrize(
    ("head", "says"),
    [
        (b"", "empty"),
        (bytes(600), "zeros"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 12\n", "Git LFS pointer"),
        (b"\n<!DOCTYPE html><html></html>", "web page"),
        (b"PK\x03\x04abcdefgh" * 9, "PyTorch checkpoint or another zip"),
        (b"\x80\x02}q\x00." + b"x" * 50, "Python pickle"),
        (struct.pack("<Q", 40) + b'{"__metadata__":{}}' + b" " * 30, "safetensors"),
        (b"lmgg" + b"\x01" * 40, "before GGUF"),
        (b'{"architectures": ["Llama"]}', "JSON"),
        (b"random bytes here", "starts with b'rand'"),
    ],
)
def test_foreign_files_are_named(tmp_path: Path, head: bytes, says: str) -> None:
    with pytest.raises(GGUFError, match=says) as caught:
        read_header(save(tmp_path / "model.gguf", head))
    assert caught.value.message.startswith("model.gguf: This is not a GGUF file")
    assert caught.value.hint


def test_a_later_piece_of_a_cut_file(tmp_path: Path) -> None:
    with pytest.raises(GGUFError, match="later piece"):
        read_header(save(tmp_path / "m.gguf.part2of3", b"random bytes"))


def test_paths_that_are_not_files(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="There is no file"):
        read_header(tmp_path / "absent.gguf")
    with pytest.raises(GGUFError, match="is a folder"):
        read_header(tmp_path)
    with pytest.raises(GGUFError, match="cannot be read"):
        read_header("a\0b.gguf")
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(GGUFError, match="not a regular file"):
        read_header(tmp_path / "pipe.gguf")


# -- broken on purpose --------------------------------------------------------------------------------------

HUGE = (1 << 63, (1 << 64) - 1, 1 << 62, 1 << 32)


def refusal(tmp_path: Path, data: bytes) -> GGUFError:
    with pytest.raises(GGUFError) as caught:
        read_header(save(tmp_path / "broken.gguf", data))
    assert caught.value.message.startswith("broken.gguf: ")
    assert caught.value.hint
    return caught.value


@pytest.mark.parametrize("count", HUGE)
def test_huge_counts(tmp_path: Path, count: int) -> None:
    assert "tensors" in refusal(tmp_path, build.header_bytes(num_tensors=count)).message
    assert "keys" in refusal(tmp_path, build.header_bytes(num_keys=count)).message


def raw_value(type_id: int, rest: bytes) -> bytes:
    """A file with one key whose value is these raw bytes."""
    return b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + build.text("k") + struct.pack("<I", type_id) + rest


@pytest.mark.parametrize("length", HUGE)
@pytest.mark.parametrize("item_type", [STRING, U8, U64, F64])
def test_huge_lengths(tmp_path: Path, length: int, item_type: int) -> None:
    refusal(tmp_path, raw_value(ARRAY, struct.pack("<IQ", item_type, length) + bytes(64)))
    refusal(tmp_path, raw_value(STRING, struct.pack("<Q", length) + b"abc"))
    refusal(tmp_path, b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, length) + bytes(64))


@pytest.mark.parametrize("length", HUGE)
def test_huge_string_inside_an_array(tmp_path: Path, length: int) -> None:
    items = build.text("ok") + struct.pack("<Q", length) + b"x" * 40
    error = refusal(tmp_path, raw_value(ARRAY, struct.pack("<IQ", STRING, 4) + items))
    assert "past the end of the file" in error.message


def test_strings_past_the_end(tmp_path: Path) -> None:
    assert "past the end" in refusal(tmp_path, raw_value(STRING, struct.pack("<Q", 100) + b"abc")).message


def test_nested_arrays_and_unknown_types(tmp_path: Path) -> None:
    nested = raw_value(ARRAY, struct.pack("<IQ", ARRAY, 1) + struct.pack("<IQ", U8, 1) + b"x")
    assert "array of arrays" in refusal(tmp_path, nested).message
    assert "unknown type 13" in refusal(tmp_path, raw_value(13, bytes(16))).message


def test_empty_and_duplicate_keys(tmp_path: Path) -> None:
    assert "is empty" in refusal(tmp_path, build.header_bytes([("", 1)])).message
    assert "appears twice: 'a.b'" in refusal(tmp_path, build.header_bytes([("a.b", 1), ("a.b", 2)])).message


def test_overlong_names(tmp_path: Path) -> None:
    refusal(tmp_path, build.header_bytes([("k" * 70_000, 1)]))
    assert (
        "name of tensor 0 has 64 bytes"
        in refusal(tmp_path, build.header_bytes(tensors=[("n" * 64, (1,), 0, 4)])).message
    )


def test_duplicate_tensors(tmp_path: Path) -> None:
    assert "appear twice" in refusal(tmp_path, build.header_bytes(tensors=build.TINY_TENSORS[:1] * 2)).message


@pytest.mark.parametrize("value", [0, 3, 48, 1 << 30, Typed(STRING, "32"), Typed(ARRAY, (U8, [32])), True])
def test_impossible_alignment(tmp_path: Path, value: object) -> None:
    error = refusal(tmp_path, build.header_bytes(with_metadata(general__alignment=value)))
    assert "general.alignment" in error.message


def test_five_dimensions(tmp_path: Path) -> None:
    assert "5 dimensions" in refusal(tmp_path, build.header_bytes(tensors=[("t", (1,) * 5, 0, 4)])).message


@pytest.mark.parametrize(
    "ne", [(1 << 32, 1 << 32), (1 << 63,), ((1 << 64) - 1,), (1 << 31, 1 << 31, 1 << 31, 2)]
)
def test_overflowing_tensor_sizes(tmp_path: Path, ne: tuple[int, ...]) -> None:
    assert "impossibly large" in refusal(tmp_path, build.header_bytes(tensors=[("t", ne, 24, 0)])).message


def test_a_zero_beside_a_huge_dimension(tmp_path: Path) -> None:
    refusal(tmp_path, build.header_bytes(tensors=[("t", (0, (1 << 64) - 1), 24, 0)]))


def test_rows_that_are_no_whole_blocks(tmp_path: Path) -> None:
    assert "no multiple of 32" in refusal(tmp_path, build.header_bytes(tensors=[("t", (33,), 8, 34)])).message


@pytest.mark.parametrize("offset", [1, 31, (1 << 64) - 32])
def test_impossible_offsets(tmp_path: Path, offset: int) -> None:
    data = build.header_bytes(tensors=build.TINY_TENSORS[2:], offsets=[offset])
    assert "impossible offset" in refusal(tmp_path, data).message


def test_unknown_and_removed_tensor_types(tmp_path: Path) -> None:
    assert "unknown type 43" in refusal(tmp_path, build.header_bytes(tensors=[("t", (32,), 43, 0)])).message
    removed = refusal(tmp_path, build.header_bytes(tensors=[("t", (32,), 31, 0)]))
    assert "Q4_0 file" in removed.hint


@pytest.mark.parametrize(
    ("version", "says"), [(1, "version 1"), (4, "version 4"), (0, "version 0"), (1 << 24, "version 1,")]
)
def test_other_versions(tmp_path: Path, version: int, says: str) -> None:
    assert says in refusal(tmp_path, build.header_bytes(version=version)).message


def test_truncation_at_every_byte(tmp_path: Path) -> None:
    data = build.model_bytes()
    header_end = len(build.header_bytes())
    for length in range(4, header_end):
        refusal_or_header(tmp_path, data[:length], header_end)


def refusal_or_header(tmp_path: Path, data: bytes, header_end: int) -> None:
    path = save(tmp_path / "cut.gguf", data)
    try:
        header = read_header(path)
    except GGUFError as error:
        assert error.hint
        return
    # Only the padding after the last tensor may be missing from a header that reads.
    assert header_end - len(data) < 32
    assert isinstance(header, GGUFHeader)
    loading_error(path)
