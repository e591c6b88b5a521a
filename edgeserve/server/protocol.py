"""The fields that every generating endpoint shares, and how they become SamplingParams.

Owns: null as absent, unknown fields ignored, numbers strict but kind to 5.0 where 5 is meant, and refusing
what this server cannot do rather than ignoring it. Ranges are checked once, by SamplingParams.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from edgeserve.engine.request import Priority, Urgency
from edgeserve.engine.sampling_params import MAX_LOGIT_BIAS, MAX_STOP_STRINGS, SamplingParams
from edgeserve.errors import InvalidRequestError, UsageError

MAX_WAIT_MS = 86_400_000
"""A day: the longest wait or deadline that a request may name."""


def _integral(value: object) -> object:
    """5.0 and 1e9 are whole numbers to many JSON writers."""
    if isinstance(value, float) and math.isfinite(value) and value.is_integer():
        return int(value)
    return value


def _stops(value: object) -> object:
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError("must be a string or a list of strings")
    if len(value) > MAX_STOP_STRINGS:
        raise ValueError(f"has {len(value)} strings; at most {MAX_STOP_STRINGS} are allowed")
    return tuple(value)


def _logit_bias(value: object) -> object:
    """OpenAI's {"token id": bias} or llama.cpp's [[token id, bias or false], ...]."""
    if isinstance(value, dict):
        pairs = list(value.items())
    elif isinstance(value, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        pairs = [tuple(pair) for pair in value]
    else:
        raise ValueError("must map token ids to numbers")
    if len(pairs) > MAX_LOGIT_BIAS:
        raise ValueError(f"has {len(pairs)} entries; at most {MAX_LOGIT_BIAS} are allowed")
    return tuple((_bias_token(token), _bias(bias)) for token, bias in pairs)


def _bias_token(token: object) -> int:
    if isinstance(token, str) and token.isascii() and token.isdigit() and len(token) < 10:
        return int(token)
    if isinstance(token, int) and not isinstance(token, bool):
        return token
    raise ValueError(f"keys must be token ids; {str(token)[:40]!r} is not")


def _bias(bias: object) -> float:
    if bias is False:
        return -math.inf
    if isinstance(bias, int | float) and not isinstance(bias, bool):
        return float(bias)
    raise ValueError("values must be numbers")


Int = Annotated[int, BeforeValidator(_integral)]
Stops = Annotated[tuple[str, ...], BeforeValidator(_stops)]
LogitBias = Annotated[tuple[tuple[int, float], ...], BeforeValidator(_logit_bias)]


class Wire(BaseModel):
    """Base of what arrives: a null is an absent field, and fields nobody knows are left alone."""

    model_config = ConfigDict(
        extra="ignore", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=()
    )

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        if isinstance(data, Mapping):
            return {name: value for name, value in data.items() if value is not None}
        return data


class StreamOptions(Wire):
    include_usage: bool = False


class GenerationRequest(Wire, ABC):
    """What chat, completions and the native endpoint have in common."""

    model: str = ""
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    seed: Int | None = None
    stop: Stops | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repeat_penalty: float | None = None
    repetition_penalty: float | None = None
    repeat_last_n: Int | None = None
    logit_bias: LogitBias | None = None
    ignore_eos: bool | None = None
    min_tokens: Int | None = None
    cache_prompt: bool = True
    timings_per_token: bool = False
    return_progress: bool = False
    priority: str = Priority.INTERACTIVE.value
    max_queue_ms: float | None = None
    deadline_ms: float | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None

    @property
    def wants_usage(self) -> bool:
        return False

    @abstractmethod
    def max_output_tokens(self) -> int | None: ...

    @abstractmethod
    def logprobs_wanted(self) -> int | None: ...

    def sampling(self, defaults: Mapping[str, Any], *, special_tokens: bool = False) -> SamplingParams:
        """Raises InvalidRequestError naming the field and its range."""
        self._refuse_unsupported()
        given: dict[str, Any] = {
            "max_tokens": self.max_output_tokens(),
            "temperature": self.temperature,
            "top_p": self.top_p,
            # -1 switches the filter off in vLLM's dialect, 0 in llama.cpp's.
            "top_k": 0 if self.top_k == -1 else self.top_k,
            "min_p": self.min_p,
            "seed": self.seed,
            "stop": self.stop,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repeat_penalty": _first(self.repeat_penalty, self.repetition_penalty),
            "repeat_last_n": self.repeat_last_n,
            "logit_bias": self.logit_bias,
            "ignore_eos": self.ignore_eos,
            "min_tokens": self.min_tokens,
            "logprobs": self.logprobs_wanted(),
            "special_tokens": special_tokens or None,
        }
        options = dict(defaults)
        options |= {name: value for name, value in given.items() if value is not None}
        if options.get("seed") == -1:
            del options["seed"]
        return SamplingParams(**options)

    def urgency(self) -> Urgency:
        """Raises InvalidRequestError naming the field and its range."""
        known = [priority.value for priority in Priority]
        if self.priority not in known:
            raise InvalidRequestError(f"priority must be one of {', '.join(known)}.", param="priority")
        return Urgency(
            Priority(self.priority),
            max_queue_s=_seconds("max_queue_ms", self.max_queue_ms),
            deadline_s=_seconds("deadline_ms", self.deadline_ms),
        )

    def _refuse_unsupported(self) -> None:
        for name in ("grammar", "json_schema"):
            if getattr(self, name):
                raise unsupported(name)


class OpenAIRequest(GenerationRequest):
    """What OpenAI's two generating endpoints share beyond that."""

    stream_options: StreamOptions = Field(default_factory=StreamOptions)
    max_tokens: Int | None = None
    n: Int = 1
    response_format: dict[str, Any] | None = None

    @property
    def wants_usage(self) -> bool:
        return self.stream_options.include_usage

    def max_output_tokens(self) -> int | None:
        return self.max_tokens

    def check_n(self, most: int) -> None:
        if not 1 <= self.n <= most:
            raise InvalidRequestError(f"n must be between 1 and {most}; got {self.n}.", param="n")

    def _refuse_unsupported(self) -> None:
        super()._refuse_unsupported()
        if self.response_format and self.response_format.get("type") != "text":
            raise unsupported("response_format")


def _seconds(name: str, value_ms: float | None) -> float | None:
    if value_ms is None:
        return None
    if not 0 <= value_ms <= MAX_WAIT_MS:
        raise InvalidRequestError(
            f"{name} must be between 0 and {MAX_WAIT_MS}; got {value_ms:g}.", param=name
        )
    return value_ms / 1e3


def _first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)


def unsupported(name: str) -> InvalidRequestError:
    """An option whose silent loss would change the answer's meaning."""
    return InvalidRequestError(
        f"This server does not support {name}.", "Leave it out.", param=name, code="unsupported_parameter"
    )


def check_token_ids(token_ids: tuple[int, ...] | list[int], n_vocab: int, param: str) -> None:
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < n_vocab:
        raise InvalidRequestError(
            f"{param} holds a token id outside this model's vocabulary (0 to {n_vocab - 1}).", param=param
        )


def check_defaults(defaults: Mapping[str, Any]) -> None:
    """A server's own sampling defaults. Raises UsageError at start, not at the first request."""
    try:
        SamplingParams(**defaults)
    except TypeError:
        raise UsageError(f"Unknown sampling defaults among {', '.join(defaults)}.") from None
    except InvalidRequestError as error:
        raise UsageError(f"A sampling default is out of range: {error}") from None
