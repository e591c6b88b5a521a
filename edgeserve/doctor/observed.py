"""The figures that diagnosis rests on: one window on one server, whoever looked.

Owns their names, units and what a missing one means. Knows no rule, and no way of looking.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Queue:
    """Who waits at the end of the window, told by those who look at a server all the time.

    `first_id` is the request whose turn comes next, "" where a server only counts; `waited_s` is how long it
    has been seen waiting.
    """

    num_waiting: int
    first_id: str = ""
    waits_for: str = ""
    waited_s: float | None = None
    num_prompt_tokens: int | None = None
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Observed:
    """One window on one server, in seconds and shares of 1; None where it is not known.

    `*_s` of requests are means. `queue_share` is the queue's part of the time to the first token,
    `stalled_share` the part of the decode time that prompts of others took, `busy_share` the part of the
    window that was spent in steps, `sample_share` the part of the step time that drawing tokens took.
    `num_running` counts requests that ran through the whole window. `deep_*` and `shallow_*` are two points
    of one model's decode; `decode_step_s` is a step's time without the prompt tokens in it. `attainment` is
    good requests of all that were offered. `prefilling` names the requests whose prompts are being read at
    the end of the window.
    """

    window_s: float | None = None
    num_requests: int | None = None
    num_rejected: int | None = None
    num_waiting_first: int | None = None
    num_waiting_last: int | None = None
    queue: Queue | None = None
    num_running: float | None = None
    num_slots: int | None = None
    ttft_s: float | None = None
    queue_s: float | None = None
    queue_share: float | None = None
    ttft_miss_s: float | None = None
    num_misses: int | None = None
    ttft_hit_s: float | None = None
    num_hits: int | None = None
    hit_prompt_tokens: float | None = None
    hit_cached_tokens: float | None = None
    prefill_tok_s: float | None = None
    mean_prompt_tokens: float | None = None
    mean_output_tokens: float | None = None
    num_gaps: int | None = None
    gap_p50_s: float | None = None
    gap_p99_s: float | None = None
    gap_mean_s: float | None = None
    stalled_share: float | None = None
    prefilling: tuple[str, ...] = ()
    busy_share: float | None = None
    decodes_per_step: float | None = None
    decode_step_s: float | None = None
    sample_share: float | None = None
    output_tok_s: float | None = None
    cells_total: int | None = None
    cells_used: int | None = None
    cells_cached: int | None = None
    num_evicted_tokens: int | None = None
    num_looked_up_tokens: int | None = None
    shallow_tokens: int | None = None
    shallow_tpot_s: float | None = None
    deep_tokens: int | None = None
    deep_tpot_s: float | None = None
    attainment: float | None = None
    attainment_target: float | None = None
    is_saturated: bool | None = None
    itl_target_s: float | None = None
    model_path: str | None = None
    settings: Mapping[str, object] = field(default_factory=dict)

    @property
    def cells_share(self) -> float | None:
        """Cells that running requests hold, of all."""
        return None if self.cells_used is None or not self.cells_total else self.cells_used / self.cells_total

    @property
    def filled_share(self) -> float:
        """Cells that hold anything, idle prefixes included."""
        return (self.cells_share or 0.0) + (self.cells_cached or 0) / (self.cells_total or 1)
