"""A mock server with a prefix cache of words, and records made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mock_openai as mock
from mock_openai import Script, Step

from edgeserve.bench.options import BenchOptions, Scenario
from edgeserve.bench.runner import Outcome, Record
from edgeserve.bench.workload import Lengths
from edgeserve.stream_events import Usage


def words_of(body: dict[str, Any]) -> list[str]:
    return " ".join(message["content"] for message in body["messages"]).split()


def caching_script(ttft_s: float = 0.0, gap_s: float = 0.0, overhead: int = 5) -> Script:
    """Counts a token a word plus a template of `overhead` tokens, and reports as cached what an earlier
    prompt began with."""
    seen: list[list[str]] = []

    def script(body: dict[str, Any]) -> Sequence[Step]:
        words = words_of(body)
        cached = max((common(words, other) for other in seen), default=-overhead)
        seen.append(words)
        return mock.answer(
            int(body["max_tokens"]),
            ttft_s=ttft_s,
            gap_s=gap_s,
            prompt_tokens=len(words) + overhead,
            cached_tokens=cached + overhead,
        )

    return script


def common(one: list[str], other: list[str]) -> int:
    length = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        length += 1
    return length


def record(
    index: int = 0,
    *,
    sent_s: float = 0.0,
    stamps_s: Sequence[float] = (),
    scheduled_s: float | None = None,
    outcome: Outcome = Outcome.OK,
    prompt_tokens: int = 100,
    cached_tokens: int | None = 0,
    completion_tokens: int | None = None,
    label: str = "",
    end_s: float | None = None,
) -> Record:
    last_s = stamps_s[-1] if stamps_s else sent_s
    is_answered = outcome is Outcome.OK
    usage = Usage(prompt_tokens, completion_tokens or len(stamps_s), cached_tokens) if is_answered else None
    return Record(
        index=index,
        label=label,
        max_tokens=len(stamps_s),
        num_planned_prompt_tokens=prompt_tokens,
        scheduled_s=scheduled_s,
        sent_s=sent_s,
        end_s=last_s if end_s is None else end_s,
        outcome=outcome,
        stamps_s=tuple(stamps_s),
        finish_reason="length" if is_answered else None,
        usage=usage,
    )


def options(url: str, scenario: Scenario, **more: Any) -> BenchOptions:
    """Short and without pauses; lengths small enough for a mock."""
    quick: dict[str, Any] = {
        "prompt": Lengths.parse("24"),
        "output": Lengths.parse("4"),
        "repeats": 1,
        "pause_s": 0.0,
        "timeout_s": 20.0,
    }
    return BenchOptions(url, scenario, **(quick | more))
