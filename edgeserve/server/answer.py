"""What the answers of all protocols share: identity, token texts, and the contract with the transport.

Owns no protocol. openai_answer.py and native_answer.py implement `Answer`; respond.py drives it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from edgeserve.engine.request import TokenLogprob
from edgeserve.server.events import Event

# JSON has no infinity; OpenAI's clients know this number as "practically impossible".
LOGPROB_FLOOR = -9999.0


class Answer(Protocol):
    """Turns one generation's events into documents."""

    @property
    def ends_with_done(self) -> bool:
        """Whether a stream closes with [DONE]."""
        ...

    def chunks(self, event: Event) -> list[dict[str, Any]]:
        """The stream's documents for one event, in order."""
        ...

    def closing(self) -> list[dict[str, Any]]:
        """The stream's documents after the last event."""
        ...

    def whole(self) -> dict[str, Any]:
        """Everything in one document, after `chunks` has seen every event."""
        ...


@dataclass(frozen=True, slots=True)
class Identity:
    """What every document of one answer repeats."""

    id: str
    model: str
    created: int
    fingerprint: str
    arrival_s: float

    def document(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


class TokenTexts:
    """Tokens as log-probability documents show them."""

    def __init__(self, piece: Callable[[int], bytes]) -> None:
        self._piece = piece

    def chat(self, entries: tuple[TokenLogprob, ...] | list[TokenLogprob]) -> list[dict[str, Any]]:
        """OpenAI's `logprobs.content`, with the token's id as llama-server adds it."""
        return [
            {
                **self._chat_token(entry.token_id, entry.logprob),
                "top_logprobs": [self._chat_token(*pair) for pair in entry.top],
            }
            for entry in entries
        ]

    def _chat_token(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self._piece(token_id)
        return {
            "id": token_id,
            "token": raw.decode("utf-8", "replace"),
            "bytes": list(raw),
            "logprob": floored(logprob),
        }

    def completion(
        self, entries: tuple[TokenLogprob, ...] | list[TokenLogprob], offset: int
    ) -> dict[str, Any]:
        """The legacy shape: parallel lists, with each token's offset in the text."""
        tokens = [self._completion_token(entry.token_id) for entry in entries]
        offsets = []
        for entry in entries:
            offsets.append(offset)
            offset += self.num_chars(entry)
        return {
            "tokens": tokens,
            "token_logprobs": [floored(entry.logprob) for entry in entries],
            "top_logprobs": [
                {self._completion_token(token): floored(logprob) for token, logprob in entry.top}
                for entry in entries
            ],
            "text_offset": offsets,
        }

    def num_chars(self, entry: TokenLogprob) -> int:
        return len(self._piece(entry.token_id).decode("utf-8", "replace"))

    def _completion_token(self, token_id: int) -> str:
        """Half a character would be the same key for many tokens; its bytes are not."""
        raw = self._piece(token_id)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def floored(logprob: float) -> float:
    return max(logprob, LOGPROB_FLOOR)
