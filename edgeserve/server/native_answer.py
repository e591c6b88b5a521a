"""llama.cpp's native `/completion`: flat objects, `content` and `stop`, no [DONE]."""

from __future__ import annotations

import time
from typing import Any

from edgeserve.engine.request import FinishReason, RequestTimings
from edgeserve.server.answer import Identity, TokenTexts
from edgeserve.server.events import Event, Finish, Progress
from edgeserve.server.protocol_completions import NativeCompletionRequest
from edgeserve.server.tally import Tally, progress_document, timings_document


class NativeAnswer:
    ends_with_done = False

    def __init__(self, ask: NativeCompletionRequest, identity: Identity, tokens: TokenTexts) -> None:
        self._ask = ask
        self._identity = identity
        self._tokens = tokens
        self._tally = Tally(1, 1, keeps_text=not ask.stream)

    def chunks(self, event: Event) -> list[dict[str, Any]]:
        self._tally.add(event)
        if not self._ask.stream:
            return []
        if isinstance(event, Progress):
            return self._progress(event)
        if isinstance(event, Finish):
            return [self._end(event, "")]
        if not event.text and not event.logprobs:
            return []
        chunk = {"index": 0, "content": event.text, "stop": False, **self._counts(event.timings)}
        if event.logprobs:
            chunk["completion_probabilities"] = self._tokens.chat(event.logprobs)
        if self._ask.timings_per_token:
            chunk["timings"] = timings_document(event.timings)
        return [chunk]

    def closing(self) -> list[dict[str, Any]]:
        return []

    def whole(self) -> dict[str, Any]:
        choice = self._tally.choices[0]
        assert choice.finish is not None, "asked before the end"
        document = self._end(choice.finish, choice.joined_text)
        if choice.logprobs:
            document["completion_probabilities"] = self._tokens.chat(choice.logprobs)
        return document

    def _progress(self, event: Progress) -> list[dict[str, Any]]:
        if not self._ask.return_progress:
            return []
        progress = progress_document(event.timings, time.perf_counter() - self._identity.arrival_s)
        counts = self._counts(event.timings)
        return [{"index": 0, "content": "", "stop": False, **counts, "prompt_progress": progress}]

    def _end(self, event: Finish, content: str) -> dict[str, Any]:
        return {
            "index": 0,
            "content": content,
            "stop": True,
            "id": self._identity.id,
            "model": self._identity.model,
            **self._counts(event.timings),
            "truncated": False,
            "stop_type": _stop_type(event),
            "stopping_word": event.stop_string or "",
            "timings": timings_document(event.timings),
        }

    def _counts(self, timings: RequestTimings) -> dict[str, int]:
        return {
            "tokens_predicted": timings.num_output_tokens,
            "tokens_evaluated": timings.num_prompt_tokens,
            "tokens_cached": timings.num_cached_tokens,
        }


def _stop_type(event: Finish) -> str:
    if event.reason is FinishReason.LENGTH:
        return "limit"
    return "word" if event.stop_string else "eos"
