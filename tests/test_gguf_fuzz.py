from __future__ import annotations

import contextlib
import importlib.util
import random
import struct
import tracemalloc
from collections import Counter
from pathlib import Path
from types import ModuleType

import gguf_builder as build
import pytest
from gguf_builder import ARRAY, F32, STRING, U8, U64, Typed

from edgeserve.errors import GGUFError
from edgeserve.gguf import read_header

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "fuzz_gguf.py"
MAX_BYTES = 50_000_000


@pytest.fixture(scope="module")
def fuzz() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fuzz_gguf", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_two_thousand_mutants(fuzz: ModuleType, tmp_path: Path) -> None:
    rng = random.Random(20)
    seeds = fuzz.seed_files(tmp_path)
    path = tmp_path / "mutant.gguf"
    outcomes: Counter[str] = Counter()
    tracemalloc.start()
    for _ in range(2000):
        path.write_bytes(fuzz.mutant(rng, seeds))
        outcomes[fuzz.examine(path)] += 1
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < MAX_BYTES
    # Mutants of both kinds, or the mutations are no test.
    assert min(outcomes["refused"], outcomes["loadable"]) > 100


def peak_of_reading(path: Path) -> int:
    tracemalloc.start()
    with contextlib.suppress(GGUFError):
        read_header(path)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak_bytes


def sparse(path: Path, head: bytes, total_bytes: int) -> Path:
    """`head`, then zeros up to `total_bytes` that take no disk."""
    with path.open("wb") as file:
        file.write(head)
        file.truncate(total_bytes)
    return path


def one_array(item_type: int, count: int) -> bytes:
    """The start of a file whose only value is an array that claims `count` items."""
    return (
        b"GGUF"
        + struct.pack("<IQQ", 3, 0, 1)
        + build.text("k")
        + struct.pack("<IIQ", ARRAY, item_type, count)
    )


@pytest.mark.parametrize("count", [900_000, 1 << 32, 1 << 40])
@pytest.mark.parametrize("item_type", [STRING, U8, U64, F32])
def test_zeros_without_end_as_an_array(tmp_path: Path, item_type: int, count: int) -> None:
    path = sparse(tmp_path / "zeros.gguf", one_array(item_type, count), 1 << 42)
    assert peak_of_reading(path) < MAX_BYTES


@pytest.mark.parametrize(("num_tensors", "num_keys"), [(1 << 40, 0), (0, 1 << 40), (4_096, 0), (0, 4_096)])
def test_zeros_without_end_as_entries(tmp_path: Path, num_tensors: int, num_keys: int) -> None:
    head = b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_keys)
    assert peak_of_reading(sparse(tmp_path / "zeros.gguf", head, 1 << 42)) < MAX_BYTES


def test_text_and_numbers_up_to_every_limit(tmp_path: Path) -> None:
    # One character outside the basic plane makes Python store four bytes for each of the string's characters.
    text = "x" * ((1 << 20) - 4) + "\U0001f600"
    pairs: list[tuple[str, object]] = [(f"text.{i}", text) for i in range(12)]
    pairs += [(f"array.{i}", Typed(ARRAY, (U64, [(1 << 40) + i] * 4096))) for i in range(64)]
    tensors = [(f"{i:063d}", (1 << 20, 1 << 10, 3, 2), 24, 1) for i in range(4_096)]
    path = tmp_path / "full.gguf"
    path.write_bytes(build.header_bytes(pairs, tensors, offsets=[i << 40 for i in range(4_096)]))
    header = read_header(path)
    assert len(header.tensors) == 4_096
    assert sum(isinstance(value, str) for value in header.metadata.values()) == 1
    assert peak_of_reading(path) < MAX_BYTES
