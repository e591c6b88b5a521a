"""Requests of /v1/completions and of llama.cpp's native /completion, and of the text tools beside them.

Owns the request side only; prompts stay as the client wrote them (text or token ids) until prompt.py.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AliasChoices, BeforeValidator, Field

from edgeserve.errors import InvalidRequestError
from edgeserve.server.limits import Limits
from edgeserve.server.protocol import GenerationRequest, Int, OpenAIRequest, Wire, unsupported

RawPrompt = str | tuple[int, ...]


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _prompts(value: object) -> tuple[RawPrompt, ...]:
    """A string, a list of strings, token ids, or a list of lists of token ids; always a tuple of prompts."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not value:
        raise ValueError("must be a string, a list of strings, token ids, or a list of lists of token ids")
    if _is_ids(value):
        return (tuple(value),)
    return tuple(_one_prompt(item) for item in value)


def _one_prompt(item: object) -> RawPrompt:
    if isinstance(item, str):
        return item
    if isinstance(item, list) and _is_ids(item):
        return tuple(item)
    raise ValueError("must hold strings or lists of token ids")


Prompts = Annotated[tuple[Any, ...], BeforeValidator(_prompts)]


class CompletionRequest(OpenAIRequest):
    prompt: Prompts
    logprobs: Int | None = None
    echo: bool = False
    suffix: str = ""
    best_of: Int | None = None

    def logprobs_wanted(self) -> int | None:
        return self.logprobs

    def check(self, limits: Limits) -> None:
        self.check_n(limits.max_n)
        if len(self.prompt) * self.n > limits.max_prompts:
            raise InvalidRequestError(
                f"{len(self.prompt)} prompts with n = {self.n} are {len(self.prompt) * self.n} answers;"
                f" at most {limits.max_prompts} in one request.",
                param="prompt",
            )
        if self.echo and self.logprobs is not None:
            raise InvalidRequestError(
                "echo cannot be combined with logprobs: the prompt's tokens have none here.", param="logprobs"
            )
        if self.suffix:
            raise unsupported("suffix")
        if self.best_of is not None and self.best_of != self.n:
            raise unsupported("best_of")


class NativeCompletionRequest(GenerationRequest):
    """llama.cpp's own endpoint: n_predict for max_tokens, and one prompt."""

    prompt: Prompts
    n_predict: Int | None = Field(default=None, validation_alias=AliasChoices("n_predict", "max_tokens"))
    n_probs: Int | None = None

    def max_output_tokens(self) -> int | None:
        return None if self.n_predict == -1 else self.n_predict

    def logprobs_wanted(self) -> int | None:
        return self.n_probs or None

    def check(self) -> None:
        if len(self.prompt) != 1:
            raise InvalidRequestError("This endpoint takes one prompt.", param="prompt")


class TokenizeRequest(Wire):
    """llama.cpp's {content, add_special, parse_special, with_pieces}, or vLLM's {prompt, ...}."""

    content: str | None = None
    prompt: str | None = None
    add_special: bool | None = None
    add_special_tokens: bool = True
    parse_special: bool = True
    with_pieces: bool = False

    @property
    def is_vllm(self) -> bool:
        return self.content is None and self.prompt is not None

    @property
    def text(self) -> str:
        text = self.prompt if self.content is None else self.content
        if text is None:
            raise InvalidRequestError("content is missing.", param="content")
        return text

    @property
    def adds_special(self) -> bool:
        return self.add_special_tokens if self.is_vllm else bool(self.add_special)


class DetokenizeRequest(Wire):
    tokens: list[Int]
