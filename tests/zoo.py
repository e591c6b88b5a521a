"""Small models of many architectures with random weights, written on the spot: what llama.cpp really loads.

Owns the recipes and the writing. The shapes come from the headers in data/memory_truth; recipes rename, drop,
copy and add tensors to reach architectures and features (draft blocks, tied embeddings, shared rope factors)
that are not among them. Every model has a vocabulary of bytes, so any text can be tokenized.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quantize

from edgeserve.gguf import GGUFHeader, read_header

HEADERS = Path(__file__).parent / "data" / "memory_truth" / "headers"
N_VOCAB = 320
_OLD_N_VOCAB = 128
_VOCAB_ROWS = ("token_embd.weight", "output.weight", "output.bias", "per_layer_token_embd.weight")

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Recipe:
    """How to make a model from a header of the truth data: its name there, and what to change.

    `arch` renames it; `metadata` sets keys (without the architecture's prefix; None removes one); `drop` is a
    pattern of tensors to leave out; `add` gets the remaining shapes and returns further ones.
    """

    base: str
    arch: str = ""
    metadata: Mapping[str, int | float | list[int] | None] = field(default_factory=dict)
    drop: str = ""
    add: Callable[[Shapes], Shapes] | None = None


def _copy_block(shapes: Shapes, source: int, target: int) -> Shapes:
    prefix = f"blk.{source}."
    return {
        f"blk.{target}.{name.removeprefix(prefix)}": shape
        for name, shape in shapes.items()
        if name.startswith(prefix) and not name.endswith("scale")  # draft blocks have no scales
    }


def _draft_block(source: int, target: int) -> Callable[[Shapes], Shapes]:
    """A multi-token-prediction block after the trunk: a copy of layer `source`, and its own projections."""

    def add(shapes: Shapes) -> Shapes:
        n_embd = shapes["output_norm.weight"][0]
        return _copy_block(shapes, source, target) | {
            f"blk.{target}.nextn.eh_proj.weight": (2 * n_embd, n_embd),
            f"blk.{target}.nextn.enorm.weight": (n_embd,),
            f"blk.{target}.nextn.hnorm.weight": (n_embd,),
            f"blk.{target}.nextn.shared_head_norm.weight": (n_embd,),
        }

    return add


def _rope_factors(shapes: Shapes) -> Shapes:
    return {"rope_freqs.weight": (64,)}


def _head_norms(shapes: Shapes) -> Shapes:
    return {f"blk.{il}.attn_{part}_norm.weight": (128,) for il in range(2) for part in "qk"}


_WITH_DRAFT = {"block_count": 3, "nextn_predict_layers": 1}

RECIPES: dict[str, Recipe] = {
    name: Recipe(f"tiny-{name}")
    for name in (
        # dense, grouped or single heads, biases, fused matrices, experts
        "bloom", "chatglm", "command-r", "dbrx-moe", "falcon", "gemma", "granite", "hunyuan-moe-moe",
        "internlm2", "minicpm3", "mistral3", "phi2", "plamo", "qwen2", "qwen2moe-moe", "qwen3moe-moe",
        "qwen3vl", "stablelm",
        # windows
        "afmoe-moe", "cohere2", "gemma2", "gemma4", "gpt-oss-moe", "mimo2-moe", "olmo2", "plamo3",
        "smallthinker-moe",
        # no cache
        "dream", "modern-bert", "nomic-bert", "neo-bert",
        # latent attention, indexers, compressed caches
        "glm-dsa-moe", "dots3note-moe", "deepseek4-moe",
        # recurrent and hybrid
        "arwkv7", "rwkv6", "rwkv7", "falcon-h1", "granitehybrid", "jamba-moe", "lfm2", "lfm2moe-moe",
        "minimax-01-moe", "nemotron_h", "plamo2", "qwen35", "qwen3next-moe", "bailingmoe3-moe",
    )
} | {
    "llama": Recipe("tiny-mistral3", arch="llama"),
    "llama-tied": Recipe("tiny-mistral3", arch="llama", drop=r"^output\.weight"),
    "llama-rope-factors": Recipe("tiny-mistral3", arch="llama", add=_rope_factors),
    "qwen3": Recipe("tiny-qwen3vl", arch="qwen3"),
    "gemma3": Recipe("tiny-gemma2", arch="gemma3", add=_head_norms),
    "deepseek2": Recipe("tiny-glm-dsa-moe", arch="deepseek2", drop="indexer"),
    "deepseek32": Recipe("tiny-glm-dsa-moe", arch="deepseek32"),
    "qwen35-draft": Recipe("tiny-qwen35", metadata=_WITH_DRAFT, add=_draft_block(1, 2)),
    "cohere2moe-draft": Recipe("tiny-cohere2moe-moe", metadata=_WITH_DRAFT, add=_draft_block(1, 2)),
    "deepseek32-draft": Recipe(
        "tiny-glm-dsa-moe", arch="deepseek32", metadata=_WITH_DRAFT, add=_draft_block(1, 2)
    ),
}  # fmt: skip


def zoo(directory: Path, names: tuple[str, ...] = tuple(RECIPES)) -> Iterator[tuple[str, Path]]:
    """Write the models of `names` into `directory`, one after the other."""
    for name in names:
        yield name, write_model(name, directory / f"{name}.gguf")


def write_model(name: str, path: Path, seed: int = 0) -> Path:
    """Write the model that RECIPES calls `name`. The same seed gives the same bytes."""
    recipe = RECIPES[name]
    header = truth_header(recipe.base, path.parent)
    arch = recipe.arch or header.architecture
    writer = GGUFWriter(path, arch)
    _write_metadata(writer, header, arch, recipe)
    _write_vocabulary(writer)
    _write_tensors(writer, header, recipe, np.random.default_rng(seed))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def truth_header(name: str, directory: Path) -> GGUFHeader:
    """A header of the truth data by its file's name, such as "tiny-qwen2"; unpacked into `directory`."""
    path = directory / f"{name}.gguf-header"
    path.write_bytes(gzip.decompress((HEADERS / f"{name}.gguf-header.gz").read_bytes()))
    return read_header(path)


def _write_metadata(writer: GGUFWriter, header: GGUFHeader, arch: str, recipe: Recipe) -> None:
    prefix = f"{header.architecture}."
    keys = {
        key.removeprefix(prefix): value
        for key, value in header.metadata.items()
        if key.startswith(prefix) and not key.endswith("vocab_size")
    }
    for key, value in (keys | dict(recipe.metadata)).items():
        if isinstance(value, bool):
            writer.add_bool(f"{arch}.{key}", value)
        elif isinstance(value, int):
            writer.add_uint32(f"{arch}.{key}", value)
        elif isinstance(value, float):
            writer.add_float32(f"{arch}.{key}", value)
        elif isinstance(value, tuple | list):
            writer.add_array(f"{arch}.{key}", list(value))
    writer.add_uint32("tokenizer.ggml.token_type_count", 2)


def _write_vocabulary(writer: GGUFWriter) -> None:
    """All bytes, then a few control tokens: byte-pair encoding without any merge that matters."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {b: chr(256 + n) for n, b in enumerate(others)}
    control = [f"<|{n}|>" for n in range(N_VOCAB - 256)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([letters[byte] for byte in range(256)] + control)
    writer.add_token_types([1] * 256 + [3] * len(control))
    writer.add_token_merges([f"{letters[0]} {letters[0]}"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)


def _write_tensors(writer: GGUFWriter, header: GGUFHeader, recipe: Recipe, rng: np.random.Generator) -> None:
    shapes: Shapes = {}
    for tensor in header.tensors:
        if not (recipe.drop and re.search(recipe.drop, tensor.name)):
            shapes[tensor.name] = _shape(tensor.name, tensor.ne)
    types = {tensor.name: tensor.type_id for tensor in header.tensors}
    added = recipe.add(shapes) if recipe.add else {}
    for name, shape in (shapes | added).items():
        weights = rng.standard_normal(tuple(reversed(shape)), dtype=np.float32) * np.float32(0.05)
        if name.endswith("norm.weight"):
            weights += np.float32(1)
        if types.get(name) == GGMLQuantizationType.Q8_0:
            quantized = quantize(weights, GGMLQuantizationType.Q8_0)
            writer.add_tensor(name, quantized, raw_dtype=GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(name, weights)


def _shape(name: str, ne: tuple[int, int, int, int]) -> tuple[int, ...]:
    shape = list(ne)
    while len(shape) > 1 and shape[-1] == 1:
        shape.pop()
    if name in _VOCAB_ROWS and shape[-1] == _OLD_N_VOCAB:
        shape[-1] = N_VOCAB
    return tuple(shape)
