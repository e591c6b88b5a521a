"""Send planned requests and write down what came back, and when.

Owns: open and closed loops, one request's record, the send lag, timeouts. All times are seconds after the
start of the run, on one clock. Does not know: what is a good figure (figures.py) or which requests to send.

In an open loop the schedule never waits for an answer, and latency counts from the scheduled instant, so that
a server that falls behind cannot slow down the questions that show it. What is needed before one can be sent
(a connection, the bytes of the request) is made ahead of that instant.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from enum import StrEnum

from edgeserve.bench.prompts import ChatMessages
from edgeserve.client import Client
from edgeserve.errors import EdgeserveError, RequestTimeoutError
from edgeserve.http_stream import Sending
from edgeserve.metrics import Timeline
from edgeserve.stream_events import EventKind, RemoteError, StreamEvent, Timings, Usage

SPIN_S = 0.002
# Enough for a connection to a server near by, short enough for no server to tire of waiting on it.
AHEAD_S = 0.1
POLL_S = 0.1


class Outcome(StrEnum):
    OK = "ok"
    REJECTED = "rejected"  # 429 or 503: the server said no
    TIMEOUT = "timeout"  # the client gave up
    ERROR = "error"  # any other answer, a broken stream, nobody there
    EMPTY = "empty"  # finished without a token
    CANCELLED = "cancelled"  # the benchmark ended first; not the server's doing


@dataclass(frozen=True)
class Request:
    """One request, ready to send."""

    index: int
    messages: ChatMessages
    max_tokens: int
    at_s: float | None = None
    label: str = ""
    num_prompt_tokens: int = 0  # aimed at; the answer tells the real number


@dataclass(frozen=True)
class Record:
    """What became of one request. `stamps_s` are the arrivals of chunks that carried generated tokens."""

    index: int
    label: str
    max_tokens: int
    num_planned_prompt_tokens: int
    scheduled_s: float | None
    sent_s: float
    end_s: float
    outcome: Outcome
    stamps_s: tuple[float, ...] = ()
    finish_reason: str | None = None
    usage: Usage | None = None
    timings: Timings | None = None
    status: int | None = None
    code: str | None = None
    message: str | None = None
    text: str = ""

    @property
    def is_ok(self) -> bool:
        return self.outcome is Outcome.OK

    @property
    def arrival_s(self) -> float:
        """The scheduled instant in an open loop, the moment of sending in a closed one."""
        return self.sent_s if self.scheduled_s is None else self.scheduled_s

    @property
    def send_lag_s(self) -> float | None:
        return None if self.scheduled_s is None else self.sent_s - self.scheduled_s

    @property
    def timeline(self) -> Timeline | None:
        """None without a single token. A chunk of several tokens counts by the server's usage."""
        if not self.stamps_s:
            return None
        num_tokens = self.usage.completion_tokens if self.usage and self.is_ok else None
        return Timeline.of_chunks(self.arrival_s, self.stamps_s, num_tokens)

    @property
    def num_prompt_tokens(self) -> int | None:
        return self.usage.prompt_tokens if self.usage and self.usage.prompt_tokens else None

    @property
    def num_cached_tokens(self) -> int | None:
        """Of the prompt, found resident; None when the server says nothing of it."""
        if self.usage and self.usage.cached_tokens is not None:
            return self.usage.cached_tokens
        return self.timings.cache_n if self.timings else None

    @property
    def num_evaluated_tokens(self) -> int | None:
        prompt, cached = self.num_prompt_tokens, self.num_cached_tokens
        return None if prompt is None or cached is None else max(0, prompt - cached)


@dataclass(eq=False)
class _Draft:
    """A record while it grows; what is in it survives a timeout and a Ctrl-C."""

    request: Request
    sent_s: float
    stamps_s: list[float] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    usage: Usage | None = None
    timings: Timings | None = None

    @property
    def arrival_s(self) -> float:
        return self.sent_s if self.request.at_s is None else self.request.at_s

    def sent(self, at_s: float) -> None:
        """Its bytes are about to be written; until then `sent_s` is when they should be."""
        self.sent_s = at_s

    def take(self, event: StreamEvent, start_s: float) -> None:
        if event.is_output:
            self.stamps_s.append(event.at_s - start_s)
            self.pieces.append(event.text if event.kind is EventKind.TEXT else "")
        elif event.kind is EventKind.FINISH:
            self.finish_reason = event.text
        elif event.error is not None:
            raise event.error
        self.usage = event.usage or self.usage
        self.timings = event.timings or self.timings

    def finish(self, end_s: float, outcome: Outcome) -> Record:
        return Record(
            index=self.request.index,
            label=self.request.label,
            max_tokens=self.request.max_tokens,
            num_planned_prompt_tokens=self.request.num_prompt_tokens,
            scheduled_s=self.request.at_s,
            sent_s=self.sent_s,
            end_s=end_s,
            outcome=outcome,
            stamps_s=tuple(self.stamps_s),
            finish_reason=self.finish_reason,
            usage=self.usage,
            timings=self.timings,
            text="".join(self.pieces),
        )


