"""What an observer sees of a server: facts that stay while it runs, and a snapshot of one moment.

Owns the shapes, and the reading of edgeserve's own `/events` and `/props` documents. A figure that a server
does not tell is None, never 0. Knows nothing of sockets or of how anything is shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Status(StrEnum):
    """Where a request stands."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Step:
    """One llama_decode call. `end_s` is on the observer's clock, worked out from the snapshot's arrival."""

    number: int
    duration_s: float
    num_decode: int
    num_prefill: int
    end_s: float


@dataclass(frozen=True, slots=True)
class SequenceView:
    """One request as the server tells it; None where it does not, or where it has not happened yet."""

    request_id: str
    status: Status
    slot: int = -1
    waits_for: str = ""
    num_prompt: int | None = None
    num_cached: int | None = None
    num_evaluated: int | None = None
    num_output: int = 0
    max_tokens: int | None = None
    queue_ms: float | None = None
    prefill_ms: float | None = None
    decode_ms: float | None = None
    stalled_ms: float | None = None
    ttft_ms: float | None = None

    @property
    def own_ms_per_token(self) -> float | None:
        """Decode time without the stalls, over the gaps between tokens; None before the second token."""
        if self.decode_ms is None or self.stalled_ms is None or self.num_output < 2:
            return None
        return max(0.0, self.decode_ms - self.stalled_ms) / (self.num_output - 1)

    @property
    def num_ready(self) -> int | None:
        """Prompt tokens that need no more work: cached or evaluated."""
        if self.num_evaluated is None:
            return None
        return (self.num_cached or 0) + self.num_evaluated

    @property
    def prompt_share(self) -> float | None:
        """How much of the prompt is ready, 0 to 1."""
        return None if self.num_ready is None or not self.num_prompt else self.num_ready / self.num_prompt


@dataclass(frozen=True, slots=True)
class Cells:
    """KV cells. `used` includes `cached`, the cells of idle prefixes that can be taken back at any time."""

    total: int
    used: int
    cached: int | None = None


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums since the server started. Prompt tokens include the cached ones."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    prefill_ms: float
    decode_ms: float
    finished: Mapping[str, int] = field(default_factory=dict)

    @property
    def evaluated_tokens(self) -> int:
        """Prompt tokens that had to be computed."""
        return self.prompt_tokens - self.cached_tokens


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One moment. `waiting` is None when a server only counts its queue (`num_waiting`)."""

    at_s: float
    running: tuple[SequenceView, ...] = ()
    waiting: tuple[SequenceView, ...] | None = ()
    num_waiting: int | None = 0
    num_slots: int = 0
    cells: Cells | None = None
    totals: Totals | None = None
    steps: tuple[Step, ...] | None = None
    itl_target_ms: float | None = None

    @property
    def sequences(self) -> tuple[SequenceView, ...]:
        return (*self.running, *(self.waiting or ()))

    @property
    def tells_prefill(self) -> bool:
        """Whether prompts can be timed: from steps, or from counters."""
        return self.steps is not None or self.totals is not None

    @property
    def tells_decode(self) -> bool:
        """Whether tokens can be timed: from steps, or from slots that are looked at again and again."""
        return self.steps is not None or self.num_slots > 0

    @property
    def is_idle(self) -> bool:
        return not self.running and not self.num_waiting


class ServerKind(StrEnum):
    EDGESERVE = "edgeserve"
    LLAMA_SERVER = "llama-server"
    OTHER = "another server"


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What stays the same while a server runs.

    `itl_target_ms` 0 is a target that the server derives from its machine; None is unknown. `unknown` holds
    one sentence for each thing that this server does not tell.
    """

    url: str
    kind: ServerKind
    model: str = ""
    description: str = ""
    model_path: str = ""
    n_ctx: int | None = None
    n_ctx_seq: int | None = None
    n_ctx_train: int | None = None
    num_slots: int | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)
    itl_target_ms: float | None = None
    request_defaults: Mapping[str, Any] = field(default_factory=dict)
    build: str = ""
    unknown: tuple[str, ...] = ()

    @property
    def can_cancel(self) -> bool:
        return self.kind is ServerKind.EDGESERVE


class LinkState(StrEnum):
    LOOKING = "looking"
    LOADING = "loading"
    LIVE = "live"
    LOST = "lost"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Link:
    """How the connection stands. `retry_s` is the pause before the next try."""

    state: LinkState
    message: str = ""
    progress: float | None = None
    retry_s: float | None = None


# --- reading edgeserve's documents -------------------------------------------------------------------------


def read_snapshot(document: Mapping[str, Any], at_s: float) -> Snapshot:
    """One `/events` document. Raises KeyError or TypeError when it is something else."""
    totals = document["totals"]
    cells = document["cells"]
    waiting = tuple(_sequence(entry) for entry in document["waiting"])
    return Snapshot(
        at_s=at_s,
        running=tuple(_sequence(entry) for entry in document["running"]),
        waiting=waiting,
        num_waiting=len(waiting),
        num_slots=document["slots"]["total"],
        cells=Cells(cells["total"], cells["used"], cells["cached"]),
        totals=Totals(
            totals["prompt_tokens"],
            totals["cached_tokens"],
            totals["output_tokens"],
            totals["prefill_ms"],
            totals["decode_ms"],
            totals["finished"],
        ),
        steps=_steps(document["steps"], at_s),
        itl_target_ms=document.get("itl_target_ms"),
    )


def _steps(entries: list[Mapping[str, Any]], at_s: float) -> tuple[Step, ...]:
    """The newest step has just ended; each earlier one ended when its follower began."""
    end_s = at_s
    steps = []
    for entry in reversed(entries):
        duration_s = entry["duration_ms"] / 1e3
        steps.append(
            Step(entry["step"], duration_s, entry["num_decode_tokens"], entry["num_prefill_tokens"], end_s)
        )
        end_s -= duration_s
    return tuple(reversed(steps))


def _sequence(entry: Mapping[str, Any]) -> SequenceView:
    return SequenceView(
        request_id=entry["request_id"],
        status=Status(entry["status"]),
        slot=entry["slot"],
        waits_for=entry["waits_for"],
        num_prompt=entry["num_prompt_tokens"],
        num_cached=entry["num_cached_tokens"],
        num_evaluated=entry["num_evaluated_tokens"],
        num_output=entry["num_output_tokens"],
        max_tokens=entry["max_tokens"],
        queue_ms=entry["queue_ms"],
        prefill_ms=entry["prefill_ms"],
        decode_ms=entry["decode_ms"],
        stalled_ms=entry["stalled_ms"],
        ttft_ms=entry["ttft_ms"],
    )
