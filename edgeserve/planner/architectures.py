"""What llama.cpp does with each architecture's attention: one table line per architecture.

Owns the facts that no GGUF header carries because llama.cpp writes them into its code: which class of memory
an architecture gets, which layers see a window only, which layers are recurrent, which keys count. Knows
nothing of a particular model (`hparams`), of bytes (`kv_families`) or of devices (`placement`).

Sources: `create_memory` in llama-model.cpp, `llm_arch_is_recurrent`, `llm_arch_is_hybrid` and
`llm_arch_supports_rs_rollback` in llama-arch.cpp, and `load_arch_hparams` of each file in src/models.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal


class Memory(Enum):
    """Which class of llama.cpp's memory a context of this architecture gets."""

    NONE = "no cache"
    PLAIN = "key-value cache"
    MSA = "key-value cache and indexer cache"
    DSA = "latent cache and indexer cache"
    DSV4 = "raw, compressed and indexer caches"
    RECURRENT = "recurrent state"
    HYBRID = "key-value cache and recurrent state"


@dataclass(frozen=True, slots=True)
class Window:
    """Which layers keep a sliding window only, and how long it is.

    `layers` "pattern": the header's array or period, else `period` (`dense_first`: the first layer of a
    period is the full one, else the last). "array": the header must have the array. "all": every layer.
    "attention": every layer with KV heads. `optional`: without a window in the header every layer is full.
    `default_n` is used when the header has none, `fixed_n` whatever it has, `n_layer` limits the rule to
    models of that depth.
    """

    period: int = 0
    dense_first: bool = False
    layers: Literal["pattern", "array", "all", "attention"] = "pattern"
    optional: bool = False
    default_n: int | None = None
    fixed_n: int | None = None
    n_layer: int | None = None


class Recurrent(Enum):
    """Which layers keep a recurrent state."""

    NONE = "none"
    EVERY = "every layer"
    WITHOUT_KV_HEADS = "layers without KV heads"
    WITHOUT_KV_HEADS_AND_FFN = "layers without KV heads and feed-forward"
    BY_INTERVAL = "all but every n-th layer"


