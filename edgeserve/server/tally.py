"""What a generation's events add up to: each choice's text and end, and the counts and times of the whole.

Owns the meaning of `usage` and `timings` on the wire. Does not know in which shape a protocol tells them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from edgeserve.engine.request import FinishReason, RequestTimings, TokenLogprob
from edgeserve.server.events import Delta, Event, Finish


@dataclass(slots=True)
class ChoiceTally:
    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: Finish | None = None

    @property
    def finish_reason(self) -> FinishReason:
        assert self.finish is not None, "asked before the end"
        return self.finish.reason

    @property
    def joined_text(self) -> str:
        return "".join(self.text)

    @property
    def joined_reasoning(self) -> str:
        return "".join(self.reasoning)


class Tally:
    """Events of one generation, added up. `num_prompts` prompts share the choices evenly, in order."""

    def __init__(self, num_choices: int, num_prompts: int, *, keeps_text: bool) -> None:
        self.choices = [ChoiceTally() for _ in range(num_choices)]
        self._num_prompts = num_prompts
        self._keeps_text = keeps_text

    def add(self, event: Event) -> None:
        choice = self.choices[event.index]
        if isinstance(event, Finish):
            choice.finish = event
        elif isinstance(event, Delta) and self._keeps_text:
            (choice.reasoning if event.is_reasoning else choice.text).append(event.text)
            choice.logprobs += event.logprobs

    def usage(self) -> dict[str, Any]:
        """Cached tokens are a part of the prompt's. A prompt counts once, however many choices it has."""
        ends = [choice.finish for choice in self.choices if choice.finish is not None]
        per_prompt = max(1, len(self.choices) // self._num_prompts)
        prompts = [end.timings for end in ends if end.index % per_prompt == 0]
        num_prompt = sum(timings.num_prompt_tokens for timings in prompts)
        num_output = sum(end.timings.num_output_tokens for end in ends)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": sum(timings.num_cached_tokens for timings in prompts)},
            "completion_tokens_details": {"reasoning_tokens": sum(end.num_reasoning_tokens for end in ends)},
        }

    def timings(self) -> dict[str, Any] | None:
        """Of a single choice; several at once have no one timeline."""
        only = self.choices[0].finish if len(self.choices) == 1 else None
        return None if only is None else timings_document(only.timings)


def timings_document(timings: RequestTimings) -> dict[str, Any]:
    """llama-server's `timings`, and where a request's whole time went.

    `prompt_n` are the tokens really computed: cached ones stand apart in `cache_n`. `predicted_ms` runs
    from the first token to the last, so the rates count the gaps between tokens (predicted_n - 1) and are
    null when there is none. What has not happened yet is 0.
    """
    num_gaps = timings.num_output_tokens - 1
    return {
        "cache_n": timings.num_cached_tokens,
        "prompt_n": timings.num_evaluated_tokens,
        "prompt_per_token_ms": _per_token_ms(timings.prefill_s, timings.num_evaluated_tokens),
        "prompt_per_second": _per_second(timings.prefill_s, timings.num_evaluated_tokens),
        "predicted_n": timings.num_output_tokens,
        "predicted_ms": _ms(timings.decode_s),
        "predicted_per_token_ms": _per_token_ms(timings.decode_s, num_gaps),
        "predicted_per_second": _per_second(timings.decode_s, num_gaps),
        "ttft_ms": _ms(timings.ttft_s),
        **parts_document(timings),
        **_draft_document(timings),
    }


def _draft_document(timings: RequestTimings) -> dict[str, int]:
    """As llama-server does: only where something was drafted."""
    if not timings.num_draft_tokens:
        return {}
    return {"draft_n": timings.num_draft_tokens, "draft_n_accepted": timings.num_accepted_tokens}


def parts_document(timings: RequestTimings) -> dict[str, float]:
    """Where a request's time went, in the order in which it did: the parts add up to `e2e_ms`, the last."""
    return {
        "front_end_ms": _ms(timings.front_end_s),
        "queue_ms": _ms(timings.queue_s),
        "restore_ms": _ms(timings.restore_s),
        "prompt_ms": _ms(timings.prefill_s),
        "decode_ms": _ms(timings.own_decode_s),
        "stalled_ms": _ms(timings.stalled_s),
        "delivery_ms": _ms(timings.delivery_s),
        "e2e_ms": _ms(timings.e2e_s),
    }


def progress_document(timings: RequestTimings, elapsed_s: float) -> dict[str, Any]:
    """llama-server's `prompt_progress`; `processed` includes what was found in the cache."""
    return {
        "total": timings.num_prompt_tokens,
        "cache": timings.num_cached_tokens,
        "processed": timings.num_cached_tokens + timings.num_evaluated_tokens,
        "time_ms": _ms(elapsed_s),
    }


def _ms(seconds: float | None) -> float:
    return round((seconds or 0.0) * 1e3, 3)


def _per_token_ms(seconds: float | None, count: int) -> float | None:
    return round(seconds * 1e3 / count, 3) if seconds and count > 0 else None


def _per_second(seconds: float | None, count: int) -> float | None:
    return round(count / seconds, 3) if seconds and count > 0 else None
