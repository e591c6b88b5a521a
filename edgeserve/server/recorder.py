"""What became of each request: counted in the metrics, and a JSON line in the log. Never any of its text.

Every request to a generating endpoint has exactly one Recorder and comes to exactly one outcome, whether it
was refused, left by its client or answered.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Collection
from typing import Any

from edgeserve.engine.request import FinishReason, RequestTimings
from edgeserve.errors import QueueTimeoutError, RequestError, RequestTimeoutError, UnavailableError
from edgeserve.server.events import Delta, Event, Finish, Generation
from edgeserve.server.http_errors import CancelledRequestError, ClientLeftError
from edgeserve.server.metrics_export import Metrics, cache_state_of
from edgeserve.server.tally import parts_document

request_log = logging.getLogger("edgeserve.requests")


class Recorder:
    """Follows one request from its arrival to its end."""

    def __init__(self, endpoint: str, metrics: Metrics, client_request_id: str) -> None:
        self._endpoint = endpoint
        self._metrics = metrics
        self._client_request_id = client_request_id
        self._arrival_s = time.perf_counter()
        self._generation: Generation | None = None
        self._is_closed = False
        self._timings: dict[int, RequestTimings] = {}
        self._finished: dict[int, FinishReason] = {}
        self._last_token_s: dict[int, float] = {}

    def begin(self, generation: Generation) -> None:
        """The request is understood and goes to the engine."""
        self._generation = generation
        self._arrival_s = generation.requests[0].arrival_s

    def observe(self, event: Event) -> None:
        self._timings[event.index] = event.timings
        if isinstance(event, Finish):
            self._finished[event.index] = event.reason
        elif isinstance(event, Delta) and event.num_tokens:
            self._observe_gap(event)

    def _observe_gap(self, event: Delta) -> None:
        """A gap between events is a gap between tokens only where each event carries one."""
        now_s = time.perf_counter()
        last_s = self._last_token_s.get(event.index)
        if last_s is not None and event.num_tokens == 1:
            self._metrics.observe_gap(event.timings, now_s - last_s)
        self._last_token_s[event.index] = now_s

    def close(self, error: BaseException | None) -> None:
        """The end, by an error or (None) after the last event. Only the first one counts."""
        if self._is_closed:
            return
        self._is_closed = True
        outcome = outcome_of(error, self._finished.values(), has_begun=self._has_begun)
        total_s = time.perf_counter() - self._arrival_s
        first = next(iter(self._timings.values()), None)
        self._metrics.observe_request(
            self._endpoint, outcome, total_s, cache_state_of(first) if first else "miss"
        )
        if outcome == "cancelled" and self._generation is not None and not self._has_begun:
            self._metrics.cancelled_in_queue.inc()
        for index, timings in self._timings.items():
            self._metrics.observe_choice(timings, is_complete=index in self._finished)
        request_log.info(json.dumps(self._line(outcome, total_s, error)))

    @property
    def _has_begun(self) -> bool:
        """Whether a step was spent on it, as far as was heard."""
        return any(timings.queue_s is not None for timings in self._timings.values())

    def _line(self, outcome: str, total_s: float, error: BaseException | None) -> dict[str, Any]:
        every = list(self._timings.values())
        first = self._first_choice(total_s)
        requests = self._generation.requests if self._generation else ()
        line: dict[str, Any] = {
            "request_id": self._generation.id if self._generation else None,
            "client_request_id": self._client_request_id,
            "endpoint": self._endpoint,
            "outcome": outcome,
            "prompt_n": sum(len(request.prompt_token_ids) for request in requests),
            "cache_n": sum(timings.num_cached_tokens for timings in every),
            "predicted_n": sum(timings.num_output_tokens for timings in every),
            **parts_document(first),
            "ttft_ms": _ms(first.ttft_s),
            "tpot_ms": _tpot_ms(first),
            "total_ms": _ms(total_s),
        }
        if isinstance(error, RequestError):
            line["error"] = error.code or error.type
        return line

    def _first_choice(self, total_s: float) -> RequestTimings:
        """The first choice's timeline, complete or cut off at the end of the request."""
        if self._generation is None:
            return RequestTimings(0, 0, 0, 0, front_end_s=total_s, e2e_s=total_s)
        request = self._generation.requests[0]
        unheard = RequestTimings(len(request.prompt_token_ids), 0, 0, 0, front_end_s=request.front_end_s)
        heard = self._timings.get(0, unheard)
        return heard if 0 in self._finished else heard.cut_off(total_s)


def outcome_of(error: BaseException | None, reasons: Collection[FinishReason], *, has_begun: bool) -> str:
    """One of metrics_export.OUTCOMES."""
    if error is None:
        return "length" if FinishReason.LENGTH in reasons else "ok"
    if isinstance(error, GeneratorExit | asyncio.CancelledError | CancelledRequestError | ClientLeftError):
        return "cancelled"
    if isinstance(error, RequestTimeoutError | QueueTimeoutError):
        return "timeout"
    is_refusal = isinstance(error, RequestError) and error.status < 500
    return "rejected" if is_refusal or (isinstance(error, UnavailableError) and not has_begun) else "error"


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)


def _tpot_ms(timings: RequestTimings) -> float | None:
    if timings.decode_s is None or timings.num_output_tokens < 2:
        return None
    return _ms(timings.decode_s / (timings.num_output_tokens - 1))