State = Literal["none", "ssm", "ssm_without_groups", "wkv", "shortconv", "kda", "lightning"]
"""Which keys give the size of a recurrent state (`llama_hparams::n_embd_r` and `n_embd_s`)."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """One table line. `mla`: the latent-attention keys are read. `tied_copy`: a missing output matrix is
    replaced by a copy of the token embeddings, which an accelerator must hold a second time.
    `mtp_tensors_loaded`: parts of the draft block that are loaded although drafts are not asked for.
    """

    memory: Memory = Memory.PLAIN
    window: Window | None = None
    recurrent: Recurrent = Recurrent.NONE
    state: State = "none"
    full_attention_interval: int = 0
    mla: bool = False
    causal: bool = True
    rollback: bool = False
    tied_copy: bool = True
    encoder: bool = False
    mtp_tensors_loaded: tuple[str, ...] = ()


_PLAIN = Architecture()
_ENCODER = Architecture(memory=Memory.NONE, tied_copy=False)
_DIFFUSION = Architecture(memory=Memory.NONE, causal=False)
_MLA = Architecture(mla=True)
_DSA = Architecture(memory=Memory.DSA, mla=True)
_SSM = Architecture(memory=Memory.RECURRENT, recurrent=Recurrent.EVERY, state="ssm")
_RWKV = replace(_SSM, state="wkv")
_HYBRID = Architecture(memory=Memory.HYBRID, recurrent=Recurrent.WITHOUT_KV_HEADS, state="ssm")
_KDA = replace(_HYBRID, state="kda", mla=True)
_DELTA_NET = replace(_HYBRID, recurrent=Recurrent.BY_INTERVAL, full_attention_interval=4)
_NEMOTRON_H = replace(_HYBRID, recurrent=Recurrent.WITHOUT_KV_HEADS_AND_FFN, rollback=True)
_SHORTCONV = replace(_HYBRID, state="shortconv", rollback=True)


def _windowed(
    period: int = 0,
    dense_first: bool = False,
    layers: Literal["pattern", "array", "all", "attention"] = "pattern",
    optional: bool = False,
    default_n: int | None = None,
    fixed_n: int | None = None,
    n_layer: int | None = None,
) -> Architecture:
    window = Window(period, dense_first, layers, optional, default_n, fixed_n, n_layer)
    return Architecture(window=window)


def _lines(names: str, line: Architecture) -> dict[str, Architecture]:
    return dict.fromkeys(names.split(), line)


_BY_ARRAY = _windowed(layers="array")

# Optional parts of a draft block that three loaders create without the skip flag.
_SHARED_HEAD = ("nextn.embed_tokens", "nextn.shared_head_head", "nextn.shared_head_norm")
_FFN = ("ffn_gate", "ffn_down", "ffn_up", "ffn_gate_inp", "exp_probs_b")
_EXPERTS = ("ffn_gate_exps", "ffn_down_exps", "ffn_up_exps", "ffn_gate_up_exps")
_SHARED_EXPERTS = ("ffn_gate_shexp", "ffn_down_shexp", "ffn_up_shexp")

ARCHITECTURES: dict[str, Architecture] = {
    # Every layer has keys and values for every cell.
    **_lines(
        """
        apertus arcee arctic baichuan bailingmoe bailingmoe2 bloom chameleon chatglm codeshell
        cogvlm command-r dbrx deci deepseek deepseek2-ocr dots1 eagle3 ernie4_5 ernie4_5-moe exaone
        falcon gemma glm4 glm4moe gpt2 gptj gptneox granite granitemoe graniteswitch grok grovemoe
        hrm_text hunyuan-dense hunyuan-moe hunyuan_vl internlm2 jais jais2 llama llama-embed
        maincoder minicpm minicpm3 minimax-m2 mistral3 mpt nanbeige nemotron olmo olmoe openelm
        orion paddleocr pangu-embedded phi2 phi3 phimoe plamo plm pockettts qwen qwen2 qwen2moe
        qwen2vl qwen3 qwen3moe qwen3tts qwen3vl qwen3vlmoe refact seed_oss smollm3 stablelm
        starcoder starcoder2 talkie xverse
        """,
        _PLAIN,
    ),
    "bitnet": replace(_PLAIN, tied_copy=False),
    "t5": replace(_PLAIN, encoder=True),
    "t5encoder": replace(_PLAIN, encoder=True),
    "hy_v3": replace(_PLAIN, mtp_tensors_loaded=_SHARED_HEAD + _FFN + _EXPERTS + _SHARED_EXPERTS),
    # No cache at all: the whole text is computed at once.
    **_lines(
        "bert eurobert jina-bert-v2 jina-bert-v3 neo-bert nomic-bert nomic-bert-moe wavtokenizer-dec",
        _ENCODER,
    ),
    "modern-bert": replace(_ENCODER, window=Window(3, dense_first=True, optional=True)),
    "gemma-embedding": replace(_DIFFUSION, window=Window(6)),
    **_lines("dream llada llada-moe rnd1", _DIFFUSION),
    # Some layers keep a window only.
    "afmoe": _windowed(4, optional=True),
    "cohere2": _windowed(4),
    "cohere2moe": replace(_windowed(4, dense_first=True), mtp_tensors_loaded=_SHARED_HEAD),
    "exaone-moe": _windowed(4, default_n=128),
    "exaone4": _windowed(4, default_n=4096, n_layer=64),
    "gemma2": _windowed(2, default_n=4096),
    "gemma3": _windowed(6, optional=True),
    "gemma3n": _windowed(5),
    "gemma4": _BY_ARRAY,
    "gpt-oss": _windowed(2),
    "granite_swa": _BY_ARRAY,
    "laguna": _windowed(4, dense_first=True, optional=True),
    "llama4": _windowed(4, default_n=8192, fixed_n=8192),
    "maple": _BY_ARRAY,
    "mellum": _windowed(4, optional=True),
    "mimo2": _BY_ARRAY,
    "muse-glimmer": _windowed(4),
    "olmo2": _windowed(4, optional=True),
    "plamo3": _windowed(8, optional=True),
    "smallthinker": _windowed(4, dense_first=True, optional=True, fixed_n=4096),
    "spark2_5": _BY_ARRAY,
    "step35": replace(
        _BY_ARRAY,
        mtp_tensors_loaded=(
            *_SHARED_HEAD, *_FFN, *_EXPERTS, *_SHARED_EXPERTS, "attn_q_norm", "attn_k_norm", "attn_gate"
        ),
    ),
    # One latent vector a token instead of keys and values, when the header says so.
    **_lines("deepseek2 mistral4", _MLA),
    # Latent or full attention over the cells that a small indexer picks.
    **_lines("deepseek32 glm-dsa", replace(_DSA, mtp_tensors_loaded=("exp_probs_b",))),
    "hy_v4": _DSA,
    "dots3note": replace(_DSA, window=Window(layers="array")),
    "minimax-m3": Architecture(memory=Memory.MSA),
    "deepseek4": Architecture(memory=Memory.DSV4, window=Window(layers="all"), rollback=True),
    # A state of constant size instead of a cache.
    "mamba": replace(_SSM, state="ssm_without_groups"),
    "mamba2": _SSM,
    **_lines("rwkv6 rwkv6qwen2 rwkv7 arwkv7", _RWKV),
    # Some layers attend, the others keep a state.
    "jamba": replace(_HYBRID, state="ssm_without_groups"),
    "falcon-h1": replace(_HYBRID, recurrent=Recurrent.EVERY),
    "plamo2": _HYBRID,
    "granitehybrid": _HYBRID,
    **_lines("nemotron_h nemotron_h_moe", _NEMOTRON_H),
    "lfm2": replace(_SHORTCONV, window=Window(layers="attention", optional=True)),
    "lfm2moe": _SHORTCONV,
    "qwen3next": _DELTA_NET,
    **_lines("qwen35 qwen35moe qwen4exp", replace(_DELTA_NET, rollback=True)),
    "minimax-01": replace(_DELTA_NET, state="lightning", full_attention_interval=8),
    "kimi-linear": _KDA,
    **_lines("bailingmoe3 kimi-k3 glm5-next", replace(_KDA, rollback=True)),
}  # fmt: skip
"""All architectures of llama.cpp 0c1e570 that a model of its own can have; drafts for another model are left
out ("dflash", "gemma4-assistant"), and so are vision projectors ("clip")."""


def architecture_of(name: str) -> Architecture | None:
    """The table line of `name` (`general.architecture`), None for one that llama.cpp did not have."""
    return ARCHITECTURES.get(name)
