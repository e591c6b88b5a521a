"""Mutate small GGUF files and check that the header reader stays within its bounds.

    python benchmarks/fuzz_gguf.py 100000 1

Arguments: number of mutants, seed. Every mutant must give a header or a GGUFError, take less than 100 ms of
processor time and fit into 50 MB of address space more than the process had at the start. The first that does
not is kept as fuzz-failure.gguf and ends the run with exit code 1; a summary is printed as one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import struct
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import gguf
import numpy as np

from edgeserve.errors import GGUFError
from edgeserve.gguf import check_loadable, read_header

MAX_CPU_S = 0.1
MAX_EXTRA_BYTES = 50_000_000
NASTY_INTS = (0, 1, 2, 4, 5, 7, 8, 9, 31, 32, 63, 64, 255, 256, 4096, 65535, 65536, 1 << 20, 1 << 24, 1 << 30)
NASTY_U64 = (
    *NASTY_INTS,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 1,
    1 << 32,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 1,
)


def seed_files(folder: Path) -> list[bytes]:
    """Well-formed files of several kinds, written by the gguf package."""
    kinds = {
        "plain": {},
        "big": {"endianess": gguf.GGUFEndian.BIG},
        "split": {"split": True},
        "aligned": {"alignment": 4096},
        "many": {"num_tensors": 40, "num_tokens": 300},
    }
    return [_written(folder / f"{name}.gguf", **options) for name, options in kinds.items()]


def _written(
    path: Path,
    endianess: gguf.GGUFEndian = gguf.GGUFEndian.LITTLE,
    split: bool = False,
    alignment: int = 0,
    num_tensors: int = 3,
    num_tokens: int = 20,
) -> bytes:
    writer = gguf.GGUFWriter(path, "llama", endianess=endianess)
    if alignment:
        writer.add_custom_alignment(alignment)
    if split:
        writer.add_uint16("split.no", 0)
        writer.add_uint16("split.count", 2)
        writer.add_int32("split.tensors.count", num_tensors)
    writer.add_block_count(2)
    writer.add_head_count_kv([2, 0])
    writer.add_float64("llama.made_up", 1.5)
    writer.add_token_list([f"token{i}" for i in range(num_tokens)])
    writer.add_token_scores([0.5] * num_tokens)
    writer.add_chat_template("{{ messages }}")
    writer.add_bool("tokenizer.ggml.add_bos_token", False)
    for index in range(num_tensors):
        writer.add_tensor(f"blk.{index}.attn_q.weight", np.ones((8, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def mutant(rng: random.Random, seeds: list[bytes]) -> bytes:
    """A seed with one to four mutations; most hit the first kilobytes, where the header is."""
    data = bytearray(rng.choice(seeds))
    for _ in range(rng.choice((1, 1, 1, 2, 3, 4))):
        data = rng.choice(MUTATIONS)(rng, data, min(len(data), 4096))
        if len(data) < 8:
            break
    return bytes(data)


def _flip_bit(rng: random.Random, data: bytearray, reach: int) -> bytearray:
    data[rng.randrange(reach)] ^= 1 << rng.randrange(8)
    return data


def _set_byte(rng: random.Random, data: bytearray, reach: int) -> bytearray:
    data[rng.randrange(reach)] = rng.randrange(256)
    return data


def _plant_u64(rng: random.Random, data: bytearray, reach: int) -> bytearray:
    place = rng.randrange(reach)
    data[place : place + 8] = struct.pack(rng.choice("<>") + "Q", rng.choice(NASTY_U64))
    return data


def _plant_u32(rng: random.Random, data: bytearray, reach: int) -> bytearray:
    place = rng.randrange(reach)
    data[place : place + 4] = struct.pack(rng.choice("<>") + "I", rng.choice(NASTY_INTS))
    return data


def _plant_count(rng: random.Random, data: bytearray, reach: int) -> bytearray:
    place = rng.choice((4, 8, 16))
    data[place : place + 8] = struct.pack("<Q", rng.choice(NASTY_U64))
    return data


def _cut(rng: random.Random, data: bytearray, reach: int) -> bytearray:
    return data[: rng.randrange(reach)]


def _drop(rng: random.Random, data: bytearray, reach: int) -> bytearray:
    place = rng.randrange(reach)
    del data[place : place + rng.randrange(1, 17)]
    return data


def _insert(rng: random.Random, data: bytearray, reach: int) -> bytearray:
    place = rng.randrange(reach)
    data[place:place] = rng.randbytes(rng.randrange(1, 17))
    return data


def _repeat(rng: random.Random, data: bytearray, reach: int) -> bytearray:
    place = rng.randrange(reach)
    piece = data[place : place + rng.randrange(1, 200)]
    data[place:place] = piece * rng.randrange(1, 20)
    return data


def _zero_tail(rng: random.Random, data: bytearray, reach: int) -> bytearray:
    # Zeros read as empty strings and empty tensors: the longest loops that small input can ask for.
    place = rng.randrange(reach)
    data[place:] = bytes(rng.choice((len(data) - place, 1 << 16, 1 << 20)))
    return data


MUTATIONS = (
    _flip_bit, _set_byte, _plant_u64, _plant_u64, _plant_u32, _plant_count,
    _cut, _drop, _insert, _repeat, _zero_tail,
)  # fmt: skip


def examine(path: Path) -> str:
    """What the reader says of the file: a word for the summary. Anything but a GGUFError comes through."""
    try:
        header = read_header(path)
        check_loadable(header)
    except GGUFError as error:
        assert error.message
        return "refused"
    assert header.total_bytes <= header.file_bytes
    return "loadable"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("num_mutants", type=int)
    parser.add_argument("seed", type=int)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    outcomes: Counter[str] = Counter()
    slowest_s = 0.0
    with tempfile.TemporaryDirectory() as folder:
        seeds = seed_files(Path(folder))
        path = Path(folder) / "mutant.gguf"
        examine(Path(folder) / "plain.gguf")
        _limit_memory()
        for _ in range(arguments.num_mutants):
            data = mutant(rng, seeds)
            path.write_bytes(data)
            start_s = time.process_time()
            try:
                outcomes[examine(path)] += 1
                failure = ""
            except Exception as error:
                failure = f"{type(error).__name__}: {error}"
            took_s = time.process_time() - start_s
            slowest_s = max(slowest_s, took_s)
            if failure or took_s > MAX_CPU_S:
                Path("fuzz-failure.gguf").write_bytes(data)
                print(failure or f"took {took_s * 1e3:.0f} ms", file=sys.stderr)
                return 1
    summary = {
        "mutants": arguments.num_mutants,
        "seed": arguments.seed,
        "slowest_ms": round(slowest_s * 1e3, 2),
    }
    print(json.dumps(summary | outcomes))
    return 0


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MAX_EXTRA_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    raise SystemExit(main())
