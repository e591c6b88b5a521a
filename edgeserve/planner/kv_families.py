"""The tensors that a context keeps: key-value caches, indexer caches and recurrent states.

Owns one rule for each of llama.cpp's memory classes. A rule lists tensors, layer by layer; where they lie and
what a device adds for alignment is not known here (`placement` sums them up). Sources: `create_memory` in
llama-model.cpp and the file named at each rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from edgeserve.planner.architectures import Memory
from edgeserve.planner.hparams import HParams
from edgeserve.planner.settings import CELL_STEP, ResolvedSettings, round_up

_F32 = 0
_CSA_RATIO, _HCA_RATIO = 4, 128

LayerFilter = Callable[[int], bool]


@dataclass(frozen=True, slots=True)
class CacheTensor:
    """`rows` rows of `row_elements` values of ggml type `type_id`, on the device of layer `il`.

    `is_state`: a recurrent state, which grows with sequences and not with the context.
    """

    il: int
    type_id: int
    row_elements: int
    rows: int
    is_state: bool = False


def context_tensors(hparams: HParams, settings: ResolvedSettings) -> list[CacheTensor]:
    """Every tensor of the context's memory, in llama.cpp's order within a device."""
    return list(_RULES[hparams.architecture.memory](hparams, settings))


@dataclass(frozen=True, slots=True)
class _Cache:
    """One `llama_kv_cache` (llama-kv-cache.cpp): `cells` a stream, keys and values by layer.

    `head_k`/`head_v` replace the model's head sizes and mean a single head; without values `k_only` is set.
    """

    hparams: HParams
    settings: ResolvedSettings
    cells: int
    k_only: bool
    n_stream: int
    head_k: tuple[int, ...] | None = None

    def tensors(self, keep: LayerFilter) -> Iterator[CacheTensor]:
        rows = self.cells * self.n_stream
        for il in range(self.hparams.n_layer_all):
            if not (self.hparams.has_kv[il] and keep(il)):
                continue
            yield CacheTensor(il, self.settings.type_k, self._k_elements(il), rows)
            if not self.k_only:
                yield CacheTensor(il, self.settings.type_v, self._v_elements(il), rows)

    def _k_elements(self, il: int) -> int:
        return self.head_k[il] if self.head_k is not None else self.hparams.n_embd_k_gqa(il)

    def _v_elements(self, il: int) -> int:
        # Transposed values are padded to the widest layer.
        if self.head_k is not None:
            heads = self.hparams.n_embd_head_v
            return max(heads) if self.settings.v_trans else heads[il]
        return self.hparams.n_embd_v_gqa_max if self.settings.v_trans else self.hparams.n_embd_v_gqa(il)


def _cache(hparams: HParams, settings: ResolvedSettings, cells: int | None = None) -> _Cache:
    cells = settings.n_ctx_seq if cells is None else cells
    return _Cache(hparams, settings, cells, hparams.is_mla, settings.n_stream)


def _indexer(hparams: HParams, settings: ResolvedSettings, k_only: bool, width: int = 1) -> _Cache:
    """A cache of one head with the indexer's keys. Windowed layers keep their own head size, since llama.cpp
    overwrites the full layers' size only (llama-kv-cache-dsa.cpp, -msa.cpp, llama-memory-hybrid-idx.cpp)."""
    head_k = tuple(
        hparams.n_embd_head_k_swa if swa else hparams.indexer_head_size * width for swa in hparams.is_swa
    )
    return _Cache(hparams, settings, settings.n_ctx_seq, k_only, settings.n_stream, head_k)


def window_cells(hparams: HParams, settings: ResolvedSettings, unified: bool) -> int:
    """Cells a stream of the windowed layers' cache (llama-kv-cache-iswa.cpp)."""
    if settings.swa_full:
        return settings.n_ctx_seq
    sequences = settings.n_seq_max if unified else 1
    wanted = hparams.n_swa * sequences + settings.n_ubatch
    return round_up(min(settings.n_ctx_seq, wanted), CELL_STEP)


def _attention(hparams: HParams, settings: ResolvedSettings, keep: LayerFilter) -> Iterator[CacheTensor]:
    """Keys and values of the layers that `keep` lets through, in one cache or, with a window, in two."""
    if not hparams.has_window:
        yield from _cache(hparams, settings).tensors(keep)
        return
    yield from _cache(hparams, settings).tensors(lambda il: keep(il) and not hparams.is_swa[il])
    cells = window_cells(hparams, settings, settings.kv_unified)
    yield from _cache(hparams, settings, cells).tensors(lambda il: keep(il) and hparams.is_swa[il])


def _trunk(hparams: HParams) -> LayerFilter:
    """Layers without the draft blocks (the router layer of graniteswitch is none; a model may be all
    draft)."""
    draft = hparams.n_layer_nextn > 0 and hparams.n_layer > 0 and hparams.name != "graniteswitch"
    return lambda il: il < hparams.n_layer or not draft


def _no_cache(_hparams: HParams, _settings: ResolvedSettings) -> Iterator[CacheTensor]:
    return iter(())


def _plain(hparams: HParams, settings: ResolvedSettings) -> Iterator[CacheTensor]:
    return _attention(hparams, settings, _trunk(hparams))


def _msa(hparams: HParams, settings: ResolvedSettings) -> Iterator[CacheTensor]:
    """minimax-m3 (llama-kv-cache-msa.cpp): the leading dense layers own no indexer."""
    yield from _cache(hparams, settings).tensors(lambda il: True)
    yield from _indexer(hparams, settings, k_only=False).tensors(lambda il: il >= hparams.n_layer_dense_lead)


