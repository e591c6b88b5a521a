"""A model's sizes as llama.cpp reads them from a GGUF header: layers, heads, windows, states.

Owns the reading of header keys, once, with llama.cpp's own defaults (`load_hparams` in llama-model.cpp and
`load_arch_hparams` in src/models). Knows nothing of settings, bytes or devices. A key that is missing and has
no default is an error that names it: a size is never made up.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgeserve.errors import GGUFError
from edgeserve.gguf_header import GGUFHeader
from edgeserve.planner.architectures import Architecture, Recurrent, Window, architecture_of

_MAX_LAYERS = 512
_GEMMA3N_LAYERS_WITH_KV = 20
# GLM 5.2 was released before its files named the layers that own an indexer (glm-dsa.cpp).
_GLM_5_2_N_CTX_TRAIN = 1 << 20
_GLM_5_2_INDEXER_LAYERS = 78
_KDA_DEFAULT_CONV = 4


@dataclass(frozen=True, slots=True)
class HParams:
    """Sizes of one model; every tuple has one entry a layer, `n_layer_all` in all.

    Layers from `n_layer` on are draft blocks (`n_layer_nextn` of them) that a plain context neither runs nor
    caches. `n_embd_head_k`/`_v` already account for windowed layers. `n_embd_r` and `n_embd_s` are the
    elements of one recurrent state (convolution part, scan part), `n_embd_ple` those of a third one that
    qwen4exp has. `exact` is False for an architecture that the table does not know: then plain attention is
    assumed.
    """

    name: str
    architecture: Architecture
    exact: bool
    n_layer_all: int
    n_layer_nextn: int
    n_embd: int
    n_embd_out: int
    n_vocab: int
    n_ctx_train: int
    causal: bool
    n_head: tuple[int, ...]
    n_head_kv: tuple[int, ...]
    n_ff: tuple[int, ...]
    n_embd_head_k: tuple[int, ...]
    n_embd_head_v: tuple[int, ...]
    n_embd_head_k_swa: int
    n_swa: int
    has_window: bool
    is_swa: tuple[bool, ...]
    is_recr: tuple[bool, ...]
    has_kv: tuple[bool, ...]
    is_mla: bool
    n_embd_r: int
    n_embd_s: int
    n_embd_ple: int
    is_ple: tuple[bool, ...]
    indexer_head_size: int
    indexer_top_k: int
    indexer_kpool: int
    is_indexer_full: tuple[bool, ...]
    compress_ratios: tuple[int, ...]
    n_layer_dense_lead: int

    @property
    def n_layer(self) -> int:
        """Layers that a plain context runs."""
        return self.n_layer_all - self.n_layer_nextn

    def n_embd_k_gqa(self, il: int) -> int:
        """Elements of one cell's keys in layer `il`."""
        return self.n_embd_head_k[il] * self.n_head_kv[il]

    def n_embd_v_gqa(self, il: int) -> int:
        """Elements of one cell's values in layer `il`."""
        return self.n_embd_head_v[il] * self.n_head_kv[il]

    @property
    def n_embd_v_gqa_max(self) -> int:
        """The widest layer's values: what every layer gets when the cache keeps values transposed."""
        return max(self.n_embd_v_gqa(il) for il in range(self.n_layer_all))


def read_hparams(header: GGUFHeader) -> HParams:
    """Sizes of the model of `header`.

    Raises GGUFError when a key that llama.cpp needs is missing or makes no sense.
    """
    return _Reader(header).read()


