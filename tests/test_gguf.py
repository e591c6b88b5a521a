from __future__ import annotations

from pathlib import Path

import gguf_builder as build
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGUFReader, GGUFWriter
from gguf_builder import ARRAY, U16, Typed, save, with_metadata

from edgeserve.errors import GGUFError
from edgeserve.ggml_types import GGML_TYPES, row_bytes, type_id_of
from edgeserve.gguf import (
    ArrayLength,
    TensorInfo,
    check_loadable,
    read_header,
    write_header_copy,
)
from edgeserve.gguf_parse import parse_header


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return save(tmp_path / "tiny.gguf", build.model_bytes())


def write_split(folder: Path, prefix: str = "m", count: int = 3, **first: object) -> list[Path]:
    paths = []
    for index in range(count):
        metadata = {"split.no": Typed(U16, index), "split.count": Typed(U16, count)}
        if index == 0:
            metadata |= build.TINY_METADATA | {"split.tensors.count": count} | first
        tensors = [(f"blk.{index}.w", (32, 4 + index), 0, 128 * (4 + index))]
        path = folder / f"{prefix}-{index + 1:05d}-of-{count:05d}.gguf"
        paths.append(save(path, build.model_bytes(metadata, tensors)))
    return paths


# -- reading ------------------------------------------------------------------------------------------------


def test_reads_metadata_and_tensors(tiny: Path) -> None:
    header = read_header(tiny)
    assert (header.version, header.alignment, header.big_endian) == (3, 32, False)
    assert header.architecture == "llama"
    assert header.name == "Tiny"
    assert header.arch_get("attention.head_count_kv") == (2,)
    assert header.arch_get_int("block_count") == 1
    assert header.get("llama.rope.freq_base") == 10000.0
    assert header.chat_template == "{{ messages[0].content }}"
    assert header.n_vocab == 32
    assert header.tensors[0] == TensorInfo("token_embd.weight", (64, 32, 1, 1), 8, 0, 2176, 0)
    assert header.tensors[1].type_name == "f16"
    assert header.num_parameters == 64 * 32 + 64 * 64 + 64
    assert header.total_bytes == header.file_bytes == tiny.stat().st_size
    assert not header.is_split
    check_loadable(header)


def test_token_arrays_are_skipped_by_length(tmp_path: Path) -> None:
    metadata = with_metadata(long__numbers=[7] * 4097, short__numbers=[7] * 4096)
    header = read_header(save(tmp_path / "a.gguf", build.model_bytes(metadata)))
    assert header.get("tokenizer.ggml.tokens") == ArrayLength(32, "string")
    assert header.get("long.numbers") == ArrayLength(4097, "u32")
    assert header.get("short.numbers") == (7,) * 4096
    assert str(header.get("long.numbers")) == "[4097 × u32]"


def test_every_value_type_and_order(tmp_path: Path) -> None:
    values = {
        0: 200,
        1: -5,
        2: 60000,
        3: -7,
        4: 1 << 31,
        5: -9,
        6: 0.5,
        7: True,
        10: 1 << 63,
        11: -1,
        12: 0.25,
    }
    metadata = {f"k.{t}": Typed(t, v) for t, v in values.items()}
    metadata |= {f"a.{t}": Typed(ARRAY, (t, [v, v])) for t, v in values.items()}
    for order in "<>":
        path = save(tmp_path / "types.gguf", build.model_bytes(build.TINY_METADATA | metadata, order=order))
        header = read_header(path)
        assert {t: header.get(f"k.{t}") for t in values} == values
        assert {t: header.get(f"a.{t}") for t in values} == {t: (v, v) for t, v in values.items()}


def test_agrees_with_the_gguf_package(tmp_path: Path) -> None:
    path = tmp_path / "oracle.gguf"
    writer = GGUFWriter(path, "qwen3")
    writer.add_block_count(3)
    writer.add_token_list(["a", "bc", ""])
    for index, ne in enumerate([(7,), (5, 32), (2, 3, 32), (1, 2, 3, 32)]):
        writer.add_tensor(f"t{index}", np.ones(ne, dtype=np.float32))
    for step in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
        writer.close,
    ):
        step()
    header, oracle = read_header(path), GGUFReader(path)
    assert [t.name for t in header.tensors] == [t.name for t in oracle.tensors]
    assert [t.n_bytes for t in header.tensors] == [t.n_bytes for t in oracle.tensors]
    assert [t.offset + header.data_offset for t in header.tensors] == [t.data_offset for t in oracle.tensors]
    assert header.data_offset == oracle.data_offset
    check_loadable(header)


