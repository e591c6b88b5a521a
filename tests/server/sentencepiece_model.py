"""A model of a few kilobytes with a SentencePiece vocabulary, which puts a space before every text."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

WORDS = ["▁hello", "▁world", "hello", "world", "▁[INST]", "[INST]"]
N_EMBD, N_FF = 32, 64


def write(path: Path) -> Path:
    """Write the model; control tokens are <unk>, <s> and </s>."""
    tokens, scores, types = _vocabulary()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(256)
    writer.add_embedding_length(N_EMBD)
    writer.add_feed_forward_length(N_FF)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(N_EMBD // 2)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    for name, shape in _shapes(len(tokens)).items():
        writer.add_tensor(name, np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _vocabulary() -> tuple[list[str], list[float], list[int]]:
    kinds = gguf.TokenType
    entries = [("<unk>", 0.0, kinds.UNKNOWN), ("<s>", 0.0, kinds.CONTROL), ("</s>", 0.0, kinds.CONTROL)]
    entries += [(f"<0x{byte:02X}>", 0.0, kinds.BYTE) for byte in range(256)]
    pieces = dict.fromkeys(word[:end] for word in WORDS for end in range(1, len(word) + 1))
    pieces |= dict.fromkeys(letter for word in WORDS for letter in word)
    entries += [(piece, float(len(piece)), kinds.NORMAL) for piece in pieces]
    return (
        [text for text, _, _ in entries],
        [score for _, score, _ in entries],
        [int(kind) for _, _, kind in entries],
    )


def _shapes(n_vocab: int) -> dict[str, tuple[int, ...]]:
    square = (N_EMBD, N_EMBD)
    return {
        "token_embd.weight": (n_vocab, N_EMBD),
        "output.weight": (n_vocab, N_EMBD),
        "output_norm.weight": (N_EMBD,),
        "blk.0.attn_norm.weight": (N_EMBD,),
        "blk.0.ffn_norm.weight": (N_EMBD,),
        **{f"blk.0.attn_{name}.weight": square for name in ("q", "k", "v", "output")},
        "blk.0.ffn_gate.weight": (N_FF, N_EMBD),
        "blk.0.ffn_up.weight": (N_FF, N_EMBD),
        "blk.0.ffn_down.weight": (N_EMBD, N_FF),
    }
