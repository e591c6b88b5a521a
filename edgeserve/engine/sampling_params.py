"""What the caller asked of sampling: the options of one request, validated, in the field's own names.

Owns ranges and defaults. Knows nothing of llama.cpp's sampler objects (sampler.py) or wire formats
(server/protocol.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from edgeserve.errors import InvalidRequestError

MAX_STOP_STRINGS = 32
MAX_STOP_CHARS = 512
MAX_LOGIT_BIAS = 1024
MAX_TOP_LOGPROBS = 20
MAX_SEED = 2**32 - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """One request's sampling options.

    `max_tokens` None means the server's cap; `seed` None draws a fresh one. `top_k` 0 and `top_p` 1 switch a
    filter off; `temperature` 0 is greedy. `logprobs` None gives none, 0 the chosen token's only, k the k best
    beside it. `logit_bias` holds (token id, bias) pairs; -inf forbids a token.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    special_tokens: bool = False
    """Whether control tokens (channel marks, tool marks) appear in the text. End-of-turn tokens never do."""

    def __post_init__(self) -> None:
        for name, low, high in _RANGES:
            _check_range(name, getattr(self, name), low, high)
        _check_stops(self.stop)
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequestError(
                f"logit_bias has {len(self.logit_bias)} entries; at most {MAX_LOGIT_BIAS}.",
                param="logit_bias",
            )
        for _, bias in self.logit_bias:
            if math.isnan(bias) or bias > 1e4:
                raise InvalidRequestError("A logit_bias must be a number up to 10000.", param="logit_bias")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken: temperature 0, or a single candidate."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens change the odds of later ones."""
        penalised = self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repeat_penalty != 1
        return penalised and self.repeat_last_n != 0


_RANGES: tuple[tuple[str, float, float], ...] = (
    ("max_tokens", 1, 2**31 - 1),
    ("min_tokens", 0, 2**31 - 1),
    ("temperature", 0, 100),
    ("top_k", 0, 2**31 - 1),
    ("top_p", 0, 1),
    ("min_p", 0, 1),
    ("repeat_penalty", 0.01, 100),
    ("repeat_last_n", -1, 2**20),
    ("presence_penalty", -100, 100),
    ("frequency_penalty", -100, 100),
    ("seed", 0, MAX_SEED),
    ("logprobs", 0, MAX_TOP_LOGPROBS),
)


def _check_range(name: str, value: float | None, low: float, high: float) -> None:
    if value is None:
        return
    if not math.isfinite(value) or not low <= value <= high:
        raise InvalidRequestError(f"{name} must be between {low:g} and {high:g}; got {value}.", param=name)


def _check_stops(stop: tuple[str, ...]) -> None:
    if len(stop) > MAX_STOP_STRINGS:
        raise InvalidRequestError(
            f"stop has {len(stop)} strings; at most {MAX_STOP_STRINGS} are allowed.", param="stop"
        )
    if any(not text for text in stop):
        raise InvalidRequestError("A stop string must not be empty.", param="stop")
    if any(len(text) > MAX_STOP_CHARS for text in stop):
        raise InvalidRequestError(
            f"A stop string may have at most {MAX_STOP_CHARS} characters.", param="stop"
        )