def _dsa(hparams: HParams, settings: ResolvedSettings) -> Iterator[CacheTensor]:
    """Latent cache and indexer cache (llama-kv-cache-dsa.cpp), for dots3note with a windowed cache as well
    (llama-kv-cache-dsa-iswa.cpp). hy_v4 without an indexer has the first only, and skips no draft blocks."""
    keep: LayerFilter = (lambda il: True) if hparams.name == "hy_v4" else _trunk(hparams)
    yield from _attention(hparams, settings, keep)
    if hparams.name == "hy_v4" and not hparams.indexer_top_k:
        return
    every = hparams.name == "deepseek32"
    yield from _indexer(hparams, settings, hparams.is_mla).tensors(
        lambda il: il < hparams.n_layer and (every or hparams.is_indexer_full[il])
    )


def _dsv4(hparams: HParams, settings: ResolvedSettings) -> Iterator[CacheTensor]:
    """deepseek4 (llama-kv-cache-dsv4.cpp): keys only, one stream a sequence even when cells are unified."""
    streams = settings.n_seq_max

    def cache(cells: int, head_k: tuple[int, ...] | None = None) -> _Cache:
        return _Cache(hparams, settings, cells, k_only=True, n_stream=streams, head_k=head_k)

    def by_ratio(ratio: int) -> LayerFilter:
        return lambda il: hparams.compress_ratios[il] == ratio

    indexer = (hparams.indexer_head_size,) * hparams.n_layer_all
    yield from cache(window_cells(hparams, settings, unified=False)).tensors(lambda il: hparams.is_swa[il])
    yield from cache(_compressed_cells(settings, _CSA_RATIO)).tensors(by_ratio(_CSA_RATIO))
    yield from cache(_compressed_cells(settings, _HCA_RATIO)).tensors(by_ratio(_HCA_RATIO))
    yield from cache(_compressed_cells(settings, _CSA_RATIO), indexer).tensors(by_ratio(_CSA_RATIO))
    head_k = hparams.n_embd_head_k[0]
    yield from _compressor(hparams, settings, by_ratio(_CSA_RATIO), 2 * head_k, 2 * _CSA_RATIO)
    yield from _compressor(hparams, settings, by_ratio(_HCA_RATIO), head_k, _HCA_RATIO)
    yield from _compressor(
        hparams, settings, by_ratio(_CSA_RATIO), 2 * hparams.indexer_head_size, 2 * _CSA_RATIO
    )


def _compressed_cells(settings: ResolvedSettings, ratio: int) -> int:
    return round_up(max(1, -(-settings.n_ctx_seq // ratio)), CELL_STEP)


def _compressor(
    hparams: HParams, settings: ResolvedSettings, keep: LayerFilter, elements: int, rows: int
) -> Iterator[CacheTensor]:
    """`llama_dsv4_comp_state`: what has not been compressed yet, and its scores."""
    planes = settings.n_seq_max * (1 + settings.n_rs_seq)
    for il in filter(keep, range(hparams.n_layer)):
        for _ in ("kv", "score"):
            yield CacheTensor(il, _F32, elements, rows * planes, is_state=True)


def _states(hparams: HParams, settings: ResolvedSettings, keep: LayerFilter) -> Iterator[CacheTensor]:
    """Recurrent states (llama-memory-recurrent.cpp): always F32, whatever the cache types."""
    rows = settings.n_seq_max * (1 + settings.n_rs_seq)
    for il in filter(keep, range(hparams.n_layer)):
        yield CacheTensor(il, _F32, hparams.n_embd_r, rows, is_state=True)
        yield CacheTensor(il, _F32, hparams.n_embd_s, rows, is_state=True)
        if hparams.is_ple[il]:
            yield CacheTensor(il, _F32, hparams.n_embd_ple, rows, is_state=True)


def _recurrent(hparams: HParams, settings: ResolvedSettings) -> Iterator[CacheTensor]:
    return _states(hparams, settings, lambda il: True)


def _hybrid(hparams: HParams, settings: ResolvedSettings) -> Iterator[CacheTensor]:
    """Attention layers and recurrent layers side by side (llama-memory-hybrid.cpp, -iswa.cpp, -idx.cpp)."""
    attends, recurs = _hybrid_layers(hparams)
    yield from _attention(hparams, settings, attends)
    if hparams.name == "glm5-next":
        width = 3 if hparams.indexer_kpool else 1
        yield from _indexer(hparams, settings, k_only=True, width=width).tensors(
            lambda il: attends(il) and hparams.is_indexer_full[il]
        )
    elif hparams.name == "qwen4exp" and hparams.indexer_head_size:
        yield from _indexer(hparams, settings, k_only=True).tensors(attends)
    yield from _states(hparams, settings, recurs)


def _hybrid_layers(hparams: HParams) -> tuple[LayerFilter, LayerFilter]:
    is_recr = hparams.is_recr
    if hparams.name == "falcon-h1":
        return (lambda il: True), (lambda il: True)
    if hparams.name in ("nemotron_h", "nemotron_h_moe"):
        return (
            lambda il: not is_recr[il] and hparams.n_ff[il] == 0,
            lambda il: is_recr[il] and hparams.n_ff[il] == 0,
        )
    if hparams.architecture.full_attention_interval or hparams.name == "glm5-next":
        return (lambda il: il < hparams.n_layer and not is_recr[il]), (lambda il: is_recr[il])
    return (lambda il: not is_recr[il]), (lambda il: is_recr[il])


_RULES: dict[Memory, Callable[[HParams, ResolvedSettings], Iterator[CacheTensor]]] = {
    Memory.NONE: _no_cache,
    Memory.PLAIN: _plain,
    Memory.MSA: _msa,
    Memory.DSA: _dsa,
    Memory.DSV4: _dsv4,
    Memory.RECURRENT: _recurrent,
    Memory.HYBRID: _hybrid,
}
