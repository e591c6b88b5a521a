"""Why a plan is as it is, in sentences: which limit bound, and what the next step up would need.

Owns the sentences and the few extra sizes that they quote. Knows nothing of how they are laid out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from edgeserve.planner.fit import PoolUse, with_n_ctx_seq
from edgeserve.planner.plan_speed import PlanSpeed
from edgeserve.planner.report import MemoryReport
from edgeserve.planner.search import Choice, Search
from edgeserve.planner.settings import CELL_STEP, Settings
from edgeserve.planner.words import count, size

_NEXT_STEP = 4 * CELL_STEP
# A possible context is only worth a sentence when it is longer by more than this.
_MUCH_LONGER = 1.25


def reasons_for(
    search: Search, choice: Choice, report: MemoryReport, uses: Sequence[PoolUse], speed: PlanSpeed
) -> tuple[str, ...]:
    """Sentences on a plan's settings, the most asked first."""
    if report.rejected is not None:
        return (f"llama.cpp refuses these settings. {report.rejected}",)
    writer = _Writer(search, choice, report, uses)
    if not choice.fits:
        return (
            *writer.misfit(),
            *writer.context(),
            *writer.without_effect(),
            *writer.memory(),
            *report.notes,
        )
    sentences = [
        *writer.context(),
        *writer.sequences(),
        *writer.placement(),
        *writer.without_effect(),
        *writer.cache(),
        *writer.window(),
        *writer.attention(),
        *writer.memory(),
        *report.notes,
        *_speed(speed, is_here=search.sizer.target.is_here),
        *search.sizer.target.notes,
    ]
    return tuple(dict.fromkeys(sentences))


def _speed(speed: PlanSpeed, *, is_here: bool) -> Iterator[str]:
    remedy = " `edgeserve devices calibrate` measures it." if is_here else ""
    if speed.unknown:
        yield f"Speed: n/a, {speed.unknown}.{remedy}"
    elif "alibrated" in speed.basis:
        yield f"Speed: {speed.basis}"
    elif speed.basis:
        yield f"Speed: {speed.basis}{remedy}"


