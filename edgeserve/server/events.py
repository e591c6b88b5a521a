"""One generation's events, whatever protocol they are told in: progress, text, the end.

Owns merging the choices of one HTTP request into one stream, the split into reasoning and answer, and closing
every generation when the reader goes away. The answers (chat_answer.py and its siblings) turn events into
wire formats; recorder.py counts them.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from edgeserve.engine.request import FinishReason, Request, RequestOutput, RequestTimings, TokenLogprob
from edgeserve.errors import EngineError
from edgeserve.reasoning import Part, PlainSplitter, ReasoningStyle, Splitter
from edgeserve.server.http_errors import CancelledRequestError

if TYPE_CHECKING:
    from edgeserve.engine.async_engine import AsyncEngine


@dataclass(frozen=True, slots=True)
class Progress:
    """Part of the prompt has been computed; there is no token yet."""

    index: int
    timings: RequestTimings


@dataclass(frozen=True, slots=True)
class Delta:
    """New text of one choice. `num_tokens` tokens came with it: 0 when one step's text makes two deltas."""

    index: int
    text: str
    is_reasoning: bool
    timings: RequestTimings
    num_tokens: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of one choice."""

    index: int
    reason: FinishReason
    stop_string: str | None
    timings: RequestTimings
    num_reasoning_tokens: int


Event = Progress | Delta | Finish


@dataclass(frozen=True, slots=True)
class Generation:
    """What one HTTP request asks of the engine: one engine request a choice.

    `num_prompts` prompts with n choices each, in the order of the choices' indexes. `style` None leaves
    reasoning in the text.
    """

    id: str
    endpoint: str
    requests: tuple[Request, ...]
    num_prompts: int = 1
    style: ReasoningStyle | None = None
    generation_prompt: str = ""
    eog_ids: frozenset[int] = frozenset()

    def splitter(self) -> Splitter:
        return PlainSplitter() if self.style is None else self.style.splitter(self.generation_prompt)

    @property
    def num_choices(self) -> int:
        return len(self.requests)


async def run(engine: AsyncEngine, generation: Generation) -> AsyncGenerator[Event, None]:
    """Every event of every choice. Raises the engine's RequestError; closing it aborts what still runs."""
    choices = [
        _Choice(index, generation).events(engine, request)
        for index, request in enumerate(generation.requests)
    ]
    source = choices[0] if len(choices) == 1 else _merge(choices)
    async with contextlib.aclosing(source) as events:
        async for event in events:
            yield event


async def _merge(sources: Sequence[AsyncGenerator[Event, None]]) -> AsyncGenerator[Event, None]:
    """Events of all sources as they come; the first error ends the rest."""
    queue: asyncio.Queue[Event | BaseException | None] = asyncio.Queue()

    async def pump(source: AsyncGenerator[Event, None]) -> None:
        async with contextlib.aclosing(source) as events:
            try:
                async for event in events:
                    queue.put_nowait(event)
                queue.put_nowait(None)
            except Exception as error:
                queue.put_nowait(error)

    tasks = [asyncio.create_task(pump(source)) for source in sources]
    try:
        remaining = len(tasks)
        while remaining:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                remaining -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Choice:
    """One choice's outputs as events."""

    def __init__(self, index: int, generation: Generation) -> None:
        self._index = index
        self._splitter = generation.splitter()
        self._eog_ids = generation.eog_ids
        self._held_logprobs: tuple[TokenLogprob, ...] = ()
        self._held_tokens = 0
        self._num_silent = 0
        """Log-probabilities at the end of those held whose tokens brought no text yet."""
        self._num_reasoning_tokens = 0

    async def events(self, engine: AsyncEngine, request: Request) -> AsyncGenerator[Event, None]:
        outputs: AsyncIterator[RequestOutput] = engine.generate(request)
        try:
            async for output in outputs:
                if output.is_finished:
                    output = _delivered(output, request.arrival_s)
                for event in self._of_output(output):
                    yield event
        finally:
            # Without this an abandoned generation would run on until garbage collection finds it.
            if isinstance(outputs, AsyncGenerator):
                await outputs.aclose()

    def _of_output(self, output: RequestOutput) -> list[Event]:
        if output.finish_reason is FinishReason.ERROR:
            raise output.error or EngineError("The generation failed.")
        if output.finish_reason is FinishReason.CANCELLED:
            raise CancelledRequestError("This request was cancelled.")
        if not output.token_ids and not output.text and not output.is_finished:
            return [Progress(self._index, output.timings)]
        events = self._of_text(output)
        if output.is_finished:
            events += self._of_end(output)
        return events

    def _of_text(self, output: RequestOutput) -> list[Event]:
        if self._splitter.in_reasoning:
            self._num_reasoning_tokens += len(output.token_ids)
        self._held_tokens += len(output.token_ids)
        self._hold_logprobs(output)
        return self._deltas(self._splitter.feed(output.text), output)

    def _hold_logprobs(self, output: RequestOutput) -> None:
        """Until the text that they belong to is certain. Tokens of a stop string are not shown at all."""
        fresh = tuple(item for item in output.logprobs if item.token_id not in self._eog_ids)
        self._held_logprobs += fresh
        self._num_silent = 0 if output.text else self._num_silent + len(fresh)
        if output.stop_string is not None and self._num_silent:
            self._held_logprobs = self._held_logprobs[: -self._num_silent]

    def _of_end(self, output: RequestOutput) -> list[Event]:
        reason = output.finish_reason
        assert reason is not None
        events = self._deltas(self._splitter.flush(), output)
        if self._held_logprobs or self._held_tokens:
            events += self._deltas([Part("", self._splitter.in_reasoning)], output)
        end = Finish(self._index, reason, output.stop_string, output.timings, self._num_reasoning_tokens)
        return [*events, end]

    def _deltas(self, parts: list[Part], output: RequestOutput) -> list[Event]:
        events: list[Event] = []
        for part in parts:
            tokens, self._held_tokens = self._held_tokens, 0
            logprobs, self._held_logprobs = self._held_logprobs, ()
            events.append(Delta(self._index, part.text, part.is_reasoning, output.timings, tokens, logprobs))
        return events


def _delivered(output: RequestOutput, arrival_s: float) -> RequestOutput:
    """The last output with its timeline complete: this is the moment when the front end has it."""
    now_s = time.perf_counter()
    return replace(output, timings=output.timings.delivered(now_s - output.at_s, now_s - arrival_s))
