"""What OpenAI's two completion endpoints have in common on the way out.

Owns the order that strict clients rely on: what leads a choice together with its first token, an empty
piece with the finish reason, usage in a chunk of its own and only when asked for, timings in the last
chunk. The shapes of a choice are chat_answer.py's and completion_answer.py's.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any, ClassVar

from edgeserve.server.answer import Identity, TokenTexts
from edgeserve.server.events import Delta, Event, Finish, Generation, Progress
from edgeserve.server.protocol import OpenAIRequest
from edgeserve.server.tally import ChoiceTally, Tally, progress_document, timings_document

Choice = dict[str, Any]


class OpenAIAnswer(ABC):
    ends_with_done = True
    whole_kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __init__(
        self, ask: OpenAIRequest, generation: Generation, identity: Identity, tokens: TokenTexts
    ) -> None:
        self.tokens = tokens
        self._ask = ask
        self._identity = identity
        self._tally = Tally(generation.num_choices, generation.num_prompts, keeps_text=not ask.stream)
        self._num_unfinished = generation.num_choices
        self._has_begun = [False] * generation.num_choices
        self._head = identity.document(self.chunk_kind)

    @abstractmethod
    def leading_choice(self, index: int) -> Choice | None:
        """What comes before a choice's first piece, if anything."""

    @abstractmethod
    def delta_choice(self, event: Delta) -> Choice: ...

    @abstractmethod
    def empty_choice(self, index: int, finish_reason: str | None) -> Choice: ...

    @abstractmethod
    def whole_choice(self, index: int, tally: ChoiceTally) -> Choice: ...

    def chunks(self, event: Event) -> list[dict[str, Any]]:
        self._tally.add(event)
        if not self._ask.stream:
            return []
        if isinstance(event, Progress):
            return self._progress(event)
        if isinstance(event, Delta) and not event.text and not event.logprobs:
            # Tokens without a text, at the end: they are counted, but a client has nothing to do with them.
            return []
        documents = self._leading(event.index)
        documents.append(self._delta(event) if isinstance(event, Delta) else self._finish(event))
        if self._ask.timings_per_token:
            documents[-1]["timings"] = timings_document(event.timings)
        return documents

    def closing(self) -> list[dict[str, Any]]:
        if not self._ask.wants_usage:
            return []
        return [{**self._head, "choices": [], "usage": self._tally.usage(), **self._timings()}]

    def whole(self) -> dict[str, Any]:
        choices = [self.whole_choice(index, tally) for index, tally in enumerate(self._tally.choices)]
        head = self._identity.document(self.whole_kind)
        return {**head, "choices": choices, "usage": self._tally.usage(), **self._timings()}

    def _progress(self, event: Progress) -> list[dict[str, Any]]:
        if not self._ask.return_progress:
            return []
        progress = progress_document(event.timings, time.perf_counter() - self._identity.arrival_s)
        return [{**self._chunk(self.empty_choice(event.index, None)), "prompt_progress": progress}]

    def _leading(self, index: int) -> list[dict[str, Any]]:
        if self._has_begun[index]:
            return []
        self._has_begun[index] = True
        choice = self.leading_choice(index)
        return [] if choice is None else [self._chunk(choice)]

    def _delta(self, event: Delta) -> dict[str, Any]:
        return self._chunk(self.delta_choice(event))

    def _finish(self, event: Finish) -> dict[str, Any]:
        self._num_unfinished -= 1
        chunk = self._chunk(self.empty_choice(event.index, event.reason.value))
        if self._num_unfinished == 0 and not self._ask.wants_usage:
            chunk.update(self._timings())
        return chunk

    def _chunk(self, choice: Choice) -> dict[str, Any]:
        return {**self._head, "choices": [choice]}

    def _timings(self) -> dict[str, Any]:
        timings = self._tally.timings()
        return {} if timings is None else {"timings": timings}