class _Writer:
    def __init__(self, search: Search, choice: Choice, report: MemoryReport, uses: Sequence[PoolUse]) -> None:
        self.search, self.choice, self.report, self.uses = search, choice, report, uses
        self.sizer, self.settings, self.fixed = search.sizer, choice.settings, search.fixed
        self.tightest = min(uses, key=lambda use: use.left_bytes)

    def misfit(self) -> Iterator[str]:
        for use in self.uses:
            if not use.fits:
                yield (
                    f"It does not fit: {use.pool.name} would hold {size(use.high_bytes)},"
                    f" {size(-use.left_bytes)} more than the {size(use.pool.usable_bytes)} that may be used."
                )

    # --- context

    def context(self) -> Iterator[str]:
        each, trained = self.choice.n_ctx_seq, self.search.trained
        if self.choice.bound == "given":
            yield f"The context was given: {count(each, 'token')} for each sequence."
        elif self.choice.bound == "trained" and self.choice.fits:
            yield f"{count(each, 'token')} a sequence is all that the model was trained for."
        elif self.choice.bound == "target" and self.choice.fits:
            yield self._at_target(each)
        elif self.choice.fits:
            yield from self._at_limit(each)
        else:
            yield f"The figures are for {count(each, 'token')} a sequence."
        if trained and each > trained:
            yield f"The model was trained for {trained:,} tokens: longer texts get worse."

    def _at_target(self, each: int) -> str:
        text = f"Context capped at {each:,}"
        if self.search.trained:
            text += f" from {self.search.trained:,} trained for"
        text += ": cells cost memory whether they are used or not."
        longest = self._longest(self.settings)
        if longest < _MUCH_LONGER * each:
            return text
        return f"{text} Memory allows {longest:,} a sequence (--prefer context)."

    def _at_limit(self, each: int) -> Iterator[str]:
        trained = f" from {self.search.trained:,} trained for" if self.search.trained else ""
        yield f"Context capped at {each:,}{trained}, because of {self._limit()}"
        following = with_n_ctx_seq(self.settings, each + _NEXT_STEP)
        more = self._need(following) - self._need(self.settings)
        text = (
            f"The next {_NEXT_STEP:,} tokens a sequence need {size(more)};"
            f" {size(max(0, self.tightest.left_bytes))} are left."
        )
        if self.settings.type_v == "f16" and self.search.goals.prefer != "quality":
            eight = replace(self.settings, type_k="q8_0", type_v="q8_0", flash_attn="on")
            if (longest := self._longest(eight)) > each:
                text += f" With -ctk q8_0 -ctv q8_0 it would be {longest:,}."
        yield text

    def _limit(self) -> str:
        return f"{self.tightest.pool.name}: {self.tightest.pool.reason}"

    def _longest(self, settings: Settings) -> int:
        most = self.search.trained or 8 * self.search.target
        return self.sizer.longest(settings, most)

    def _need(self, settings: Settings) -> int:
        uses = self.sizer.uses(settings)
        return next(use.need_bytes for use in uses if use.pool.name == self.tightest.pool.name)

    # --- the rest

    def sequences(self) -> Iterator[str]:
        number = self.settings.n_seq_max
        resolved = self.report.resolved
        if resolved is None or not self.report.context_bytes:
            return
        each = self.report.context_bytes // resolved.n_stream
        if resolved.n_stream > 1:
            yield (
                f"{count(number, 'sequence')} with {resolved.n_ctx_seq:,} tokens each:"
                f" {size(each)} of cache a sequence × {number} = {size(self.report.context_bytes)}."
            )
        elif number > 1:
            yield f"{count(number, 'sequence')} share {resolved.n_ctx:,} cells: {size(each)} of cache."
        elif self.choice.fits and self.fixed.n_seq_max is None and self.search.goals.most_parallel > 1:
            yield from self._why_one()

    def _why_one(self) -> Iterator[str]:
        goals = self.search.goals
        if goals.parallel or self.choice.bound == "given" or goals.prefer == "context":
            return
        longest = self._longest(replace(self.settings, n_seq_max=2))
        if longest < self.search.roomy:
            yield f"1 sequence: with 2, each would keep only {longest:,} tokens."
        elif self.choice.family in ("split", "experts"):
            yield "1 sequence: a second one would push more of the model off the GPU."

    def placement(self) -> Iterator[str]:
        target, placements = self.sizer.target, self.search.placements
        if not target.accelerators:
            return
        number, of = self.settings.n_gpu_layers, placements.num_all
        if self.choice.family == "gpu":
            yield f"All {of} layers are on the GPU (the output counts as one)."
        elif self.choice.family == "experts":
            yield (
                f"All {of} layers are on the GPU, without the experts of the first"
                f" {self.settings.n_cpu_moe}: those are computed on the processor."
            )
        elif self.fixed.n_gpu_layers is None and self.choice.fits:
            yield from self._why_not_more(number, of)

    def _why_not_more(self, number: int, of: int) -> Iterator[str]:
        following = replace(self.settings, n_gpu_layers=number + 1)
        missing = self.sizer.overflow_bytes(following)
        text = f"{number} of {of} layers are on the GPU"
        if missing > 0:
            text += f": with one more, {size(missing)} would be missing"
        yield f"{text}."

    def without_effect(self) -> Iterator[str]:
        """What was asked of a GPU that is not there."""
        if self.sizer.target.accelerators:
            return
        goals, fixed = self.search.goals, self.fixed
        asked = [
            flag
            for flag, is_asked in (
                (f"-ngl {fixed.n_gpu_layers}", fixed.n_gpu_layers),
                ("--gpu-memory", goals.gpu_memory_bytes is not None),
                ("-ts", fixed.tensor_split),
            )
            if is_asked
        ]
        if asked:
            have = "have" if len(asked) > 1 else "has"
            yield f"{' and '.join(asked)} {have} no effect: there is no GPU here that llama.cpp could use."

    def cache(self) -> Iterator[str]:
        if self.settings.type_v in ("f32", "f16", "bf16") or self.fixed.type_v is not None:
            return
        plain = replace(self.settings, type_k="f16", type_v="f16")
        yield (
            f"The cache is {self.settings.type_v}: with f16 only"
            f" {count(self._longest(plain), 'token')} a sequence would fit."
        )

    def window(self) -> Iterator[str]:
        hparams = self.search.hparams
        if not hparams.has_window or self.fixed.swa_full is not None or self.settings.swa_full:
            return
        more = self._need(replace(self.settings, swa_full=True)) - self._need(self.settings)
        yield (
            f"Layers with a window of {count(hparams.n_swa, 'token')} keep only that, so a prompt can be"
            f" reused from near its end only; --swa-full keeps all for {size(more)} more."
        )

    def attention(self) -> Iterator[str]:
        if self.fixed.flash_attn is not None:
            return
        choice = self.settings.flash_attn
        if choice == "off":
            yield "Flash attention is off: on a processor it is slow for a steady stream's small batches."
        elif self.choice.family == "split" and choice == "on":
            yield (
                "Flash attention is on by name: with layers on both sides, auto may switch it off for the"
                " whole context."
            )
        elif self.choice.family == "cpu" and choice == "on":
            yield from self._why_on_cpu()

    def _why_on_cpu(self) -> Iterator[str]:
        if self.sizer.target.flash_attn_on_cpu:
            yield "Flash attention is on: it was measured to pay on this machine."
        elif self.settings.type_v not in ("f32", "f16", "bf16"):
            yield "Flash attention is on: a quantized V cache cannot do without."
        else:
            yield "Flash attention is on: without it the scores alone would not fit."

    def memory(self) -> Iterator[str]:
        for use in self.uses:
            if not (self.choice.bound == "memory" and use is self.tightest and self.choice.fits):
                yield f"{use.pool.name[:1].upper()}{use.pool.name[1:]}: {use.pool.reason}"
