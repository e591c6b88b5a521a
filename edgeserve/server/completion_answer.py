"""The shape of a text completion's choice, whole and in pieces. Reasoning is never split off here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edgeserve.server.answer import Identity, TokenTexts
from edgeserve.server.events import Delta, Generation
from edgeserve.server.openai_answer import Choice, OpenAIAnswer
from edgeserve.server.protocol_completions import CompletionRequest
from edgeserve.server.tally import ChoiceTally


class CompletionAnswer(OpenAIAnswer):
    """`echoes` holds the text that stands before each choice's own, "" for none."""

    whole_kind = chunk_kind = "text_completion"

    def __init__(
        self,
        ask: CompletionRequest,
        generation: Generation,
        identity: Identity,
        tokens: TokenTexts,
        echoes: Sequence[str],
    ) -> None:
        super().__init__(ask, generation, identity, tokens)
        self._wants_logprobs = ask.logprobs is not None
        self._echoes = echoes
        self._offsets = [0] * generation.num_choices

    def leading_choice(self, index: int) -> Choice | None:
        echo = self._echoes[index]
        return _piece(index, echo) if echo else None

    def delta_choice(self, event: Delta) -> Choice:
        if not event.logprobs:
            return _piece(event.index, event.text)
        offset = self._offsets[event.index]
        self._offsets[event.index] += sum(map(self.tokens.num_chars, event.logprobs))
        return _piece(event.index, event.text, self.tokens.completion(event.logprobs, offset))

    def empty_choice(self, index: int, finish_reason: str | None) -> Choice:
        return _piece(index, "", finish_reason=finish_reason)

    def whole_choice(self, index: int, tally: ChoiceTally) -> Choice:
        text = self._echoes[index] + tally.joined_text
        logprobs = self.tokens.completion(tally.logprobs, 0) if self._wants_logprobs else None
        return _piece(index, text, logprobs, tally.finish_reason.value)


def _piece(
    index: int, text: str, logprobs: dict[str, Any] | None = None, finish_reason: str | None = None
) -> Choice:
    return {"text": text, "index": index, "logprobs": logprobs, "finish_reason": finish_reason}
