"""The ways in which a plan may give way: cache types, attention, micro-batch, and where layers go.

Owns the order in which each preference gives way, and the placements that exist for a model on a target.
Knows nothing of bytes: whether one of them fits is asked elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from edgeserve.config import FlashAttention
from edgeserve.gguf_header import GGUFHeader
from edgeserve.planner.goals import FixedSettings, Preference
from edgeserve.planner.hparams import HParams
from edgeserve.planner.settings import Settings
from edgeserve.planner.target import Target

Family = Literal["gpu", "experts", "split", "cpu"]
"""Everything on the GPU; all but experts; some layers; nothing."""

DEFAULT_N_BATCH, DEFAULT_N_UBATCH = 2048, 512
SMALL_N_UBATCH = 128
"""A quarter of the scratch memory; prompts are read somewhat slower."""

_EXPERTS = re.compile(r"\.ffn_(up|down|gate|gate_up)_(ch|)exps")


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to hold and read the cache."""

    cache_type: str = "f16"
    flash_attn: FlashAttention = "auto"
    n_ubatch: int = DEFAULT_N_UBATCH


@dataclass(frozen=True, slots=True)
class Spot:
    """How many layers go to the GPU, and from how many of the first ones the experts stay behind."""

    n_gpu_layers: int
    n_cpu_moe: int = 0


def gpu_ladder(prefer: Preference, *, split: bool) -> tuple[Variant, ...]:
    """Variants for a GPU, the one that gives up least first.

    With layers on both sides flash attention is asked for by name: left to itself, llama.cpp switches it off
    for the whole context when one layer's attention ends up on another device than the layer.
    """
    plain = Variant(flash_attn="on" if split else "auto")
    eight = Variant("q8_0", "on")
    if prefer == "quality":
        return (plain, replace(plain, n_ubatch=SMALL_N_UBATCH))
    ladder: tuple[Variant, ...] = (plain, eight)
    if prefer != "context":
        ladder += (replace(plain, n_ubatch=SMALL_N_UBATCH), replace(eight, n_ubatch=SMALL_N_UBATCH))
    return (*ladder, Variant("q4_0", "on", SMALL_N_UBATCH)) if prefer == "speed" else ladder


def cpu_ladder(prefer: Preference, *, flash_attn: bool) -> tuple[Variant, ...]:
    """Variants for a processor. Flash attention is slow there for small batches, unless it was measured to
    pay; without it the scores of a micro-batch are kept, which a smaller one bounds."""
    off, on = Variant(flash_attn="off"), Variant(flash_attn="on")
    small = replace(off, n_ubatch=SMALL_N_UBATCH)
    plain = (on, off, small) if flash_attn else (off, small, on)
    if prefer == "quality":
        return plain
    return (*plain, Variant("q8_0", "on"), Variant("q8_0", "on", SMALL_N_UBATCH))


def ladder(family: Family, prefer: Preference, target: Target) -> tuple[Variant, ...]:
    """Variants for a family of placements on this target."""
    if family == "cpu":
        return cpu_ladder(prefer, flash_attn=target.flash_attn_on_cpu)
    return gpu_ladder(prefer, split=family == "split")


class Placements:
    """Which placements a model has on a target, with what the user fixed taken as it is."""

    def __init__(self, header: GGUFHeader, hparams: HParams, target: Target, fixed: FixedSettings) -> None:
        self.num_all = hparams.n_layer_all + 1
        self._hparams, self._fixed = hparams, fixed
        self._has_gpu = bool(target.accelerators)
        self._has_experts = any(_EXPERTS.search(tensor.name) for tensor in header.tensors)

    @property
    def families(self) -> tuple[Family, ...]:
        """Those that exist, the fastest first."""
        asked = self._fixed.n_gpu_layers
        if not self._has_gpu or asked == 0:
            return ("cpu",)
        families: list[Family] = ["gpu"]
        if self._has_experts and self._fixed.n_cpu_moe is None:
            families.append("experts")
        if asked is None:
            families += ["split", "cpu"]
        elif 0 < asked < self.num_all:
            families[0] = "split"
        return tuple(families)

    def spots(self, family: Family) -> tuple[Spot, ...]:
        """All placements of a family, the one with most on the GPU first."""
        return tuple(dict.fromkeys(self._overlaid(spot) for spot in self._free(family)))

    def _free(self, family: Family) -> Iterator[Spot]:
        if family == "gpu":
            yield Spot(self.num_all)
        elif family == "experts":
            yield from (Spot(self.num_all, count) for count in range(1, self._hparams.n_layer + 1))
        elif family == "cpu":
            yield Spot(0)
        else:
            yield from (Spot(count) for count in range(self.num_all - 1, 0, -1))
            if self._has_experts:
                every = self._hparams.n_layer
                yield from (Spot(count, every) for count in range(self.num_all - 1, 0, -1))

    def _overlaid(self, spot: Spot) -> Spot:
        fixed = self._fixed
        n_gpu_layers = spot.n_gpu_layers if fixed.n_gpu_layers is None else fixed.n_gpu_layers
        n_cpu_moe = spot.n_cpu_moe if fixed.n_cpu_moe is None else fixed.n_cpu_moe
        return Spot(n_gpu_layers, n_cpu_moe)


def family_of(settings: Settings, num_all: int, has_gpu: bool) -> Family:
    """Which family a choice of settings belongs to."""
    if not has_gpu or settings.n_gpu_layers == 0:
        return "cpu"
    if 0 < settings.n_gpu_layers < num_all:
        return "split"
    return "experts" if settings.n_cpu_moe else "gpu"


def make_settings(num_sequences: int, variant: Variant, spot: Spot, *, swa_full: bool) -> Settings:
    """Settings without a context yet."""
    return Settings(
        n_seq_max=num_sequences,
        n_batch=DEFAULT_N_BATCH,
        n_ubatch=variant.n_ubatch,
        type_k=variant.cache_type,
        type_v=variant.cache_type,
        flash_attn=variant.flash_attn,
        swa_full=swa_full,
        n_gpu_layers=spot.n_gpu_layers,
        n_cpu_moe=spot.n_cpu_moe,
    )
