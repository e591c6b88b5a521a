"""Other plans worth seeing beside the suggested one, each for another wish.

Owns which ones are looked for, and their labels. They are found by the same search steps and sized by the
same figures as the suggestion.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from edgeserve.planner.search import Choice, Search
from edgeserve.planner.settings import CELL_STEP
from edgeserve.planner.variants import Family, Spot, Variant

MOST_ALTERNATIVES = 3
# An alternative must differ in context by more than this to be worth a line.
_MUCH_LONGER = 1.25


@dataclass(frozen=True, slots=True)
class Idea:
    """A choice, what it is for, and how far a dry run may stretch its context."""

    label: str
    choice: Choice
    most: int


def ideas(search: Search, best: Choice) -> list[Idea]:
    """Up to three choices beside `best`, each different from the others; all fit by the closed forms."""
    if not best.fits:
        return []
    found: list[Idea] = []
    for idea in _candidates(search, best):
        known = [best, *(other.choice for other in found)]
        if idea.choice.fits and all(idea.choice.settings != choice.settings for choice in known):
            found.append(idea)
    return found[:MOST_ALTERNATIVES]


def _candidates(search: Search, best: Choice) -> Iterator[Idea]:
    yield from _all_on_gpu(search, best)
    yield from _longer_with_layers_on_cpu(search, best)
    yield from _quantized(search, best)
    yield from _whole_window(search, best)
    yield from _as_long_as_fits(search, best)


def _all_on_gpu(search: Search, best: Choice) -> Iterator[Idea]:
    if best.family in ("gpu", "cpu") or "gpu" not in search.placements.families:
        return
    spot = search.placements.spots("gpu")[0]
    for variant in (Variant(), Variant("q8_0", "on")):
        choice = search.stretched("gpu", best.settings.n_seq_max, variant, spot)
        if choice is not None:
            yield Idea("everything on the GPU", choice, search.target)
            return


def _longer_with_layers_on_cpu(search: Search, best: Choice) -> Iterator[Idea]:
    """A context that the GPU alone cannot hold."""
    if best.family != "gpu" or best.bound not in ("memory", "target"):
        return
    families: tuple[Family, ...] = ("experts", "split")
    for family in families:
        choice = _placed_for_more(search, family, best) if family in search.placements.families else None
        if choice is not None:
            label = "experts on the CPU" if family == "experts" else "part on the GPU"
            yield Idea(f"{label}, longer context", choice, choice.n_ctx_seq)
            return


def _placed_for_more(search: Search, family: Family, best: Choice) -> Choice | None:
    """The fastest placement of a family that holds twice the target, or what is still much longer."""
    variant = Variant(flash_attn="on" if family == "split" else "auto")
    want = _capped(search, 2 * max(best.n_ctx_seq, search.target))
    while want >= _MUCH_LONGER * best.n_ctx_seq:
        spot = search.best_spot(family, best.settings.n_seq_max, variant, want)
        if spot is not None:
            return search.stretched(family, best.settings.n_seq_max, variant, spot, want)
        want = want // 2 // CELL_STEP * CELL_STEP
    return None


def _quantized(search: Search, best: Choice) -> Iterator[Idea]:
    """About twice the context for the same memory."""
    if best.settings.type_k != "f16" or best.settings.type_v != "f16" or best.bound in ("given", "trained"):
        return
    most = _capped(search, 4 * search.target)
    variant = Variant("q8_0", "on", best.settings.n_ubatch)
    choice = search.stretched(best.family, best.settings.n_seq_max, variant, _spot(best), most)
    if choice is not None and choice.n_ctx_seq >= _MUCH_LONGER * best.n_ctx_seq:
        yield Idea("q8_0 cache, longer context", choice, most)


def _whole_window(search: Search, best: Choice) -> Iterator[Idea]:
    """Windowed layers that keep everything, so that prompts can be reused from any point."""
    if not search.hparams.has_window or best.settings.swa_full or search.fixed.swa_full is not None:
        return
    settings = replace(best.settings, swa_full=True)
    choice = search.sized(settings, best.family, best.n_ctx_seq)
    if choice is not None:
        yield Idea("whole cache in windowed layers: any prefix can be reused", choice, best.n_ctx_seq)


def _as_long_as_fits(search: Search, best: Choice) -> Iterator[Idea]:
    """All the context that memory and training allow, where the plan stopped by itself."""
    if best.bound != "target":
        return
    most = search.trained or 4 * search.target
    choice = search.sized(best.settings, best.family, most)
    if choice is not None and choice.n_ctx_seq >= _MUCH_LONGER * best.n_ctx_seq:
        yield Idea("the longest context that fits", choice, most)


def _spot(choice: Choice) -> Spot:
    return Spot(choice.settings.n_gpu_layers, choice.settings.n_cpu_moe)


def _capped(search: Search, n_ctx_seq: int) -> int:
    return min(n_ctx_seq, search.trained) if search.trained else n_ctx_seq