class _Reader:
    """One header's keys, with the architecture's prefix, and the layers counted so far."""

    def __init__(self, header: GGUFHeader) -> None:
        self.header = header
        self.name = header.architecture
        known = architecture_of(self.name)
        self.exact = known is not None
        self.arch = known or Architecture()
        self.n_layer_all = self.required("block_count")
        if not 0 < self.n_layer_all <= _MAX_LAYERS:
            raise GGUFError(
                f"This header says {self.n_layer_all} layers; llama.cpp takes 1 to {_MAX_LAYERS}."
            )
        self.n_layer_nextn = self._nextn()
        self._add_router_layer()

    # --- single keys

    def integer(self, key: str, default: int = 0) -> int:
        value = self.header.arch_get(key)
        return int(value) if isinstance(value, bool | int | float) else default

    def required(self, key: str) -> int:
        if self.header.arch_get_int(key) is None:
            prefix = f"{self.name}." if self.name else "(no general.architecture)."
            raise GGUFError(
                f"Cannot size this model: the key {prefix}{key} is missing from its header.",
                "The file is incomplete, or was converted by a tool that left the key out.",
            )
        return self.integer(key)

    def has(self, key: str) -> bool:
        return self.header.arch_get(key) is not None

    def per_layer(self, key: str, default: tuple[int, ...]) -> tuple[int, ...]:
        """An array with one entry a layer, or one number for all of them."""
        value = self.header.arch_get(key)
        if isinstance(value, tuple):
            return _fit(tuple(int(item) for item in value), self.n_layer_all)
        return (self.integer(key),) * self.n_layer_all if value is not None else default

    @property
    def n_layer(self) -> int:
        return self.n_layer_all - self.n_layer_nextn

    # --- layers

    def _nextn(self) -> int:
        n_nextn = min(self.integer("nextn_predict_layers"), self.n_layer_all)
        if n_nextn and self.name == "deepseek4":
            probe = f"blk.{self.n_layer_all - n_nextn}.nextn.eh_proj.weight"
            return n_nextn if any(tensor.name == probe for tensor in self.header.tensors) else 0
        return n_nextn

    def _add_router_layer(self) -> None:
        # graniteswitch keeps its adapter router's keys in one more layer with a single head.
        self.router = self.name == "graniteswitch"
        if self.router:
            self.n_layer_all, self.n_layer_nextn = self.n_layer + 1, 1

    def heads(self, key: str, default: tuple[int, ...]) -> tuple[int, ...]:
        heads = self.per_layer(key, default)
        return (*heads[: self.n_layer], 1) if self.router else heads

    def read(self) -> HParams:
        n_embd = self.required("features_length" if self.name == "wavtokenizer-dec" else "embedding_length")
        n_head = self.heads("attention.head_count", (0,) * self.n_layer_all)
        n_head_kv = self.heads("attention.head_count_kv", n_head)
        n_ff = self.per_layer("feed_forward_length", (0,) * self.n_layer_all)
        n_swa, has_window, is_swa = self._window(n_head_kv)
        head_k, head_v = self._head_sizes(n_embd, n_head[0])
        head_k_swa = self.integer("attention.key_length_swa", head_k)
        head_v_swa = self.integer("attention.value_length_swa", head_v)
        n_embd_r, n_embd_s = self._state_size(n_embd, n_head[0], head_k)
        return self._repeat_loops(
            HParams(
                name=self.name,
                architecture=self.arch,
                exact=self.exact,
                n_layer_all=self.n_layer_all,
                n_layer_nextn=self.n_layer_nextn,
                n_embd=n_embd,
                n_embd_out=self._n_embd_out(n_embd),
                n_vocab=self._n_vocab(),
                n_ctx_train=self.required("context_length"),
                causal=self.arch.causal and bool(self.integer("attention.causal", 1)),
                n_head=n_head,
                n_head_kv=n_head_kv,
                n_ff=n_ff,
                n_embd_head_k=tuple(head_k_swa if swa else head_k for swa in is_swa),
                n_embd_head_v=tuple(head_v_swa if swa else head_v for swa in is_swa),
                n_embd_head_k_swa=head_k_swa,
                n_swa=n_swa,
                has_window=has_window,
                is_swa=is_swa,
                is_recr=self._recurrent(n_head_kv, n_ff),
                has_kv=self._has_kv(),
                is_mla=self._is_mla(),
                n_embd_r=n_embd_r,
                n_embd_s=n_embd_s,
                n_embd_ple=self._ple_state(n_embd),
                is_ple=self._ple_layers(),
                indexer_head_size=self.integer("attention.indexer.key_length"),
                indexer_top_k=self.integer("attention.indexer.top_k"),
                indexer_kpool=self.integer("attention.indexer.kpool") if self.name == "glm5-next" else 0,
                is_indexer_full=self._indexer_layers(),
                compress_ratios=self.per_layer("attention.compress_ratios", (0,) * self.n_layer_all),
                n_layer_dense_lead=self.integer("leading_dense_block_count"),
            )
        )

    # --- heads

    def _head_sizes(self, n_embd: int, n_head_0: int) -> tuple[int, int]:
        # llama.cpp looks at the first layer only: without heads there the sizes are 0, whatever the keys say.
        if n_head_0 == 0 and self.name != "plamo2":
            return 0, 0
        default = n_embd // n_head_0 if n_head_0 else 0
        head_k = self.integer("attention.key_length", default)
        head_v = self.integer("attention.value_length", default)
        if self.name in ("kimi-k3", "glm5-next"):
            head_v = self.required("attention.kv_lora_rank")
        return head_k, head_v

    def _is_mla(self) -> bool:
        keys = ("attention.key_length_mla", "attention.value_length_mla")
        return self.arch.mla and all(self.integer(key) for key in keys)

    def _has_kv(self) -> tuple[bool, ...]:
        count = self.n_layer_all
        if self.name == "gemma3n":
            count = _GEMMA3N_LAYERS_WITH_KV
        elif self.name == "gemma4":
            count -= self.integer("attention.shared_kv_layers")
        return tuple(il < count for il in range(self.n_layer_all))

    def _n_embd_out(self, n_embd: int) -> int:
        if self.name in ("deepseek4", "qwen4exp"):
            return self.required("hyper_connection.count") * n_embd
        key = "embedding_length" if self.name == "wavtokenizer-dec" else "embedding_length_out"
        return self.integer(key) or n_embd

    def _n_vocab(self) -> int:
        if self.header.n_vocab is not None:
            return self.header.n_vocab
        embeddings = [t for t in self.header.tensors if t.name in ("token_embd.weight", "output.weight")]
        return embeddings[0].ne[1] if embeddings else 0

    # --- windows

    def _window(self, n_head_kv: tuple[int, ...]) -> tuple[int, bool, tuple[bool, ...]]:
        rule = self.arch.window
        if rule is None or (rule.n_layer is not None and rule.n_layer != self.n_layer):
            return 0, False, (False,) * self.n_layer_all
        n_swa = self._window_length(rule)
        if n_swa == 0 and (rule.optional or rule.fixed_n is not None):
            return 0, False, (False,) * self.n_layer_all
        return n_swa, True, self._windowed_layers(rule, n_head_kv)

    def _window_length(self, rule: Window) -> int:
        key = "attention.sliding_window"
        if not self.has(key) and not rule.optional and rule.default_n is None:
            return self.required(key)
        found = self.integer(key, rule.default_n or 0)
        return rule.fixed_n if rule.fixed_n is not None and found else found

    def _windowed_layers(self, rule: Window, n_head_kv: tuple[int, ...]) -> tuple[bool, ...]:
        if rule.layers == "all":
            return (True,) * self.n_layer_all
        if rule.layers == "attention":
            return tuple(il < self.n_layer and n_head_kv[il] != 0 for il in range(self.n_layer_all))
        pattern = self.header.arch_get("attention.sliding_window_pattern")
        if isinstance(pattern, tuple):
            return tuple(bool(flag) for flag in _fit(pattern, self.n_layer_all))
        if rule.layers == "array":
            self.required("attention.sliding_window_pattern")
        period = self.integer("attention.sliding_window_pattern", rule.period)
        return tuple(
            il < self.n_layer and _in_window(il, period, rule.dense_first) for il in range(self.n_layer_all)
        )

    # --- recurrent layers

    def _recurrent(self, n_head_kv: tuple[int, ...], n_ff: tuple[int, ...]) -> tuple[bool, ...]:
        layers = range(self.n_layer_all)
        rule = self.arch.recurrent
        if rule is Recurrent.EVERY:
            return (True,) * self.n_layer_all
        if rule is Recurrent.WITHOUT_KV_HEADS:
            return tuple(il < self.n_layer and n_head_kv[il] == 0 for il in layers)
        if rule is Recurrent.WITHOUT_KV_HEADS_AND_FFN:
            return tuple(il < self.n_layer and n_head_kv[il] == 0 and n_ff[il] == 0 for il in layers)
        if rule is Recurrent.BY_INTERVAL:
            interval = self.integer("full_attention_interval", self.arch.full_attention_interval) or 1
            by_interval = tuple(int(il < self.n_layer and (il + 1) % interval != 0) for il in layers)
            return tuple(bool(flag) for flag in self.per_layer("attention.recurrent_layers", by_interval))
        return (False,) * self.n_layer_all

    def _state_size(self, n_embd: int, n_head_0: int, head_k: int) -> tuple[int, int]:
        """Elements of the convolution and of the scan part (`n_embd_r`, `n_embd_s`, llama-hparams.cpp)."""
        match self.arch.state:
            case "wkv":
                return self.integer("token_shift_count", 2) * n_embd, n_embd * self.required("wkv.head_size")
            case "shortconv":
                return n_embd * (self.required("shortconv.l_cache") - 1), 0
            case "kda":
                head = self.required("kda.head_dim")
                conv = self.integer("ssm.conv_kernel") or _KDA_DEFAULT_CONV
                return 3 * (conv - 1) * n_head_0 * head, head * head * n_head_0
            case "lightning":
                return 0, head_k * head_k * n_head_0
            case "ssm" | "ssm_without_groups":
                return self._ssm_state_size()
        return 0, 0

    def _ssm_state_size(self) -> tuple[int, int]:
        d_inner, d_state = self.required("ssm.inner_size"), self.required("ssm.state_size")
        n_group = self.integer("ssm.group_count") if self.arch.state == "ssm" else 0
        columns = max(self.required("ssm.conv_kernel") - 1, 0)
        return columns * (d_inner + 2 * n_group * d_state), d_state * d_inner

    def _ple_state(self, n_embd: int) -> int:
        if self.name != "qwen4exp" or not any(self._ple_layers()):
            return 0
        history = (self.required("ple.conv_kernel") - 1) * self.required("ple.ngram_size")
        return history * self.required("hyper_connection.count") * n_embd

    def _ple_layers(self) -> tuple[bool, ...]:
        layers = self.header.arch_get("ple.layers")
        marked = set(layers) if isinstance(layers, tuple) else set()
        return tuple(il in marked for il in range(self.n_layer_all))

    def _indexer_layers(self) -> tuple[bool, ...]:
        default = self.name in ("deepseek32", "glm5-next")
        by_layer = (int(default),) * self.n_layer_all
        if self.name == "glm-dsa":
            old = self.integer("context_length") < _GLM_5_2_N_CTX_TRAIN
            by_layer = tuple(int(old or _glm_5_2_indexer(il)) for il in range(self.n_layer_all))
        return tuple(bool(flag) for flag in self.per_layer("attention.indexer.types", by_layer))

    def _repeat_loops(self, hparams: HParams) -> HParams:
        # nanbeige runs its layers several times, each time with a cache of its own.
        n_loops = self.integer("num_loops", 1) if self.name == "nanbeige" else 1
        if n_loops <= 1:
            return hparams
        repeated = {
            name: value * n_loops
            for name in HParams.__slots__
            if isinstance(value := getattr(hparams, name), tuple)
        }
        others = {name: getattr(hparams, name) for name in HParams.__slots__ if name not in repeated}
        return HParams(**{**others, **repeated, "n_layer_all": hparams.n_layer_all * n_loops})


def _fit(values: tuple[int, ...] | tuple[float, ...] | tuple[bool, ...], length: int) -> tuple[int, ...]:
    """An array that is too short leaves the remaining layers at 0, as llama.cpp does."""
    return (*(int(value) for value in values[:length]), *(0,) * (length - len(values)))


def _in_window(il: int, period: int, dense_first: bool) -> bool:
    if period == 0:
        return True
    return il % period != 0 if dense_first else il % period < period - 1


def _glm_5_2_indexer(il: int) -> bool:
    return il < _GLM_5_2_INDEXER_LAYERS and (il < 2 or (il - 2) % 4 == 0)
