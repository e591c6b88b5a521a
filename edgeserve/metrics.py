"""What TTFT, ITL, TPOT, attainment, goodput and the work of a request mean. Defined here once, for everybody.

Owns: one request's timeline and the figures that follow from it, percentiles with their sample count, service
level objectives, rates over a window, Little's law, the prefill/decode balance and the counting of work.
Does not know: where a time stamp came from. Callers never mix the clocks of two machines in one timeline.

Symbols, as used below: arrival `a`, output tokens `t_1 ... t_m`.

    TTFT = t_1 - a        E2E = t_m - a        TPOT = (t_m - t_1) / (m - 1), undefined for m = 1
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import groupby, pairwise
from operator import itemgetter

import numpy as np

from edgeserve.errors import UsageError

# Below this many samples the 99th percentile rests on one or two requests.
MIN_SAMPLES_P99 = 200
# A rate over fewer evaluated tokens measures the call, not the model (one token after a prefix hit).
MIN_TOKENS_FOR_RATE = 8


# The chat template's own first tokens are the same in every prompt: cached ones up to here tell nothing.
TEMPLATE_TOKENS = 16
MISS_BELOW_SHARE = 0.05
HIT_FROM_SHARE = 0.8


class TimelineError(UsageError):
    """Time stamps that cannot be one request's: not finite, none at all, before the arrival, out of order."""


@dataclass(frozen=True)
class OutputEvent:
    """One arrival of output. `num_tokens` > 1 when a stream packs several tokens into one event."""

    at_s: float
    num_tokens: int = 1