def test_block_sizes_agree_with_the_gguf_package() -> None:
    ours = {t: (g.block, g.block_bytes) for t, g in GGML_TYPES.items() if t in set(GGML_QUANT_SIZES)}
    # The package still has q8_1 as it was with 32-bit scales; llama.cpp's block_q8_1 has two 16-bit ones.
    assert ours == {int(t): sizes for t, sizes in GGML_QUANT_SIZES.items()} | {9: (32, 36)}
    # Newer than the package.
    assert set(GGML_TYPES) - set(ours) <= {40, 41, 42}


def test_row_bytes() -> None:
    assert row_bytes(type_id_of("q4_K"), 512) == 288
    assert row_bytes(40, 128) == 72
    assert row_bytes(41, 256) == 36
    assert row_bytes(42, 128) == 36
    with pytest.raises(ValueError, match="no multiple of 256"):
        row_bytes(12, 100)
    with pytest.raises(KeyError):
        type_id_of("q9_9")


def test_a_vocabulary_longer_than_the_first_step(tmp_path: Path) -> None:
    metadata = with_metadata(tokenizer__ggml__tokens=["x" * 40] * 70_000)
    header = read_header(save(tmp_path / "big.gguf", build.model_bytes(metadata)))
    assert header.data_offset > 2 << 20
    assert header.n_vocab == 70_000


def test_version_2_and_scalars_without_dimensions(tmp_path: Path) -> None:
    header = read_header(save(tmp_path / "v2.gguf", build.model_bytes(version=2, tensors=[("s", (), 0, 4)])))
    assert header.version == 2
    assert header.tensors[0].ne == (1, 1, 1, 1)
    assert header.tensors[0].n_bytes == 4


def test_own_alignment(tmp_path: Path) -> None:
    metadata = with_metadata(general__alignment=4096)
    header = read_header(save(tmp_path / "a.gguf", build.model_bytes(metadata, alignment=4096)))
    assert header.data_offset == 4096
    assert header.tensors[1].offset == 4096
    check_loadable(header)


def test_a_wrong_type_is_not_a_number(tmp_path: Path) -> None:
    metadata = with_metadata(llama__block_count="many", llama__flag=True, general__name=7)
    header = read_header(save(tmp_path / "odd.gguf", build.model_bytes(metadata)))
    assert header.arch_get_int("block_count") is None
    assert header.arch_get_int("flag", 3) == 3
    assert header.name == ""


def test_invalid_utf8_is_replaced(tmp_path: Path) -> None:
    header = read_header(
        save(tmp_path / "u.gguf", build.model_bytes(with_metadata(general__name=b"\xff\xfeok")))
    )
    assert header.name == "\ufffd\ufffdok"


def test_an_overlong_template_is_not_kept(tmp_path: Path) -> None:
    metadata = with_metadata(tokenizer__chat_template="x" * ((1 << 20) + 1))
    header = read_header(save(tmp_path / "t.gguf", build.model_bytes(metadata)))
    assert header.get("tokenizer.chat_template") == ArrayLength((1 << 20) + 1, "byte")
    assert header.chat_template is None


def test_no_more_is_read_than_one_step_too_much() -> None:
    data = build.model_bytes(with_metadata(tokenizer__ggml__tokens=["abc" * 20] * 20_000))
    asked: list[int] = []

    def read(num_bytes: int) -> bytes:
        asked.append(num_bytes)
        return data[:num_bytes].ljust(num_bytes, b"\0")

    parsed = parse_header(read, 1 << 40)
    assert len(parsed.tensors) == 3
    assert asked == [1 << 20, 4 << 20]


def test_a_file_that_shrinks_while_it_is_read() -> None:
    data = build.model_bytes()
    with pytest.raises(GGUFError, match="became shorter"):
        parse_header(lambda num_bytes: data[:100], len(data))


