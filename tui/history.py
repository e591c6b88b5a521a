"""What has been seen of a server so far: speeds over time, the last steps, gaps, TTFTs, who has just left.

Owns the buckets of time behind the charts and the windows that figures are taken over. Percentiles are
metrics.py's. Pure: every moment is handed in, on the observer's clock. Knows nothing of how it is shown.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from edgeserve.metrics import Summary, cache_state, prefill_share, summarize
from tui.snapshot import SequenceView, Snapshot, Status, Step, Totals

BUCKET_S = 0.5
KEPT_S = 20 * 60.0
NOW_S = 10.0
"""What "now" is: the window of the server's own rates."""
LAST_MINUTE_S = 60.0
NUM_STEPS = 512
DONE_SHOWN_S = 8.0
_ETA_WINDOW_S = 3.0
_MAX_BUCKETS = int(KEPT_S / BUCKET_S)


@dataclass(slots=True)
class Bucket:
    """Work within one stretch of time.

    `prefill_s` and `decode_s` are the durations of steps that carried any of that kind; a mixed step counts
    towards both, so both speeds are lower bounds. `stream_s` sums the waits of all streams for their tokens.
    """

    prefill_tokens: float = 0.0
    prefill_s: float = 0.0
    decode_tokens: float = 0.0
    decode_s: float = 0.0
    stream_s: float = 0.0
    longest_s: float = 0.0

    def add(self, other: Bucket, share: float = 1.0) -> None:
        self.prefill_tokens += share * other.prefill_tokens
        self.prefill_s += share * other.prefill_s
        self.decode_tokens += share * other.decode_tokens
        self.decode_s += share * other.decode_s
        self.stream_s += share * other.stream_s
        self.longest_s = max(self.longest_s, other.longest_s)

    @property
    def prefill_tokens_per_s(self) -> float | None:
        return self.prefill_tokens / self.prefill_s if self.prefill_s > 0 and self.prefill_tokens else None

    @property
    def decode_tokens_per_s(self) -> float | None:
        """All streams together."""
        return self.decode_tokens / self.decode_s if self.decode_s > 0 and self.decode_tokens else None

    @property
    def ms_per_token(self) -> float | None:
        """The mean wait of one stream for its next token."""
        return 1e3 * self.stream_s / self.decode_tokens if self.decode_tokens else None


@dataclass(frozen=True, slots=True)
class Ttft:
    at_s: float
    ttft_s: float
    request_id: str
    num_prompt: int
    num_cached: int
    queue_s: float

    @property
    def cache_state(self) -> str:
        """miss, partial or hit, as everywhere."""
        return cache_state(self.num_prompt, self.num_cached)


@dataclass(frozen=True, slots=True)
class Moment:
    """Where all sums stood, so that two moments tell what happened between them.

    `step_s`, `decode_s` and `stalled_s` are counted by the observer, from the steps (None where they are not
    told) and requests that it saw; `totals` are the server's own.
    """

    at_s: float
    num_waiting: int | None
    running: frozenset[str]
    totals: Totals | None
    step_s: float | None
    decode_s: float
    stalled_s: float


