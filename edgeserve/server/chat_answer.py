"""The shape of a chat choice, whole and in pieces: one role, then reasoning, then content."""

from __future__ import annotations

from typing import Any

from edgeserve.server.answer import Identity, TokenTexts
from edgeserve.server.events import Delta, Generation
from edgeserve.server.openai_answer import Choice, OpenAIAnswer
from edgeserve.server.protocol_chat import ChatRequest
from edgeserve.server.tally import ChoiceTally


class ChatAnswer(OpenAIAnswer):
    whole_kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(
        self, ask: ChatRequest, generation: Generation, identity: Identity, tokens: TokenTexts
    ) -> None:
        super().__init__(ask, generation, identity, tokens)
        self._wants_logprobs = ask.logprobs

    def leading_choice(self, index: int) -> Choice:
        return _piece(index, {"role": "assistant", "content": ""})

    def delta_choice(self, event: Delta) -> Choice:
        name = "reasoning_content" if event.is_reasoning else "content"
        logprobs = {"content": self.tokens.chat(event.logprobs)} if event.logprobs else None
        return _piece(event.index, {name: event.text}, logprobs)

    def empty_choice(self, index: int, finish_reason: str | None) -> Choice:
        return _piece(index, {}, finish_reason=finish_reason)

    def whole_choice(self, index: int, tally: ChoiceTally) -> Choice:
        message: dict[str, Any] = {"role": "assistant", "content": tally.joined_text}
        if reasoning := tally.joined_reasoning:
            message["reasoning_content"] = reasoning
        return {
            "index": index,
            "message": message,
            "logprobs": {"content": self.tokens.chat(tally.logprobs)} if self._wants_logprobs else None,
            "finish_reason": tally.finish_reason.value,
        }


def _piece(
    index: int,
    delta: dict[str, str],
    logprobs: dict[str, Any] | None = None,
    finish_reason: str | None = None,
) -> Choice:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