# -- split models -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", [0, 1, 2])
def test_any_shard_stands_for_the_model(tmp_path: Path, which: int) -> None:
    paths = write_split(tmp_path)
    header = read_header(paths[which])
    assert header.is_split
    assert header.split_count == 3
    assert header.architecture == "llama"
    assert [(t.name, t.shard) for t in header.tensors] == [("blk.0.w", 0), ("blk.1.w", 1), ("blk.2.w", 2)]
    assert header.file_bytes == sum(p.stat().st_size for p in paths)
    assert header.total_bytes == header.file_bytes
    check_loadable(header)


def test_missing_shards_are_named(tmp_path: Path) -> None:
    paths = write_split(tmp_path, count=6)
    for path in paths[1:]:
        path.unlink()
    with pytest.raises(GGUFError, match=r"5 of the 6 parts .*m-00002-of-00006.gguf.* and 2 more") as caught:
        read_header(paths[0])
    assert str(tmp_path) in caught.value.hint


def test_disagreeing_shards_are_named(tmp_path: Path) -> None:
    paths = write_split(tmp_path)
    other = write_split(tmp_path, prefix="n", count=4)
    other[1].replace(paths[1])
    with pytest.raises(GGUFError, match=r"m-00002-of-00003.gguf does not belong.*split.count is 4"):
        read_header(paths[0])


def test_swapped_shards_are_named(tmp_path: Path) -> None:
    paths = write_split(tmp_path)
    keep = paths[1].read_bytes()
    paths[1].write_bytes(paths[2].read_bytes())
    paths[2].write_bytes(keep)
    with pytest.raises(GGUFError, match=r"m-00002-of-00003.gguf .*split.no is 2, not 1"):
        read_header(paths[0])


def test_split_tensor_count_is_checked(tmp_path: Path) -> None:
    paths = write_split(tmp_path, **{"split.tensors.count": 9})
    with pytest.raises(GGUFError, match="hold 3 tensors; the first part promises 9"):
        read_header(paths[2])


def test_split_name_is_checked(tmp_path: Path) -> None:
    paths = write_split(tmp_path)
    renamed = paths[0].rename(tmp_path / "model.gguf")
    with pytest.raises(GGUFError, match="one of 3 parts, but its name"):
        read_header(renamed)
    with pytest.raises(GGUFError, match="has 3 parts"):
        read_header(renamed.rename(tmp_path / "m-00001-of-00002.gguf"))


def test_the_same_tensor_in_two_shards(tmp_path: Path) -> None:
    for index in range(2):
        metadata = {"split.no": Typed(U16, index), "split.count": Typed(U16, 2)}
        save(tmp_path / f"m-0000{index + 1}-of-00002.gguf", build.model_bytes(metadata))
    with pytest.raises(GGUFError, match="in two parts"):
        read_header(tmp_path / "m-00001-of-00002.gguf")


# -- header copies ------------------------------------------------------------------------------------------


def test_header_copy_is_sparse_and_reads_the_same(tmp_path: Path) -> None:
    tensors = [("w", (1024, 65536), 0, 4 * 1024 * 65536)]
    source = save(tmp_path / "head.gguf", build.header_bytes(tensors=tensors))
    copy = write_header_copy(source, tmp_path / "copy.gguf")
    assert copy.stat().st_size == read_header(source).total_bytes
    assert copy.stat().st_blocks * 512 < 1 << 20
    assert read_header(copy).tensors == read_header(source).tensors
    with pytest.raises(GGUFError, match="header-only copy"):
        check_loadable(read_header(copy))


def test_header_copy_of_a_split_model(tmp_path: Path) -> None:
    header = read_header(write_split(tmp_path)[1])
    folder = tmp_path / "copies"
    folder.mkdir()
    first = write_header_copy(header, folder / "dry.gguf")
    assert first.name == "dry-00001-of-00003.gguf"
    assert read_header(first).tensors == header.tensors
    assert sum(p.stat().st_size for p in folder.iterdir()) == header.file_bytes


def test_header_copy_that_cannot_be_written(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(GGUFError, match="cannot be written"):
        write_header_copy(tiny, tmp_path / "no" / "folder.gguf")


def test_header_copy_of_an_impossible_size(tmp_path: Path) -> None:
    tensors = [("w", (1 << 60,), 24, 1 << 60)]
    with pytest.raises(GGUFError, match="cannot be written"):
        write_header_copy(
            save(tmp_path / "h.gguf", build.header_bytes(tensors=tensors)), tmp_path / "copy.gguf"
        )