class History:
    """Fed with snapshots in order; bounded in memory whatever happens."""

    def __init__(self) -> None:
        self.latest: Snapshot | None = None
        self.steps: deque[Step] = deque(maxlen=NUM_STEPS)
        self.ttfts: deque[Ttft] = deque(maxlen=1000)
        self.done: deque[tuple[float, SequenceView]] = deque(maxlen=50)
        self._buckets: dict[int, Bucket] = {}
        self._gaps: deque[Step] = deque()
        self._progress: dict[str, deque[tuple[float, int]]] = {}
        self._known: dict[str, SequenceView] = {}
        self._seen_since_s: dict[str, float] = {}
        self._step_s = self._decode_s = self._stalled_s = 0.0
        self._moments: deque[Moment] = deque()

    def take(self, snapshot: Snapshot) -> None:
        if snapshot.steps is not None:
            self._take_steps(snapshot.steps)
        elif self.latest is not None:
            self._take_poll(self.latest, snapshot)
        self._take_sequences(snapshot)
        self.latest = snapshot
        self._take_moment(snapshot)

    # --- what comes in

    def _take_steps(self, steps: tuple[Step, ...]) -> None:
        is_first = self.latest is None
        for step in steps:
            self.steps.append(step)
            # When the steps of the first snapshot ended is not known: the server may have been idle since.
            if is_first:
                continue
            self._gaps.append(step)
            self._step_s += step.duration_s
            self._add(step.end_s - step.duration_s, step.end_s, _work_of(step))
        while self._gaps and self._gaps[0].end_s < self._gaps[-1].end_s - LAST_MINUTE_S:
            self._gaps.popleft()

    def _take_poll(self, before: Snapshot, now: Snapshot) -> None:
        """Two looks at a server that tells no steps: tokens in between, evenly spread."""
        elapsed_s = now.at_s - before.at_s
        earlier = {view.request_id: view for view in before.running}
        decoding = Bucket()
        for view in now.running:
            old = earlier.get(view.request_id)
            if old is not None and old.num_output and view.num_output > old.num_output:
                decoding.decode_tokens += view.num_output - old.num_output
                decoding.stream_s += elapsed_s
        if decoding.decode_tokens:
            decoding.decode_s = elapsed_s
            self._add(before.at_s, now.at_s, decoding)
        if now.totals is not None and before.totals is not None:
            self._take_prompts(before.totals, now.totals, now.at_s)

    def _take_prompts(self, before: Totals, now: Totals, at_s: float) -> None:
        """Prompts that were done in between, over the time that they took."""
        num_tokens = (now.prompt_tokens - now.cached_tokens) - (before.prompt_tokens - before.cached_tokens)
        seconds = (now.prefill_ms - before.prefill_ms) / 1e3
        if num_tokens > 0 and seconds > 0:
            self._add(at_s - seconds, at_s, Bucket(prefill_tokens=num_tokens, prefill_s=seconds))

    def _take_sequences(self, snapshot: Snapshot) -> None:
        present = {view.request_id: view for view in snapshot.sequences}
        for request_id, view in present.items():
            old = self._known.get(request_id)
            has_token = view.ttft_ms is not None and (old is None or old.ttft_ms is None)
            if has_token and self.latest is not None:
                self._take_ttft(view, snapshot.at_s)
            self._take_progress(view, snapshot.at_s)
            self._take_decode(old, view)
            self._seen_since_s.setdefault(request_id, snapshot.at_s)
        for request_id in self._known.keys() - present.keys():
            self.done.append((snapshot.at_s, replace(self._known[request_id], status=Status.DONE)))
            self._progress.pop(request_id, None)
            self._seen_since_s.pop(request_id, None)
        self._known = present

    def _take_ttft(self, view: SequenceView, at_s: float) -> None:
        assert view.ttft_ms is not None
        self.ttfts.append(
            Ttft(
                at_s,
                view.ttft_ms / 1e3,
                view.request_id,
                view.num_prompt or 0,
                view.num_cached or 0,
                (view.queue_ms or 0.0) / 1e3,
            )
        )

    def _take_progress(self, view: SequenceView, at_s: float) -> None:
        if view.status is not Status.PREFILL or view.num_evaluated is None:
            self._progress.pop(view.request_id, None)
            return
        seen = self._progress.setdefault(view.request_id, deque())
        seen.append((at_s, view.num_evaluated))
        while seen[0][0] < at_s - _ETA_WINDOW_S and len(seen) > 2:
            seen.popleft()

    def _take_decode(self, old: SequenceView | None, view: SequenceView) -> None:
        """The part of a request's decode time that is new; what it had when watching began is nobody's."""
        if old is not None and view.decode_ms is not None and view.stalled_ms is not None:
            self._decode_s += max(0.0, view.decode_ms - (old.decode_ms or 0.0)) / 1e3
            self._stalled_s += max(0.0, view.stalled_ms - (old.stalled_ms or 0.0)) / 1e3

    def _take_moment(self, snapshot: Snapshot) -> None:
        """Once a second is enough for shares of a minute."""
        moments = self._moments
        if moments and snapshot.at_s - moments[-1].at_s < 1.0:
            return
        moments.append(self._moment(snapshot, snapshot.at_s))
        while len(moments) > 1 and moments[1].at_s <= snapshot.at_s - LAST_MINUTE_S:
            moments.popleft()

    def _moment(self, snapshot: Snapshot, at_s: float) -> Moment:
        running = frozenset(view.request_id for view in snapshot.running)
        step_s = self._step_s if snapshot.steps is not None else None
        return Moment(
            at_s,
            snapshot.num_waiting,
            running,
            snapshot.totals,
            step_s,
            self._decode_s,
            self._stalled_s,
        )

    def _add(self, start_s: float, end_s: float, work: Bucket) -> None:
        """Book work that filled start to end, by overlap with the buckets."""
        length_s = end_s - start_s
        first, last = int(start_s // BUCKET_S), int(end_s // BUCKET_S)
        first = max(first, last - _MAX_BUCKETS)
        for index in range(first, last + 1):
            overlap_s = min(end_s, (index + 1) * BUCKET_S) - max(start_s, index * BUCKET_S)
            share = overlap_s / length_s if length_s > 0 else 1.0
            self._buckets.setdefault(index, Bucket()).add(work, share)
        while len(self._buckets) > _MAX_BUCKETS:
            del self._buckets[next(iter(self._buckets))]

    # --- what is asked

    def column(self, start_s: float, end_s: float) -> Bucket:
        """All work from start to end, both on the grid of buckets."""
        total = Bucket()
        for index in range(round(start_s / BUCKET_S), round(end_s / BUCKET_S)):
            if (bucket := self._buckets.get(index)) is not None:
                total.add(bucket)
        return total

    def now(self, at_s: float) -> Bucket:
        """The last `NOW_S` seconds, the bucket that is still filling included."""
        end = int(at_s // BUCKET_S) + 1
        return self.column(end * BUCKET_S - NOW_S - BUCKET_S, end * BUCKET_S)

    def gap_steps(self, at_s: float) -> Iterator[Step]:
        """Steps of the last minute that carried decodes."""
        return (step for step in self._gaps if step.num_decode and step.end_s > at_s - LAST_MINUTE_S)

    def gaps(self, at_s: float) -> Summary:
        """The gaps between tokens that streams met in the last minute, in seconds: one for each token."""
        steps = [(step.duration_s, step.num_decode) for step in self.gap_steps(at_s)]
        if not steps:
            return Summary(n=0)
        durations, counts = np.array([s for s, _ in steps]), np.array([n for _, n in steps])
        return summarize(np.repeat(durations, counts).tolist())

    def last_minute(self, at_s: float) -> tuple[Moment, Moment] | None:
        """The ends of the last minute, or of what has been seen so far; None while that is a single moment.

        An idle server sends nothing: its last word holds until now.
        """
        if self.latest is None:
            return None
        early = [moment for moment in self._moments if moment.at_s <= at_s - LAST_MINUTE_S]
        first = early[-1] if early else self._moments[0]
        return (first, self._moment(self.latest, at_s)) if first.at_s < at_s else None

    def prefill_share(self, at_s: float) -> float | None:
        """The part of the last minute's model time that went into prompts, by the server's own account."""
        ends = self.last_minute(at_s)
        if ends is None or ends[0].totals is None or ends[1].totals is None:
            return None
        first, last = ends[0].totals, ends[1].totals
        return prefill_share(last.prefill_ms - first.prefill_ms, last.decode_ms - first.decode_ms)

    def last_ttfts(self, at_s: float) -> list[Ttft]:
        """First tokens of the last minute, oldest first."""
        return [entry for entry in self.ttfts if entry.at_s > at_s - LAST_MINUTE_S]

    def ttft(self, at_s: float, cache: str) -> Summary:
        """First tokens of the last minute whose prompt was a `cache`: miss, partial or hit."""
        return summarize(entry.ttft_s for entry in self.last_ttfts(at_s) if entry.cache_state == cache)

    def waited_s(self, view: SequenceView, at_s: float) -> float | None:
        """How long a request has been seen; it may have been there before."""
        since_s = self._seen_since_s.get(view.request_id)
        return None if since_s is None else at_s - since_s

    def eta_s(self, view: SequenceView) -> float | None:
        """Seconds until the prompt is done, at the speed of the last moments; None while that is unknown."""
        seen = self._progress.get(view.request_id)
        if not seen or len(seen) < 2 or view.num_ready is None or not view.num_prompt:
            return None
        (first_s, first), (last_s, last) = seen[0], seen[-1]
        if last <= first or last_s <= first_s:
            return None
        return (view.num_prompt - view.num_ready) * (last_s - first_s) / (last - first)

    def just_done(self, at_s: float) -> list[SequenceView]:
        """Requests that ended a moment ago, newest first."""
        return [view for ended_s, view in reversed(self.done) if ended_s > at_s - DONE_SHOWN_S]


def _work_of(step: Step) -> Bucket:
    return Bucket(
        prefill_tokens=step.num_prefill,
        prefill_s=step.duration_s if step.num_prefill else 0.0,
        decode_tokens=step.num_decode,
        decode_s=step.duration_s if step.num_decode else 0.0,
        stream_s=step.duration_s * step.num_decode,
        longest_s=step.duration_s if step.num_decode else 0.0,
    )
