"""The search for settings: candidates in a documented order, sized by closed forms, the first good one taken.

Owns the order in which goals give way to each other. It never looks at a clock, a file or the runtime, so the
same inputs give the same settings. Proof by dry run comes after (`prove`).

    for 4, 2, 1 sequences             more than one only if each keeps a roomy context and nothing gives way
      for each family of placements   all on the GPU; experts on the CPU; layers split; all on the CPU
        for a roomy context, then the floor
          for each variant            f16 cache, q8_0 cache, smaller micro-batch (variants.py)
            the first that fits is taken, its context stretched to the target

Bytes over -ngl are not monotonic (op_offload copies, cache padding, attention on the border), so every layer
count is looked at.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from edgeserve.planner.fit import Sizer, with_n_ctx_seq
from edgeserve.planner.goals import (
    FLOOR_N_CTX_SEQ,
    ROOMY_N_CTX_SEQ,
    TARGET_N_CTX_SEQ,
    FixedSettings,
    Goals,
)
from edgeserve.planner.plan_speed import Speeds
from edgeserve.planner.settings import CELL_STEP, Settings
from edgeserve.planner.variants import Family, Placements, Spot, Variant, ladder, make_settings

Bound = Literal["memory", "trained", "target", "given"]
"""What keeps the context from being longer."""

SLOWEST_USEFUL_TOK_S = 2.0
"""A longer context is not worth less than this: about half of a slow reader's pace."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Settings that the search came to. `n_ctx_seq`: tokens of one sequence before llama.cpp's rounding."""

    settings: Settings
    n_ctx_seq: int
    family: Family
    bound: Bound
    fits: bool = True


class Search:
    """One model, one target, one set of goals."""

    def __init__(self, sizer: Sizer, speeds: Speeds, goals: Goals, fixed: FixedSettings) -> None:
        self.sizer, self.speeds, self.goals, self.fixed = sizer, speeds, goals, fixed
        self.hparams = sizer.model.hparams
        self.placements = Placements(sizer.model.header, self.hparams, sizer.target, fixed)
        self.trained = self.hparams.n_ctx_train

    # --- contexts

    @property
    def floor(self) -> int:
        return self.goals.min_ctx or min(FLOOR_N_CTX_SEQ, self._trained_or(FLOOR_N_CTX_SEQ))

    @property
    def roomy(self) -> int:
        return max(self.floor, min(ROOMY_N_CTX_SEQ, self._trained_or(ROOMY_N_CTX_SEQ)))

    @property
    def target(self) -> int:
        """Where the context stops although there may be room for more."""
        wanted = self.trained if self.goals.prefer == "context" else TARGET_N_CTX_SEQ
        return max(self.floor, min(wanted or TARGET_N_CTX_SEQ, self._trained_or(TARGET_N_CTX_SEQ)))

    def _trained_or(self, otherwise: int) -> int:
        return self.trained or otherwise

    @property
    def wants(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys((self.roomy, self.floor)))

    # --- the search

    def best(self) -> Choice:
        """The plan's settings; `fits` is False when nothing does."""
        found = self._longest_context() if self.goals.prefer == "context" else self._in_order()
        return found or self._last_resort() or self._least_bad()

    def _in_order(self) -> Choice | None:
        *more, fewest = self._sequence_counts()
        for num_sequences in more:
            family = self.placements.families[0]
            found = self._of_family(family, num_sequences, self.roomy, self.variants(family)[:1])
            if found is not None:
                return found
        return self._with_sequences(fewest)

    def _with_sequences(self, num_sequences: int) -> Choice | None:
        for family in self.placements.families:
            for want in self.wants:
                found = self._of_family(family, num_sequences, want, self.variants(family))
                if found is not None:
                    return found
        return None

    def _longest_context(self) -> Choice | None:
        """The longest context that is still of use; the earlier family wins when it has nearly as much."""
        num_sequences = self._sequence_counts()[-1]
        found: Choice | None = None
        for family in self.placements.families:
            for variant in self.variants(family):
                for spot in self.placements.spots(family):
                    choice = self.stretched(family, num_sequences, variant, spot)
                    if choice is not None and self._is_longer(choice, found):
                        found = choice
        return found if found is not None and found.n_ctx_seq >= self.floor else None

    def _is_longer(self, choice: Choice, found: Choice | None) -> bool:
        if found is not None and choice.n_ctx_seq <= 1.1 * found.n_ctx_seq:
            return False
        speed = self.speeds.rank(choice.settings, 2 * choice.n_ctx_seq)
        return found is None or speed == 0.0 or speed >= SLOWEST_USEFUL_TOK_S

    def _last_resort(self) -> Choice | None:
        """Any context at all, when nobody said how long it must be."""
        if self.goals.min_ctx or self.fixed.n_ctx:
            return None
        for family in self.placements.families:
            found = self._of_family(family, self._sequence_counts()[-1], CELL_STEP, self.variants(family))
            if found is not None:
                return found
        return None

    def _least_bad(self) -> Choice:
        """What misses least, with plain settings: a misfit's figures are for what was asked, not for a cache
        type that nobody asked for."""
        num_sequences = self._sequence_counts()[-1]
        choices = []
        for family in self.placements.families:
            variants = self._valid(family, num_sequences) or self.variants(family)[:1]
            spots = self.placements.spots(family)
            settings = [
                self._sized(self._settings(num_sequences, variants[0], spot), self.floor) for spot in spots
            ]
            least = min(settings, key=self.sizer.overflow_bytes)
            fits = self.sizer.fits(least)
            n_ctx_seq = self._given_n_ctx_seq(least) or self.floor
            choices.append(Choice(least, n_ctx_seq, family, self.bound_at(n_ctx_seq), fits))
        return min(choices, key=lambda choice: self.sizer.overflow_bytes(choice.settings))

    def _valid(self, family: Family, num_sequences: int) -> tuple[Variant, ...]:
        spot = self.placements.spots(family)[0]
        return tuple(
            variant
            for variant in self.variants(family)
            if self._is_valid(self._settings(num_sequences, variant, spot))
        )

    def _is_valid(self, settings: Settings) -> bool:
        return self.sizer.report(self._sized(settings, self.floor)).rejected is None

    # --- one family

    def variants(self, family: Family) -> tuple[Variant, ...]:
        return ladder(family, self.goals.prefer, self.sizer.target)

    def _of_family(
        self, family: Family, num_sequences: int, want: int, variants: tuple[Variant, ...]
    ) -> Choice | None:
        for variant in variants:
            spot = self.best_spot(family, num_sequences, variant, want)
            if spot is not None:
                return self.stretched(family, num_sequences, variant, spot)
        return None

    def best_spot(self, family: Family, num_sequences: int, variant: Variant, want: int) -> Spot | None:
        """The fastest placement that holds `want` tokens a sequence; without speeds the fullest GPU."""
        spots = [
            spot
            for spot in self.placements.spots(family)
            if self.sizer.fits(self._sized(self._settings(num_sequences, variant, spot), want))
        ]
        if family != "split" or len(spots) < 2:
            return spots[0] if spots else None
        return max(
            spots, key=lambda spot: self.speeds.rank(self._settings(num_sequences, variant, spot), want)
        )

    def stretched(
        self, family: Family, num_sequences: int, variant: Variant, spot: Spot, most: int = 0
    ) -> Choice | None:
        """This placement with as long a context as fits, up to `most` (by default the target)."""
        return self.sized(self._settings(num_sequences, variant, spot), family, most or self.target)

    def sized(self, settings: Settings, family: Family, most: int) -> Choice | None:
        """These settings with as long a context as fits, up to `most`; None when not even 256 tokens do."""
        if given := self._given_n_ctx_seq(settings):
            return Choice(settings, given, family, "given") if self.sizer.fits(settings) else None
        n_ctx_seq = self.sizer.longest(settings, most)
        if n_ctx_seq == 0:
            return None
        sized = with_n_ctx_seq(settings, n_ctx_seq)
        return Choice(sized, n_ctx_seq, family, self.bound_at(n_ctx_seq, most))

    def smallest(self, variant: Variant, spot: Spot) -> Settings:
        """One sequence with the shortest context there is."""
        return self._sized(self._settings(1, variant, spot), CELL_STEP)

    def bound_at(self, n_ctx_seq: int, most: int = 0) -> Bound:
        """What keeps the context from being longer than `n_ctx_seq`, when up to `most` was looked for."""
        if self.fixed.n_ctx is not None:
            return "given"
        if n_ctx_seq >= self.trained > 0:
            return "trained"
        return "target" if n_ctx_seq >= (most or self.target) else "memory"

    # --- settings

    def _settings(self, num_sequences: int, variant: Variant, spot: Spot) -> Settings:
        swa_full = not self.hparams.has_window
        return self.fixed.apply(make_settings(num_sequences, variant, spot, swa_full=swa_full))

    def _sized(self, settings: Settings, n_ctx_seq: int) -> Settings:
        return settings if self.fixed.n_ctx is not None else with_n_ctx_seq(settings, n_ctx_seq)

    def _given_n_ctx_seq(self, settings: Settings) -> int:
        if self.fixed.n_ctx is None:
            return 0
        return settings.n_ctx if settings.kv_unified else max(1, settings.n_ctx // settings.n_seq_max)

    def _sequence_counts(self) -> tuple[int, ...]:
        if self.fixed.n_seq_max is not None:
            return (self.fixed.n_seq_max,)
        counts = self.goals.sequence_counts()
        if self.fixed.n_ctx is not None and not self.goals.parallel:
            return (self._shared_by(self.fixed.n_ctx, counts),)
        return counts[-1:] if self.goals.prefer == "context" else counts

    def _shared_by(self, n_ctx: int, counts: tuple[int, ...]) -> int:
        """How many sequences a given context serves: each keeps a roomy part, or one has it all."""
        if self.fixed.kv_unified:
            return counts[0]
        return next((count for count in counts if n_ctx // count >= self.roomy), 1)
