"""What a step of some decodes and some prompt tokens costs on this machine, learned as it runs.

Owns the estimates and the choice that rests on them: how many prompt tokens a step may carry so that nobody's
next token comes later than a target. Pure arithmetic: durations are handed in, in seconds.

Cost is not monotonic in the number of tokens (kernels change their path with the batch), so it is kept for
each chunk size by itself, and a size not tried yet is assumed to cost per token what the nearest tried one
does. Sizes grow by a half at most, which bounds how far a first try can miss.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection
from dataclasses import dataclass, field

CHUNK_SIZES = (
    8, 12, 16, 20, 24, 28, 32, 36, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512,
    640, 768, 896, 1024, 1280, 1536, 1792, 2048,
)  # fmt: skip
"""Prompt tokens that a step may carry, near enough to each other that little of a target stays unused. The
first is the floor: a prompt always makes progress."""

IDLE_STEP_S = 0.5
"""The longest step with nobody decoding: it delays newcomers and cancellations, and no token."""

MIN_TARGET_S = 0.15
TARGET_IN_IDLE_GAPS = 3.0
CROWDED_TARGETS = 2.0
"""How much longer the default target is while requests wait for their place: larger pieces of prompts cost
less a token, so that places come free sooner. A target that was asked for holds."""

_FIRST_CHUNK = 32
_UP, _DOWN = 0.5, 0.2
_OUTLIER = 3.0
_CLEARLY = 0.9
_FEW = 3
_FORGET_STEPS = 40
"""After so many steps with prompts, a size that was not used is believed to cost per token what the nearest
used one does, if that is less, and is learned anew: one hiccup must not keep a size out for ever. It costs
one step in so many."""


@dataclass(slots=True)
class _Average:
    """A running average that follows rises faster than falls: a promise is kept by the slow steps. One hiccup
    counts as three times the usual at most."""

    value: float | None = None
    num_samples: int = 0

    def add(self, sample: float) -> None:
        self.num_samples += 1
        if self.value is None:
            self.value = sample
            return
        sample = min(sample, _OUTLIER * self.value)
        self.value += (_UP if sample > self.value else _DOWN) * (sample - self.value)


@dataclass(slots=True)
class StepCost:
    """Learned costs and the gap target. `itl_target_s` 0 derives it from the machine's own gap."""

    itl_target_s: float = 0.0
    _decode_s: dict[int, _Average] = field(default_factory=dict)
    _per_token_s: dict[int, _Average] = field(default_factory=dict)
    _used_at: dict[int, int] = field(default_factory=dict)
    _num_prompt_steps: int = 0

    def observe(self, num_decodes: int, num_prefill: int, duration_s: float) -> None:
        """Learn from a step that carried so many decode and prompt tokens and took so long."""
        if not num_prefill:
            self._decode_s.setdefault(num_decodes, _Average()).add(duration_s)
            return
        if num_prefill < CHUNK_SIZES[0]:  # a prompt's last few tokens: mostly the fixed cost of a step
            return
        prefill_s = max(0.0, duration_s - self.decode_s(num_decodes))
        size = _size_of(num_prefill)
        if not self._is_in_use(size):
            self._per_token_s.pop(size, None)
        self._num_prompt_steps += 1
        self._used_at[size] = self._num_prompt_steps
        self._per_token_s.setdefault(size, _Average()).add(prefill_s / num_prefill)

    def decode_s(self, num_decodes: int) -> float:
        """Seconds of a step with `num_decodes` decodes and nothing else; 0 while nothing is known.

        A batch not seen yet costs what the nearest one does, scaled by its size upwards only: batching never
        makes a step cheaper.
        """
        if not num_decodes or not self._decode_s:
            return 0.0
        nearest = min(self._decode_s, key=lambda known: (abs(known - num_decodes), known))
        return (self._decode_s[nearest].value or 0.0) * max(1.0, num_decodes / nearest)

    def step_s(self, num_decodes: int, num_prefill: int) -> float:
        """Seconds that such a step is expected to take."""
        return self.decode_s(num_decodes) + num_prefill * self._prefill_token_s(_size_of(num_prefill))

    @property
    def target_s(self) -> float:
        """The longest gap between two tokens of one stream that a step is planned for while nobody waits."""
        return self.itl_target_s or max(MIN_TARGET_S, TARGET_IN_IDLE_GAPS * self.decode_s(1))

    def prefill_tokens(self, num_decodes: int, limit: int, *, is_crowded: bool = False) -> int:
        """How many prompt tokens the next step may carry, `limit` at most.

        The largest size whose step keeps the target, unless a smaller one computes clearly more prompt tokens
        a second; the smallest size when none keeps it. With nobody decoding the target is IDLE_STEP_S.
        """
        if not self._per_token_s:
            return min(limit, _FIRST_CHUNK)
        target_s = IDLE_STEP_S
        if num_decodes:
            target_s = self.target_s * (CROWDED_TARGETS if is_crowded and not self.itl_target_s else 1.0)
        rates = {size: size / max(self.step_s(num_decodes, size), 1e-9) for size in self._reachable()}
        fitting = {size: rate for size, rate in rates.items() if size / rate <= target_s}
        fast = [size for size, rate in fitting.items() if rate >= _CLEARLY * max(fitting.values())]
        return min(limit, max(fast, default=CHUNK_SIZES[0]))

    def _reachable(self) -> tuple[int, ...]:
        """Sizes up to a half beyond the largest tried: a longer jump would rest on no measurement."""
        most = 1.5 * max(self._per_token_s)
        return tuple(size for size in CHUNK_SIZES if size <= most)

    def _prefill_token_s(self, size: int) -> float:
        if not self._per_token_s:
            return 0.0
        nearest = self._nearest(size, self._per_token_s)
        cost_s = self._per_token_s[nearest].value or 0.0
        known = [other for other, average in self._per_token_s.items() if average.num_samples >= _FEW]
        if nearest not in known and known:
            # A lucky first sample would be believed until it is refuted by a step that takes too long.
            cost_s = max(cost_s, self._per_token_s[self._nearest(size, known)].value or 0.0)
        in_use = [other for other in self._used_at if self._is_in_use(other)]
        if nearest in in_use or not in_use:
            return cost_s
        return min(cost_s, self._per_token_s[self._nearest(size, in_use)].value or 0.0)

    def _is_in_use(self, size: int) -> bool:
        return size in self._used_at and self._num_prompt_steps - self._used_at[size] < _FORGET_STEPS

    @staticmethod
    def _nearest(size: int, sizes: Collection[int]) -> int:
        if size in sizes:
            return size
        position = CHUNK_SIZES.index(size)
        return min(sizes, key=lambda known: abs(CHUNK_SIZES.index(known) - position))


def _size_of(num_prefill: int) -> int:
    """The chunk size whose cost stands for so many tokens: the largest that is not larger."""
    return CHUNK_SIZES[max(0, bisect_right(CHUNK_SIZES, num_prefill) - 1)]
