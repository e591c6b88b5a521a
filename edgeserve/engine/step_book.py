"""What steps carried and how long they took, added up since the start.

Owns the sums and the latest steps. Does not know what a step ought to cost (step_cost.py).
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from edgeserve.engine.request import StepStats

_NUM_RECENT_STEPS = 64


def kind_of(num_decodes: int, num_prefill: int) -> str:
    """decode, prefill, or mixed: a step with prompts beside running streams."""
    if not num_prefill:
        return "decode"
    return "mixed" if num_decodes else "prefill"


def _recent() -> deque[StepStats]:
    return deque(maxlen=_NUM_RECENT_STEPS)


@dataclass(slots=True)
class StepBook:
    """`prefill_s` and `decode_s` add up to the time of all steps."""

    num_steps: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    count_by_kind: Counter[str] = field(default_factory=Counter)
    seconds_by_kind: dict[str, float] = field(default_factory=dict)
    recent: deque[StepStats] = field(default_factory=_recent)

    def add(
        self,
        start_s: float,
        duration_s: float,
        num_decodes: int,
        num_prefill: int,
        decode_s: float,
        num_accepted: int = 0,
    ) -> None:
        """Book a step of which `decode_s` is counted as decode, the rest as prefill."""
        kind = kind_of(num_decodes, num_prefill)
        self.num_steps += 1
        self.decode_s += decode_s
        self.prefill_s += duration_s - decode_s
        self.count_by_kind[kind] += 1
        self.seconds_by_kind[kind] = self.seconds_by_kind.get(kind, 0.0) + duration_s
        self.recent.append(
            StepStats(self.num_steps, start_s, duration_s, num_decodes, num_prefill, num_accepted)
        )
