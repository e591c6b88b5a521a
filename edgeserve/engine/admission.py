"""Who may wait, for how long, and when it is worth asking again.

Owns the limits of the queue and the estimate behind Retry-After: running and waiting requests, played forward
at the speeds measured so far. Pure: sees no clock; instants and speeds are handed in.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from edgeserve.engine.request import Sequence
from edgeserve.engine.scheduler import Scheduler
from edgeserve.errors import QueueFullError, QueueTimeoutError, RequestError, RequestTimeoutError

_LEAST_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class Speeds:
    """What the engine has measured: seconds of a step with all slots decoding, seconds per prompt token, and
    the mean length of finished answers (None: none yet). Zeros where nothing is known."""

    decode_step_s: float = 0.0
    prompt_token_s: float = 0.0
    mean_output_tokens: float | None = None

    def left_s(self, sequence: Sequence) -> float:
        """How long a sequence will still hold its slot. An answer is expected to be as long as answers were,
        and to stop at its cap."""
        num_made = sequence.num_output_tokens
        num_left: float = sequence.max_tokens - num_made
        if self.mean_output_tokens is not None:
            num_left = min(num_left, max(1.0, self.mean_output_tokens))
        num_prompt_left = max(0, sequence.num_prompt_tokens - sequence.num_computed_tokens)
        return num_prompt_left * self.prompt_token_s + num_left * self.decode_step_s


class Admission:
    """The limits of one scheduler's queue."""

    def __init__(
        self, scheduler: Scheduler, max_waiting: int, max_waiting_tokens: int, max_queue_s: float
    ) -> None:
        """`max_waiting_tokens` bounds the prompt tokens that wait; 0 does not."""
        self._scheduler = scheduler
        self._max_waiting = max_waiting
        self._max_waiting_tokens = max_waiting_tokens
        self._max_queue_s = max_queue_s

    def check(self, sequence: Sequence, speeds: Speeds) -> None:
        """Raises QueueFullError when the queue has no room for one more."""
        queued = self._scheduler.queued(sequence)
        if len(queued) > self._max_waiting:
            waiting = f"{len(queued) - 1} requests are waiting, as many as may"
            raise self._full(waiting, len(queued) - self._max_waiting, speeds)
        num_tokens = sum(item.num_prompt_tokens for item in queued)
        # A prompt that is longer than the limit may still wait alone.
        if self._max_waiting_tokens and len(queued) > 1 and num_tokens > self._max_waiting_tokens:
            raise self._over_budget(queued, num_tokens, speeds)

    def _full(self, waiting: str, num_to_leave: int, speeds: Speeds) -> QueueFullError:
        cause, words = self._cause(self._scheduler.waiting.head if self._scheduler.waiting else None)
        return QueueFullError(
            f"{waiting}; the next one waits for {words}.",
            self._retry_after_s(num_to_leave, speeds),
            cause=cause,
        )

    def _over_budget(self, queued: list[Sequence], num_tokens: int, speeds: Speeds) -> QueueFullError:
        newest, others = queued[-1], list(self._scheduler.waiting)[1 - len(queued) :]
        excess, num_to_leave = num_tokens - self._max_waiting_tokens, 0
        while excess > 0 and num_to_leave < len(others):
            excess -= others[num_to_leave].num_prompt_tokens
            num_to_leave += 1
        return QueueFullError(
            f"{num_tokens - newest.num_prompt_tokens} prompt tokens are waiting and this prompt has"
            f" {newest.num_prompt_tokens}; {self._max_waiting_tokens} may.",
            self._retry_after_s(num_to_leave, speeds),
            cause="budget",
        )

    def _cause(self, sequence: Sequence | None) -> tuple[str, str]:
        """What a waiting sequence lacks: a word for programs, and words for people."""
        missing = self._scheduler.kv_cache.num_missing_cells(sequence) if sequence else 0
        return ("cells", f"{missing} KV cells") if missing else ("sequences", "a free sequence")

    # -- giving up ------------------------------------------------------------------------------------------

    def past_deadline(self, now_s: float) -> Iterator[tuple[Sequence, RequestError]]:
        """Who has a deadline that has passed, waiting or running."""
        for sequence in (*self._scheduler.waiting.by_arrival(), *self._scheduler.running):
            limit_s = sequence.request.urgency.deadline_s
            if limit_s is not None and now_s - sequence.request.arrival_s >= limit_s:
                words = f"The deadline of {limit_s * 1e3:g} ms passed {_where(sequence)}."
                yield sequence, RequestTimeoutError(words, code="deadline_exceeded")

    def past_patience(self, now_s: float, speeds: Speeds) -> Iterator[tuple[Sequence, RequestError]]:
        """Who has waited as long as it may. Asked after admission: what finds a slot waits no longer."""
        late = [
            (sequence, limit_s)
            for sequence in self._scheduler.waiting.by_arrival()
            if now_s - sequence.request.queued_s >= (limit_s := self._patience_s(sequence))
        ]
        starts_s = dict(zip(self._scheduler.waiting, self.starts_s(speeds), strict=True)) if late else {}
        for sequence, limit_s in late:
            cause, words = self._cause(sequence)
            yield (
                sequence,
                QueueTimeoutError(
                    f"The request waited {limit_s * 1e3:g} ms, as long as it may, for {words}.",
                    max(_LEAST_RETRY_S, starts_s[sequence]),
                    cause=cause,
                ),
            )

    def _patience_s(self, sequence: Sequence) -> float:
        own_s = sequence.request.urgency.max_queue_s
        return self._max_queue_s if own_s is None else min(own_s, self._max_queue_s)

    # -- looking ahead --------------------------------------------------------------------------------------

    def _retry_after_s(self, num_to_leave: int, speeds: Speeds) -> float:
        """When so many of those that wait will have been admitted, or, where none waits, a slot is free."""
        starts_s = self.starts_s(speeds)
        if not starts_s:
            starts_s = [min((speeds.left_s(item) for item in self._scheduler.running), default=0.0)]
        return max(_LEAST_RETRY_S, starts_s[min(num_to_leave, len(starts_s)) - 1])

    def starts_s(self, speeds: Speeds) -> list[float]:
        """In how many seconds each waiting sequence is expected to be admitted, in order."""
        cache, running = self._scheduler.kv_cache, self._scheduler.running
        ends = [(speeds.left_s(item), index, item.max_num_tokens) for index, item in enumerate(running)]
        heapq.heapify(ends)
        num_free = len(cache.slots) - len(running)
        room = cache.n_ctx - cache.num_reserved_cells if cache.unified else cache.n_ctx * len(cache.slots)
        now_s, starts_s = 0.0, []
        for index, sequence in enumerate(self._scheduler.waiting, start=len(running)):
            while ends and (not num_free or room < sequence.max_num_tokens):
                now_s, _, cells = heapq.heappop(ends)
                num_free, room = num_free + 1, room + cells
            starts_s.append(now_s)
            num_free, room = num_free - 1, room - sequence.max_num_tokens
            heapq.heappush(ends, (now_s + speeds.left_s(sequence), index, sequence.max_num_tokens))
        return starts_s


def _where(sequence: Sequence) -> str:
    if sequence.num_output_tokens:
        return f"after {sequence.num_output_tokens} tokens of the answer"
    return "while the prompt was computed" if sequence.is_prefilling else "in the queue"
