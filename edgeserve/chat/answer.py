"""One answer as it comes in: its text, its reasoning, and the figures it leaves behind.

Owns the collecting of a stream's events, the splitting where a server leaves reasoning in its text, and which
of server and client says what: counts and model times come from the server's `timings`, else from `usage`;
TTFT is what the client saw. The two clocks are never mixed in one figure. Knows nothing of terminals.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from edgeserve.metrics import Timeline, tokens_per_s
from edgeserve.reasoning import Part, Splitter, splitter_of_any
from edgeserve.stream_events import EventKind, PromptProgress, StreamEvent, Timings, Usage


@dataclass(frozen=True, slots=True)
class TokenTime:
    """One arrival of output: its text, its tokens (several when the server held some back), its time."""

    text: str
    num_tokens: int
    time_s: float


@dataclass
class Answer:
    """Everything one stream said. `sent_s` and the stamps are on the client's clock."""

    sent_s: float
    text: str = ""
    reasoning: str = ""
    finish_reason: str = ""
    was_stopped: bool = False
    usage: Usage | None = None
    timings: Timings | None = None
    progress: PromptProgress | None = None
    progress_at_s: float = 0.0
    stamps_s: list[float] = field(default_factory=list)
    server_times: list[TokenTime] = field(default_factory=list)
    _pieces: list[tuple[float, str]] = field(default_factory=list)
    _text_since_timings: str = ""
    _splitter: Splitter = field(default_factory=splitter_of_any)

    def take(self, event: StreamEvent) -> list[Part]:
        """Note one event; what it adds to the answer."""
        if event.kind in (EventKind.TEXT, EventKind.REASONING):
            return self._take_output(event)
        if event.kind is EventKind.PROGRESS:
            self.progress, self.progress_at_s = event.progress, event.at_s
        elif event.kind is EventKind.FINISH:
            self.finish_reason = event.text
        elif event.kind is EventKind.USAGE:
            self.usage = event.usage
        elif event.kind is EventKind.TIMINGS and event.timings is not None:
            self._take_timings(event.timings)
        return []

    def finish(self) -> list[Part]:
        """The rest of the text once the stream is over, or was stopped."""
        return self._keep(self._splitter.flush())

    def _take_output(self, event: StreamEvent) -> list[Part]:
        self.stamps_s.append(event.at_s)
        self._pieces.append((event.at_s, event.text))
        self._text_since_timings += event.text
        if event.kind is EventKind.REASONING:
            return self._keep([Part(event.text, is_reasoning=True)])
        # Templates leave blank lines between the reasoning and the answer; they belong to neither. Within
        # reasoning that is still to be split off, blanks are its own.
        is_between = bool(self.reasoning) and not self.text and not self._splitter.in_reasoning
        return self._keep(self._splitter.feed(event.text.lstrip() if is_between else event.text))

    def _keep(self, parts: list[Part]) -> list[Part]:
        for part in parts:
            if part.is_reasoning:
                self.reasoning += part.text
            else:
                self.text += part.text
        return parts

    def _take_timings(self, timings: Timings) -> None:
        before = self.timings
        num_before, ms_before = (before.predicted_n, before.predicted_ms) if before else (0, 0.0)
        self.timings = timings
        if (num_tokens := timings.predicted_n - num_before) > 0:
            time_s = (timings.predicted_ms - ms_before) / 1000
            self.server_times.append(TokenTime(self._text_since_timings, num_tokens, time_s))
            self._text_since_timings = ""

    @property
    def client_times(self) -> list[TokenTime]:
        """The gaps between arrivals, the first one from the moment of sending."""
        before = self.sent_s
        times = []
        for at_s, text in self._pieces:
            times.append(TokenTime(text, 1, at_s - before))
            before = at_s
        return times


@dataclass(frozen=True, slots=True)
class Figures:
    """What one answer cost; None where a figure is unknown or undefined.

    `num_evaluated` leaves out the cached tokens. `prefill_s` and `decode_s` are the server's; `decode_s`
    spans the first to the last token, so it covers one token less than `num_output`. `queue_s` and
    `stalled_s` went to other requests, before and during the answer; edgeserve's own server tells them.
    """

    ttft_s: float | None = None
    num_prompt: int | None = None
    num_cached: int | None = None
    num_evaluated: int | None = None
    num_output: int | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    tpot_s: float | None = None
    queue_s: float = 0.0
    stalled_s: float = 0.0

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """None when too few tokens were evaluated for a rate to mean anything."""
        if self.num_evaluated is None or self.prefill_s is None:
            return None
        return tokens_per_s(self.num_evaluated, self.prefill_s)

    @property
    def decode_tokens_per_s(self) -> float | None:
        if self.num_output is None or not self.tpot_s:
            return None
        return tokens_per_s(self.num_output, self.num_output * self.tpot_s)

    @property
    def num_context(self) -> int | None:
        """Tokens that the conversation now holds."""
        if self.num_prompt is None or self.num_output is None:
            return None
        return self.num_prompt + self.num_output


def figures_of(answer: Answer) -> Figures:
    """The figures of an answer, whole or stopped."""
    ttft_s = answer.stamps_s[0] - answer.sent_s if answer.stamps_s else None
    if answer.timings is not None:
        return _figures_from_timings(answer.timings, answer, ttft_s)
    if answer.usage is not None:
        return _figures_from_usage(answer.usage, answer, ttft_s)
    progress = answer.progress
    if progress is None:
        return Figures(ttft_s=ttft_s)
    return Figures(ttft_s, progress.total, progress.cache, progress.total - progress.cache)


def _figures_from_timings(timings: Timings, answer: Answer, ttft_s: float | None) -> Figures:
    usage = answer.usage
    cached = timings.cache_n
    if cached is None and usage is not None:
        cached = usage.cached_tokens
    gaps = timings.predicted_n - 1
    decode_s = timings.predicted_ms / 1000
    return Figures(
        ttft_s=ttft_s,
        num_prompt=usage.prompt_tokens if usage is not None else timings.prompt_n + (cached or 0),
        num_cached=cached,
        num_evaluated=timings.prompt_n,
        num_output=timings.predicted_n,
        prefill_s=timings.prompt_ms / 1000,
        decode_s=decode_s,
        tpot_s=decode_s / gaps if gaps > 0 and decode_s > 0 else None,
        queue_s=timings.extra.get("queue_ms", 0.0) / 1000,
        stalled_s=timings.extra.get("stalled_ms", 0.0) / 1000,
    )


def _figures_from_usage(usage: Usage, answer: Answer, ttft_s: float | None) -> Figures:
    """Without the server's times decode is what the client saw, and prefill unknown: TTFT is more than it."""
    cached = usage.cached_tokens
    stamps = answer.stamps_s
    num_output = usage.completion_tokens
    timeline = Timeline.of_chunks(answer.sent_s, stamps, num_output) if stamps and num_output else None
    return Figures(
        ttft_s=ttft_s,
        num_prompt=usage.prompt_tokens,
        num_cached=cached,
        num_evaluated=None if cached is None else usage.prompt_tokens - cached,
        num_output=num_output,
        tpot_s=timeline.tpot_s if timeline and len(stamps) > 1 else None,
    )