@dataclass(frozen=True)
class Timeline:
    """One request's output on one clock. Raises `TimelineError` rather than hold what cannot have happened.

    `arrival_s` is the instant of sending or, in an open loop, the scheduled instant; on a server it is when
    the last byte of the HTTP request was received.
    """

    arrival_s: float
    events: tuple[OutputEvent, ...]

    def __post_init__(self) -> None:
        stamps = [event.at_s for event in self.events]
        if not stamps:
            raise TimelineError("A request without output has no timeline.")
        if not all(math.isfinite(stamp) for stamp in [self.arrival_s, *stamps]):
            raise TimelineError("A timeline holds a time that is not finite.")
        if stamps[0] < self.arrival_s:
            raise TimelineError(
                f"Output at {stamps[0]} s lies before the request's arrival at {self.arrival_s} s."
            )
        if any(later < earlier for earlier, later in pairwise(stamps)):
            raise TimelineError("Output events are out of order.")
        if any(event.num_tokens < 1 for event in self.events):
            raise TimelineError("An output event carries less than one token.")

    @classmethod
    def of_tokens(cls, arrival_s: float, stamps_s: Iterable[float]) -> Timeline:
        """One token an event."""
        return cls(arrival_s, tuple(OutputEvent(stamp) for stamp in stamps_s))

    @classmethod
    def of_chunks(cls, arrival_s: float, stamps_s: Sequence[float], num_tokens: int | None) -> Timeline:
        """Chunks whose own sizes are unknown, with the total that the server's `usage` states.

        Chunks with the same stamp came in one piece and are one event. The tokens are spread evenly over the
        chunks (each holds at least one), which keeps TTFT, E2E and TPOT exact and makes only a token's place
        within its chunk an approximation. `num_tokens` None: one token a chunk.
        """
        total = max(num_tokens or 0, len(stamps_s))
        bounds = [index * total // len(stamps_s) for index in range(len(stamps_s) + 1)] if stamps_s else []
        sizes = [upper - lower for lower, upper in pairwise(bounds)]
        chunks = groupby(zip(stamps_s, sizes, strict=True), key=itemgetter(0))
        return cls(arrival_s, tuple(OutputEvent(at, sum(size for _, size in group)) for at, group in chunks))

    @property
    def num_tokens(self) -> int:
        return sum(event.num_tokens for event in self.events)

    @property
    def ttft_s(self) -> float:
        return self.events[0].at_s - self.arrival_s

    @property
    def e2e_s(self) -> float:
        """Arrival to the last token; the closing of the connection comes later and does not count."""
        return self.events[-1].at_s - self.arrival_s

    @property
    def decode_s(self) -> float:
        return self.events[-1].at_s - self.events[0].at_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None for a single token, never 0."""
        return self.decode_s / (self.num_tokens - 1) if self.num_tokens > 1 else None

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """Times between events, each counted once however many tokens the event carried."""
        return tuple(later.at_s - earlier.at_s for earlier, later in pairwise(self.events))

    @property
    def itl_s(self) -> tuple[float, ...] | None:
        """Inter-token latencies; None when an event carries several tokens, since a gap is then not one."""
        return self.gaps_s if self.num_tokens == len(self.events) else None

    @property
    def max_gap_s(self) -> float | None:
        """The longest time without a token after the first one; None when there was only one event."""
        return max(self.gaps_s, default=None)

    def tokens_between(self, start_s: float, end_s: float) -> int:
        """Tokens with start < t <= end, so that neighbouring windows count each token once."""
        return sum(event.num_tokens for event in self.events if start_s < event.at_s <= end_s)


@dataclass(frozen=True)
class TtftParts:
    """A server's own account of one TTFT, in seconds, all on the server's clock."""

    front_end_s: float = 0.0  # template and tokenizing
    queue_s: float = 0.0
    cache_restore_s: float = 0.0
    prefill_s: float = 0.0
    first_sample_s: float = 0.0
    delivery_s: float = 0.0

    @property
    def total_s(self) -> float:
        return float(sum(getattr(self, field.name) for field in fields(self)))

    def unexplained_s(self, ttft_s: float) -> float:
        """What the parts leave over of an independently stamped TTFT."""
        return ttft_s - self.total_s


def cache_state(num_prompt_tokens: int, num_cached_tokens: int) -> str:
    """miss, partial or hit: how much of a prompt was found resident. Never averaged over."""
    share = num_cached_tokens / num_prompt_tokens if num_prompt_tokens else 0.0
    if num_cached_tokens <= TEMPLATE_TOKENS or share < MISS_BELOW_SHARE:
        return "miss"
    return "hit" if share >= HIT_FROM_SHARE else "partial"


def mean_tpot_s(timelines: Iterable[Timeline]) -> float | None:
    """Mean of the requests' TPOT: every request weighs the same. Requests with one token are left out."""
    values = [timeline.tpot_s for timeline in timelines if timeline.tpot_s is not None]
    return sum(values) / len(values) if values else None


def pooled_tpot_s(timelines: Iterable[Timeline]) -> float | None:
    """All decode time over all gaps between tokens: every token weighs the same."""
    several = [timeline for timeline in timelines if timeline.num_tokens > 1]
    num_gaps = sum(timeline.num_tokens - 1 for timeline in several)
    return sum(timeline.decode_s for timeline in several) / num_gaps if num_gaps else None


@dataclass(frozen=True)
class Summary:
    """A sample in a few figures. All None for an empty sample; `p99` only from `MIN_SAMPLES_P99` on."""

    n: int
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    max: float | None = None


def percentile(values: Sequence[float], percent: float, num_failed: int = 0) -> float | None:
    """Linear interpolation between closest ranks. `num_failed` requests rank as slower than any that ended.

    None for an empty sample, and when the rank falls among the failed, where no time exists.
    """
    num_all = len(values) + num_failed
    if not num_all:
        return None
    rank = (num_all - 1) * percent / 100
    if math.ceil(rank) >= len(values):
        return None
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    return float(np.interp(rank, np.arange(len(ordered)), ordered))


def summarize(values: Iterable[float | None], num_failed: int = 0) -> Summary:
    """Percentiles with their count; undefined values (None) are left out, failed requests rank as slowest."""
    known = [value for value in values if value is not None]
    n = len(known) + num_failed
    if not n:
        return Summary(n=0)
    return Summary(
        n=n,
        mean=sum(known) / len(known) if known and not num_failed else None,
        p50=percentile(known, 50, num_failed),
        p90=percentile(known, 90, num_failed),
        p95=percentile(known, 95, num_failed),
        p99=percentile(known, 99, num_failed) if n >= MIN_SAMPLES_P99 else None,
        max=max(known) if known and not num_failed else None,
    )


@dataclass(frozen=True)
class SLO:
    """Bounds that one request has to keep, in seconds; None leaves a bound out.

    A bound on a figure that the request does not have (TPOT of a single token) is kept. The bound on TTFT may
    grow with the prompt: `ttft_s` and `ttft_token_s` for each of its tokens.
    """

    ttft_s: float | None = None
    ttft_token_s: float | None = None
    tpot_s: float | None = None
    itl_s: float | None = None
    e2e_s: float | None = None

    def ttft_bound_s(self, num_prompt_tokens: int) -> float | None:
        """The bound on TTFT for a prompt of so many tokens."""
        if self.ttft_token_s is None:
            return self.ttft_s
        return (self.ttft_s or 0.0) + self.ttft_token_s * num_prompt_tokens

    def is_met_by(self, timeline: Timeline, num_prompt_tokens: int = 0) -> bool:
        pairs = (
            (timeline.ttft_s, self.ttft_bound_s(num_prompt_tokens)),
            (timeline.tpot_s, self.tpot_s),
            (timeline.max_gap_s, self.itl_s),
            (timeline.e2e_s, self.e2e_s),
        )
        return all(value is None or bound is None or value <= bound for value, bound in pairs)


SLO_PRESETS = {"chat": SLO(ttft_s=2.0, tpot_s=0.1), "agent": SLO(ttft_s=10.0, tpot_s=0.06)}


def attainment(num_good: int, num_offered: int) -> float | None:
    """Good requests over all that were offered: rejected, failed and timed out ones count against it."""
    return num_good / num_offered if num_offered else None


def goodput_per_s(num_good: int, window_s: float) -> float | None:
    """Requests within their SLO per second of window."""
    return num_good / window_s if window_s > 0 else None


def tokens_per_s(num_tokens: int, duration_s: float, min_tokens: int = MIN_TOKENS_FOR_RATE) -> float | None:
    """A speed, or None where too few tokens or no time make the quotient meaningless."""
    return num_tokens / duration_s if duration_s > 0 and num_tokens >= min_tokens else None


def output_tokens_per_s(timelines: Iterable[Timeline], start_s: float, end_s: float) -> float | None:
    """Throughput from the tokens' own stamps inside the window; requests need not have ended in it."""
    if end_s <= start_s:
        return None
    return sum(timeline.tokens_between(start_s, end_s) for timeline in timelines) / (end_s - start_s)


def requests_per_s(end_stamps_s: Iterable[float], start_s: float, end_s: float) -> float | None:
    """Completions inside the window per second of it."""
    if end_s <= start_s:
        return None
    return sum(start_s < stamp <= end_s for stamp in end_stamps_s) / (end_s - start_s)


@dataclass(frozen=True)
class LittlesLaw:
    """N = lambda * W over a window: a large gap means a wrong measurement or a system that is not steady."""

    mean_in_flight: float
    arrivals_per_s: float
    mean_time_s: float

    @property
    def relative_gap(self) -> float | None:
        """(N - lambda W) / N."""
        if not self.mean_in_flight:
            return None
        return (self.mean_in_flight - self.arrivals_per_s * self.mean_time_s) / self.mean_in_flight


def littles_law(spans_s: Sequence[tuple[float, float]], start_s: float, end_s: float) -> LittlesLaw | None:
    """From requests' (arrival, end) spans: N is the time average of those in flight, lambda and W come from
    the requests that arrived inside the window. None when nothing arrived in it."""
    arrived = [(begin, end) for begin, end in spans_s if start_s <= begin < end_s]
    if not arrived or end_s <= start_s:
        return None
    window_s = end_s - start_s
    in_flight = sum(max(0.0, min(end, end_s) - max(begin, start_s)) for begin, end in spans_s) / window_s
    mean_time_s = sum(end - begin for begin, end in arrived) / len(arrived)
    return LittlesLaw(in_flight, len(arrived) / window_s, mean_time_s)


def prefill_share(prefill_s: float, decode_s: float) -> float | None:
    """The part of model time that went into prompts, 0 to 1."""
    total = prefill_s + decode_s
    return prefill_s / total if total > 0 else None


def prefill_pairs(n_tokens: int) -> int:
    """Causal (query, key) pairs of a prefill: n (n + 1) / 2."""
    return n_tokens * (n_tokens + 1) // 2


def decode_pairs(n_tokens: int, num_steps: int) -> int:
    """Causal pairs of `num_steps` decode steps behind a prompt of n: k n + k (k + 1) / 2.

    An answer of m tokens takes k = m - 1 steps, since its first token comes out of the prefill.
    """
    return num_steps * n_tokens + num_steps * (num_steps + 1) // 2


def attention_flops(n_head: int, head_dim: int, num_pairs: int) -> int:
    """QK and AV with a multiply-add as 2 FLOPs, per layer: 4 * query heads * head dim * pairs."""
    return 4 * n_head * head_dim * num_pairs


def matmul_flops(num_parameters: int, num_tokens: int) -> int:
    """Dense weights: about 2 FLOPs per parameter and token."""
    return 2 * num_parameters * num_tokens


def step_lower_bound_s(flops: float, num_bytes: float, peak_flops: float, bandwidth_bytes_s: float) -> float:
    """No step is faster than its arithmetic at peak or its bytes at full bandwidth (roofline)."""
    return max(flops / peak_flops, num_bytes / bandwidth_bytes_s)


def decode_intensity(num_sequences: int, bytes_per_weight: float) -> float:
    """FLOP per byte of a dense model's batched decode step: about 2 B / b_w."""
    return 2 * num_sequences / bytes_per_weight