class Runner:
    """Sends the requests of one run. `records` holds those that have ended, in the order of their end.

    `params` go into every request's body; `on_change` is told how many are in flight and how many have ended.
    """

    def __init__(
        self,
        client: Client,
        params: Mapping[str, object],
        timeout_s: float,
        on_change: Callable[[int, int], None] | None = None,
    ) -> None:
        self.records: list[Record] = []
        self._client = client
        self._params = dict(params)
        self._timeout_s = timeout_s
        self._on_change = on_change or (lambda in_flight, ended: None)
        self.is_cut_short = False
        self._drafts: list[_Draft] = []
        self._start_s = time.perf_counter()

    def now_s(self) -> float:
        return time.perf_counter() - self._start_s

    async def send(self, request: Request, on_output: Callable[[int], None] | None = None) -> Record:
        """At its `at_s`, or at once. Never raises for what the server does. `on_output` is called with the
        number of chunks so far."""
        draft = _Draft(request, max(self.now_s(), request.at_s or 0.0))
        self._drafts.append(draft)
        self._tell()
        record = draft.finish(draft.sent_s, Outcome.CANCELLED)
        try:
            record = await self._send(draft, on_output)
        except asyncio.CancelledError:
            record = draft.finish(max(self.now_s(), draft.sent_s), Outcome.CANCELLED)
            raise
        finally:
            self.records.append(record)
            self._drafts.remove(draft)
            self._tell()
        return record

    async def open_loop(
        self,
        requests: Sequence[Request],
        measured_until_s: float,
        is_hopeless: Callable[[Runner], bool] | None = None,
    ) -> None:
        """Send each at its `at_s`. Requests after `measured_until_s` keep up the load until the last one
        before it has ended; then they are dropped. `is_hopeless`, asked now and then, ends the run early."""
        is_hopeless = is_hopeless or (lambda runner: False)
        measured: list[asyncio.Task[Record]] = []
        others: list[asyncio.Task[Record]] = []
        try:
            for request in requests:
                at_s = request.at_s or 0.0
                if at_s >= measured_until_s and all(task.done() for task in measured):
                    break
                await self.until(at_s - AHEAD_S)
                is_measured = at_s < measured_until_s
                (measured if is_measured else others).append(asyncio.create_task(self.send(request)))
                self.is_cut_short = is_hopeless(self)
                if self.is_cut_short:
                    break
            while not self.is_cut_short and not all(task.done() for task in measured):
                self.is_cut_short = is_hopeless(self)
                await asyncio.wait(measured, timeout=POLL_S)
        finally:
            await _drop([*measured, *others])

    def num_waiting(self, bound_s: Callable[[int], float | None], from_s: float, until_s: float) -> int:
        """Requests scheduled in [from, until) that have had no token for longer than the bound on a prompt of
        so many tokens."""
        now_s = self.now_s()
        waiting = [draft for draft in self._drafts if not draft.stamps_s]
        bounds = [(draft.arrival_s, bound_s(draft.request.num_prompt_tokens)) for draft in waiting]
        return sum(
            limit_s is not None and from_s <= arrival_s < min(until_s, now_s - limit_s)
            for arrival_s, limit_s in bounds
        )

    async def closed_loop(self, requests: Iterable[Request], concurrency: int) -> None:
        """Each of `concurrency` clients sends its next request as soon as its last one has ended."""
        remaining = iter(requests)

        async def one_client() -> None:
            for request in remaining:
                await self.send(request)

        workers = [asyncio.create_task(one_client()) for _ in range(concurrency)]
        try:
            await asyncio.gather(*workers)
        finally:
            await _drop(workers)

    async def until(self, at_s: float) -> None:
        """Wait for an instant of the run. Event loops wake up to a millisecond late: the last stretch is
        spent looking at the clock."""
        await asyncio.sleep(max(0.0, at_s - self.now_s() - SPIN_S))
        while self.now_s() < at_s:
            await asyncio.sleep(0)

    async def _send(self, draft: _Draft, on_output: Callable[[int], None] | None) -> Record:
        request = draft.request
        at_s = request.at_s or 0.0
        stream = self._client.chat_stream(
            request.messages,
            Sending(lambda: self.until(at_s), lambda sent_s: draft.sent(sent_s - self._start_s)),
            max_tokens=request.max_tokens,
            **self._params,
        )
        timeout_s = self._timeout_s + max(0.0, at_s - self.now_s())
        try:
            async with asyncio.timeout(timeout_s), aclosing(stream) as events:
                async for event in events:
                    draft.take(event, self._start_s)
                    if event.is_output and on_output is not None:
                        on_output(len(draft.stamps_s))
        except (TimeoutError, RequestTimeoutError):
            return replace(draft.finish(self.now_s(), Outcome.TIMEOUT), code="timeout")
        except EdgeserveError as error:
            # A connection that is refused ahead of time is a request that failed when it was due.
            await self.until(at_s)
            return _failed(draft.finish(self.now_s(), Outcome.ERROR), error)
        return draft.finish(self.now_s(), Outcome.OK if draft.stamps_s else Outcome.EMPTY)

    def _tell(self) -> None:
        self._on_change(len(self._drafts), len(self.records))


def _failed(record: Record, error: EdgeserveError) -> Record:
    status = error.status if isinstance(error, RemoteError) else None
    return replace(
        record,
        outcome=Outcome.REJECTED if status in (429, 503) else Outcome.ERROR,
        status=status,
        code=getattr(error, "code", None) or type(error).__name__,
        message=error.message,
    )


async def _drop(tasks: Sequence[asyncio.Task[Record]] | Sequence[asyncio.Task[None]]) -> None:
    left = [task for task in tasks if not task.done()]
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
