"""What would make a misfit fit: every single change that is enough, and the nearest plan when none is.

Owns the changes that are tried and their order. A change keeps everything else as it was asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from edgeserve.planner.fit import Sizer, pool_uses
from edgeserve.planner.goals import FixedSettings
from edgeserve.planner.search import Choice, Search
from edgeserve.planner.settings import CELL_STEP, Settings
from edgeserve.planner.variants import SMALL_N_UBATCH
from edgeserve.planner.words import size


@dataclass(frozen=True, slots=True)
class Change:
    """One change that is enough by itself: the flags to give, and the settings that they lead to."""

    flags: tuple[str, ...]
    settings: Settings


@dataclass(frozen=True, slots=True)
class Remedy:
    """`changes`: single changes, the mildest first. `nearest`: what fits with everything left to the plan,
    None when nothing does. `missing_bytes`: what is short in `pool` at the settings asked for; `least_bytes`:
    the least that any settings need there; `largest_file_bytes`: about how large the model's file may be for
    the smallest settings to fit, 0 when no file is small enough.
    """

    changes: tuple[Change, ...]
    nearest: Choice | None
    pool: str
    missing_bytes: int
    needed_bytes: int
    usable_bytes: int
    least_bytes: int
    largest_file_bytes: int

    @property
    def least_sentence(self) -> str:
        """What is to be done when no settings fit."""
        text = f"The least that any settings need is {size(self.least_bytes)}"
        if not self.largest_file_bytes:
            return f"{text}: `edgeserve models fit` lists models that may fit."
        return (
            f"{text}. A file of at most about {size(self.largest_file_bytes)} would fit: take a smaller"
            " quantization or a smaller model (`edgeserve models fit` lists some)."
        )


def remedy_for(search: Search, choice: Choice) -> Remedy:
    """Ways out for a choice that does not fit."""
    sizer = search.sizer
    uses = pool_uses(sizer.report(choice.settings), sizer.target)
    worst = max(uses, key=lambda use: use.high_bytes - use.pool.usable_bytes)
    freed = Search(sizer, search.speeds, replace(search.goals, min_ctx=0, parallel=0), FixedSettings())
    nearest = freed.best()
    least = _least_bytes(freed, worst.pool.name)
    # The rest of a need does not depend on how the weights are quantized.
    largest_file = sizer.model.header.total_bytes - max(0, least - worst.pool.usable_bytes)
    return Remedy(
        changes=tuple(_changes(search, choice)),
        nearest=nearest if nearest.fits else None,
        pool=worst.pool.name,
        missing_bytes=max(0, -worst.left_bytes),
        needed_bytes=worst.high_bytes,
        usable_bytes=worst.pool.usable_bytes,
        least_bytes=least,
        largest_file_bytes=max(0, largest_file),
    )


def _least_bytes(search: Search, pool: str) -> int:
    """What the smallest settings need in that pool."""
    family = search.placements.families[-1]
    variant, spot = search.variants(family)[-1], search.placements.spots(family)[-1]
    settings = search.smallest(variant, spot)
    uses = pool_uses(search.sizer.report(settings), search.sizer.target)
    return next(use.high_bytes for use in uses if use.pool.name == pool)


def _changes(search: Search, choice: Choice) -> Iterator[Change]:
    sizer, settings = search.sizer, choice.settings
    if sizer.report(settings).rejected is not None:
        yield from _valid_changes(sizer, settings)
        return
    on_gpu = bool(sizer.target.accelerators) and settings.n_gpu_layers != 0
    yield from _window(sizer, settings)
    if on_gpu:
        yield from _fewer_layers(search, settings)
        yield from _experts(search, settings)
    yield from _shorter(search, choice)
    yield from _quantized(sizer, settings)
    yield from _attention(sizer, settings)
    yield from _fewer_sequences(sizer, settings)
    yield from _smaller_batch(sizer, settings)


def _valid_changes(sizer: Sizer, settings: Settings) -> Iterator[Change]:
    """What turns refused settings into ones that llama.cpp takes."""
    tries = [
        (("-fa", "on"), replace(settings, flash_attn="on")),
        (("-ctv", "f16"), replace(settings, type_v="f16")),
        (("-ctk", "f16"), replace(settings, type_k="f16")),
        (("-ctk", settings.type_v), replace(settings, type_k=settings.type_v)),
        (("-ctk", "f16", "-ctv", "f16"), replace(settings, type_k="f16", type_v="f16")),
    ]
    for flags, changed in tries:
        if changed != settings and sizer.fits(changed):
            yield Change(flags, changed)
            return


def _window(sizer: Sizer, settings: Settings) -> Iterator[Change]:
    if sizer.model.hparams.has_window and settings.swa_full:
        yield from _if_fits(sizer, ("--no-swa-full",), replace(settings, swa_full=False))


def _fewer_layers(search: Search, settings: Settings) -> Iterator[Change]:
    num_all = search.placements.num_all
    now = settings.n_gpu_layers if 0 <= settings.n_gpu_layers <= num_all else num_all
    fitting = [
        changed
        for count in range(now - 1, 0, -1)
        if search.sizer.fits(changed := replace(settings, n_gpu_layers=count))
    ]
    if fitting:
        yield Change(("-ngl", str(fitting[0].n_gpu_layers)), fitting[0])
    else:
        yield from _if_fits(search.sizer, ("-ngl", "0"), replace(settings, n_gpu_layers=0))


def _experts(search: Search, settings: Settings) -> Iterator[Change]:
    if "experts" not in search.placements.families and not settings.n_cpu_moe:
        return
    for count in range(settings.n_cpu_moe + 1, search.hparams.n_layer + 1):
        changed = replace(settings, n_cpu_moe=count)
        if search.sizer.fits(changed):
            yield Change(("--n-cpu-moe", str(count)), changed)
            return


def _shorter(search: Search, choice: Choice) -> Iterator[Change]:
    settings = choice.settings
    streams = 1 if settings.kv_unified else settings.n_seq_max
    n_ctx_seq = search.sizer.longest(settings, max(CELL_STEP, choice.n_ctx_seq - 1) // CELL_STEP * CELL_STEP)
    if n_ctx_seq and n_ctx_seq * streams < settings.n_ctx:
        yield Change(("-c", str(n_ctx_seq * streams)), replace(settings, n_ctx=n_ctx_seq * streams))


def _quantized(sizer: Sizer, settings: Settings) -> Iterator[Change]:
    for cache_type in ("q8_0", "q4_0"):
        changed = replace(settings, type_k=cache_type, type_v=cache_type, flash_attn="on")
        flags = ("-ctk", cache_type, "-ctv", cache_type, "-fa", "on")
        if settings.type_k in ("f32", "f16", "bf16") and sizer.fits(changed):
            yield Change(flags, changed)
            return


def _attention(sizer: Sizer, settings: Settings) -> Iterator[Change]:
    if settings.flash_attn == "off":
        yield from _if_fits(sizer, ("-fa", "on"), replace(settings, flash_attn="on"))


def _fewer_sequences(sizer: Sizer, settings: Settings) -> Iterator[Change]:
    """Each of the fewer sequences keeps what it had."""
    if settings.n_seq_max == 1 or settings.kv_unified:
        return
    each = settings.n_ctx // settings.n_seq_max
    for count in range(settings.n_seq_max - 1, 0, -1):
        changed = replace(settings, n_seq_max=count, n_ctx=each * count)
        if sizer.fits(changed):
            yield Change(("-np", str(count), "-c", str(each * count)), changed)
            return


def _smaller_batch(sizer: Sizer, settings: Settings) -> Iterator[Change]:
    if settings.n_ubatch > SMALL_N_UBATCH:
        flags = ("-ub", str(SMALL_N_UBATCH))
        yield from _if_fits(sizer, flags, replace(settings, n_ubatch=SMALL_N_UBATCH))


def _if_fits(sizer: Sizer, flags: tuple[str, ...], changed: Settings) -> Iterator[Change]:
    if sizer.fits(changed):
        yield Change(flags, changed)
