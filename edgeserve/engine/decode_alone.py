"""What the decodes of a mixed step would have taken without its prompt tokens: the estimate behind `stalled`.

Owns the latest decode-only steps, by the number of their decodes. Unlike step_cost.py, which plans ahead and
prefers to be too careful, it looks back and must not lean to either side: hence a median. Pure arithmetic:
durations are handed in, in seconds.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

_NUM_KEPT = 64
_NUM_NEAREST = 21
"""Few enough to follow a machine that became slower, enough for hiccups not to count."""


def _steps() -> deque[tuple[int, float]]:
    return deque(maxlen=_NUM_KEPT)


@dataclass(slots=True)
class DecodeAlone:
    """(tokens behind the decodes, seconds) of decode-only steps, newest first."""

    _steps: dict[int, deque[tuple[int, float]]] = field(default_factory=dict)

    def observe(self, num_decodes: int, depth: int, duration_s: float) -> None:
        """Learn from a step of so many decodes and nothing else; `depth` is the sum of their positions."""
        self._steps.setdefault(num_decodes, _steps()).appendleft((depth, duration_s))

    def estimate_s(self, num_decodes: int, depth: int) -> float | None:
        """Median of the steps with as many decodes that are nearest in depth, the newest among equals; None
        when there was none yet."""
        known = self._steps.get(num_decodes)
        if not known:
            return None
        nearest = sorted(known, key=lambda step: abs(step[0] - depth))[:_NUM_NEAREST]
        return median(duration_s for _, duration_s in nearest)
