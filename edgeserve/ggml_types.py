"""The tensor types of ggml: id -> name, elements in a block, bytes of a block.

Owns the table that every size in bytes comes from. Knows nothing of files or models. Ids, names and block
sizes are those of ggml.h and ggml.c in llama.cpp 0c1e57098 (llama-cpp-python 0.3.36).
"""

from __future__ import annotations

from typing import Final, NamedTuple


class GGMLType(NamedTuple):
    """`block` elements are stored together in `block_bytes` bytes; a row is a whole number of blocks."""

    name: str
    block: int
    block_bytes: int


GGML_TYPES: Final[dict[int, GGMLType]] = {
    0: GGMLType("f32", 1, 4),
    1: GGMLType("f16", 1, 2),
    2: GGMLType("q4_0", 32, 18),
    3: GGMLType("q4_1", 32, 20),
    6: GGMLType("q5_0", 32, 22),
    7: GGMLType("q5_1", 32, 24),
    8: GGMLType("q8_0", 32, 34),
    9: GGMLType("q8_1", 32, 36),
    10: GGMLType("q2_K", 256, 84),
    11: GGMLType("q3_K", 256, 110),
    12: GGMLType("q4_K", 256, 144),
    13: GGMLType("q5_K", 256, 176),
    14: GGMLType("q6_K", 256, 210),
    15: GGMLType("q8_K", 256, 292),
    16: GGMLType("iq2_xxs", 256, 66),
    17: GGMLType("iq2_xs", 256, 74),
    18: GGMLType("iq3_xxs", 256, 98),
    19: GGMLType("iq1_s", 256, 50),
    20: GGMLType("iq4_nl", 32, 18),
    21: GGMLType("iq3_s", 256, 110),
    22: GGMLType("iq2_s", 256, 82),
    23: GGMLType("iq4_xs", 256, 136),
    24: GGMLType("i8", 1, 1),
    25: GGMLType("i16", 1, 2),
    26: GGMLType("i32", 1, 4),
    27: GGMLType("i64", 1, 8),
    28: GGMLType("f64", 1, 8),
    29: GGMLType("iq1_m", 256, 56),
    30: GGMLType("bf16", 1, 2),
    34: GGMLType("tq1_0", 256, 54),
    35: GGMLType("tq2_0", 256, 66),
    39: GGMLType("mxfp4", 32, 17),
    40: GGMLType("nvfp4", 64, 36),
    41: GGMLType("q1_0", 128, 18),
    42: GGMLType("q2_0", 64, 18),
}

# Files with these exist, but no present llama.cpp reads them; the value is what to convert to instead.
REMOVED_TYPES: Final[dict[int, str]] = {
    4: "q4_0",
    5: "q4_1",
    31: "q4_0",
    32: "q4_0",
    33: "q4_0",
    36: "iq4_nl",
    37: "iq4_nl",
    38: "iq4_nl",
}


def row_bytes(type_id: int, num_elements: int) -> int:
    """Bytes of one row of `num_elements`.

    KeyError for an unknown type, ValueError if the row is not a whole number of blocks.
    """
    ggml_type = GGML_TYPES[type_id]
    if num_elements % ggml_type.block:
        raise ValueError(f"{num_elements} is no multiple of {ggml_type.block}, the block of {ggml_type.name}")
    return num_elements // ggml_type.block * ggml_type.block_bytes


def type_id_of(name: str) -> int:
    """Id of the type that llama.cpp calls `name`, upper or lower case; KeyError if there is none."""
    for type_id, ggml_type in GGML_TYPES.items():
        if ggml_type.name.lower() == name.lower():
            return type_id
    raise KeyError(name)
