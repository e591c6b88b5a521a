"""What a benchmark run can be told, parsed and checked once. Knows nothing of command lines."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from urllib.parse import urlsplit

from edgeserve.bench.workload import Arrivals, Lengths
from edgeserve.client import hide_user
from edgeserve.errors import UsageError
from edgeserve.metrics import SLO, SLO_PRESETS


class Scenario(StrEnum):
    DECODE = "decode"  # 1 and several streams at once
    DEPTH = "depth"  # one stream behind prompts of growing length
    STALL = "stall"  # a long cold prompt arrives while a stream decodes
    TURNS = "turns"  # one chat that grows
    LOAD = "load"  # open loop at given rates
    SWEEP = "sweep"  # open loop, rates sought until the objective is missed
    CLOSED = "closed"  # a fixed number of clients, each waiting for its answer
    TRACE = "trace"  # open loop, arrivals and lengths from a file
    PROBE = "probe"  # one-token requests at a steady rate, a long cold prompt among them


# Prompt and output lengths when none are given. Load and sweep mix lengths as chats do.
DEFAULT_LENGTHS: Mapping[Scenario, tuple[str, str]] = {
    Scenario.DECODE: ("64", "64"),
    Scenario.DEPTH: ("64", "32"),
    Scenario.STALL: ("64", "256"),
    Scenario.TURNS: ("64", "48"),
    Scenario.LOAD: ("lognormal:256:0.5", "lognormal:64:0.4"),
    Scenario.SWEEP: ("lognormal:256:0.5", "lognormal:64:0.4"),
    Scenario.CLOSED: ("256", "64"),
    Scenario.TRACE: ("256", "64"),
    Scenario.PROBE: ("16", "1"),
}


@dataclass(frozen=True)
class BenchOptions:
    """One benchmark. `against` is a second server, measured in turns with the first (A B A B).

    `shared_prefix_tokens` > 0 puts the same prefix before every prompt and sends it once beforehand, so that
    requests are warm; otherwise every prompt starts with characters of its own. `fail_if` holds conditions
    such as `ttft_p95>2s`. `extra_params` go into every request's body.
    """

    url: str
    scenario: Scenario
    against: str | None = None
    api_key: str | None = field(default=None, repr=False)
    against_api_key: str | None = field(default=None, repr=False)
    model: str | None = None
    prompt: Lengths | None = None
    output: Lengths | None = None
    shared_prefix_tokens: int = 0
    streams: tuple[int, ...] = (1, 4)
    depths: tuple[int, ...] = (64, 512, 2048)
    stall_prompt_tokens: int = 2048
    probe_rate_per_s: float = 4.0
    num_turns: int = 6
    num_chats: int = 1
    rates_per_s: tuple[float, ...] = (1.0,)
    arrivals: Arrivals = Arrivals.POISSON
    burstiness: float = 1.0
    duration_s: float = 30.0
    warmup_s: float = 5.0
    concurrency: tuple[int, ...] = (1, 2, 4, 8)
    num_requests: int = 32
    trace: Path | None = None
    slo: SLO = SLO_PRESETS["chat"]
    attainment_target: float = 0.9
    repeats: int = 3
    pause_s: float = 0.5
    timeout_s: float = 600.0
    seed: int = 0
    ignore_eos: bool = True
    extra_params: Mapping[str, object] = field(default_factory=dict)
    fail_if: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._check_positive("duration_s", "timeout_s", "burstiness", "stall_prompt_tokens", "num_turns")
        self._check_positive("num_chats", "repeats", "num_requests", "probe_rate_per_s")
        for name in ("streams", "depths", "rates_per_s", "concurrency"):
            values = getattr(self, name)
            if not values or not all(value > 0 and math.isfinite(value) for value in values):
                raise UsageError(f"{name} needs at least one number above 0.")
        if self.warmup_s < 0 or self.pause_s < 0 or self.shared_prefix_tokens < 0:
            raise UsageError("warmup_s, pause_s and shared_prefix_tokens cannot be negative.")
        if not 0 < self.attainment_target <= 1:
            raise UsageError("attainment_target is a share above 0 and at most 1.")
        if self.scenario is Scenario.TRACE and self.trace is None:
            raise UsageError("The trace scenario needs a trace file.")

    def _check_positive(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise UsageError(f"{name} must be above 0.")

    @property
    def prompt_lengths(self) -> Lengths:
        return self.prompt or Lengths.parse(DEFAULT_LENGTHS[self.scenario][0])

    @property
    def output_lengths(self) -> Lengths:
        return self.output or Lengths.parse(DEFAULT_LENGTHS[self.scenario][1])

    @property
    def key_against(self) -> str | None:
        """The second server's key: its own, or the first one's where both are on the same host."""
        is_neighbour = _host(self.against) == _host(self.url)
        return self.against_api_key or (self.api_key if is_neighbour else None)

    def public(self) -> dict[str, object]:
        """All settings but the keys and the users of addresses, in plain values for the report."""
        plain: dict[str, object] = {
            entry.name: _plain(getattr(self, entry.name)) for entry in fields(self) if entry.repr
        }
        return plain | {"prompt": str(self.prompt_lengths), "output": str(self.output_lengths)}


def _host(url: str | None) -> str | None:
    return urlsplit(url).hostname if url else None


def _plain(value: object) -> object:
    if isinstance(value, str):
        return hide_user(value)
    if isinstance(value, SLO):
        return {entry.name: getattr(value, entry.name) for entry in fields(value)}
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, Mapping):
        return dict(value)
    return str(value) if isinstance(value, Path | StrEnum | Lengths) else value
