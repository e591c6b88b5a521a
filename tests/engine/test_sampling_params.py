"""Ranges: what is out of them is refused by name, with the range."""

from __future__ import annotations

import math

import pytest

from edgeserve.engine.sampling_params import SamplingParams
from edgeserve.errors import InvalidRequestError


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1), ("temperature", 1e6), ("temperature", math.nan), ("temperature", math.inf),
        ("top_p", -1), ("top_p", 1.1), ("min_p", 2), ("top_k", -3), ("repeat_penalty", 0),
        ("max_tokens", 0), ("max_tokens", -1), ("min_tokens", -1), ("seed", -5), ("seed", 2**32),
        ("logprobs", 21), ("presence_penalty", math.nan), ("frequency_penalty", 1e9), ("repeat_last_n", -2),
    ],
)  # fmt: skip
def test_out_of_range_is_refused_with_the_field(name: str, value: float) -> None:
    with pytest.raises(InvalidRequestError, match=f"{name} must be between") as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert caught.value.status == 400


@pytest.mark.parametrize("stop", [("",), tuple("x" * 33), ("y" * 513,)])
def test_bad_stops(stop: tuple[str, ...]) -> None:
    with pytest.raises(InvalidRequestError):
        SamplingParams(stop=stop)


def test_logit_bias_limits() -> None:
    with pytest.raises(InvalidRequestError):
        SamplingParams(logit_bias=tuple((token, 1.0) for token in range(1025)))
    with pytest.raises(InvalidRequestError):
        SamplingParams(logit_bias=((1, math.nan),))
    SamplingParams(logit_bias=((1, -math.inf),))


def test_greedy_and_penalties() -> None:
    assert SamplingParams(temperature=0).is_greedy
    assert SamplingParams(top_k=1).is_greedy
    assert not SamplingParams().is_greedy
    assert not SamplingParams().has_penalties
    assert SamplingParams(repeat_penalty=1.1).has_penalties
    assert not SamplingParams(repeat_penalty=1.1, repeat_last_n=0).has_penalties
