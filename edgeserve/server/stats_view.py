"""The engine's statistics as documents: llama-server's `/slots`, and the snapshot that `/events` streams.

Owns names and units on the wire. No text, no tokens: an observer sees counts and times only.
"""

from __future__ import annotations

import zlib
from typing import Any

from edgeserve.engine.request import EngineStats, SequenceStats, StepStats

WINDOW_S = 10.0
"""How far back rates look. An idle engine's rates are 0, not what they last were."""


def slots_document(stats: EngineStats) -> list[dict[str, Any]]:
    running = {sequence.seq_id: sequence for sequence in stats.running}
    return [_slot(index, stats.n_ctx_seq, running.get(index)) for index in range(stats.num_slots)]


def _slot(index: int, n_ctx: int, sequence: SequenceStats | None) -> dict[str, Any]:
    slot: dict[str, Any] = {
        "id": index,
        "n_ctx": n_ctx,
        "speculative": False,
        "is_processing": sequence is not None,
        "id_task": -1,
    }
    if sequence is None:
        return slot
    timings = sequence.timings
    num_left = sequence.max_tokens - timings.num_output_tokens
    return {
        **slot,
        # llama-server numbers its tasks; watchers only compare the number with the last one they saw.
        "id_task": zlib.crc32(sequence.request_id.encode()),
        "request_id": sequence.request_id,
        "state": sequence.status.value,
        "n_prompt_tokens": timings.num_prompt_tokens,
        "n_prompt_tokens_processed": timings.num_evaluated_tokens,
        "n_prompt_tokens_cache": timings.num_cached_tokens,
        "next_token": [
            {"has_next_token": num_left > 0, "n_remain": num_left, "n_decoded": timings.num_output_tokens}
        ],
    }


def snapshot_document(stats: EngineStats, after_step: int = 0) -> dict[str, Any]:
    """Everything an observer may want after a step; `steps` holds the ones later than `after_step`."""
    return {
        "step": stats.num_steps,
        "steps": [_step(step) for step in stats.recent_steps if step.step > after_step],
        "slots": {"total": stats.num_slots, "used": len(stats.running)},
        "cells": {"total": stats.n_ctx, "used": stats.num_used_cells, "cached": stats.num_cached_cells},
        "n_ctx_seq": stats.n_ctx_seq,
        "running": [_sequence(sequence) for sequence in stats.running],
        "waiting": [_sequence(sequence) for sequence in stats.waiting],
        "totals": {
            "prompt_tokens": stats.num_prompt_tokens_total,
            "cached_tokens": stats.num_cached_tokens_total,
            "output_tokens": stats.num_output_tokens_total,
            "prefill_ms": _ms(stats.prefill_s_total),
            "decode_ms": _ms(stats.decode_s_total),
            "finished": dict(stats.finished_total),
        },
    }


def _step(step: StepStats) -> dict[str, Any]:
    return {
        "step": step.step,
        "duration_ms": _ms(step.duration_s),
        "num_decode_tokens": step.num_decode_tokens,
        "num_prefill_tokens": step.num_prefill_tokens,
        "num_accepted_tokens": step.num_accepted_tokens,
    }


def _sequence(sequence: SequenceStats) -> dict[str, Any]:
    timings = sequence.timings
    return {
        "request_id": sequence.request_id,
        "slot": sequence.seq_id,
        "status": sequence.status.value,
        "waits_for": sequence.waits_for,
        "num_prompt_tokens": timings.num_prompt_tokens,
        "num_cached_tokens": timings.num_cached_tokens,
        "num_evaluated_tokens": timings.num_evaluated_tokens,
        "num_output_tokens": timings.num_output_tokens,
        "max_tokens": sequence.max_tokens,
        "front_end_ms": _ms(timings.front_end_s),
        "queue_ms": _ms(timings.queue_s),
        "restore_ms": _ms(timings.restore_s),
        "prefill_ms": _ms(timings.prefill_s),
        "decode_ms": _ms(timings.decode_s),
        "stalled_ms": _ms(timings.stalled_s),
        "ttft_ms": _ms(timings.ttft_s),
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)


def recent_rates(stats: EngineStats, now_s: float) -> dict[str, float]:
    """Prompt and output tokens a second of computing, and decodes a step, over the last `WINDOW_S`.

    A step that carries both kinds cannot be split by a clock; its tokens count towards both, over its whole
    duration, so both rates are lower bounds.
    """
    steps = [step for step in stats.recent_steps if step.start_s + step.duration_s > now_s - WINDOW_S]
    prefills = [step for step in steps if step.num_prefill_tokens]
    decodes = [step for step in steps if step.num_decode_tokens]
    num_decoded = sum(step.num_decode_tokens for step in decodes)
    num_accepted = sum(step.num_accepted_tokens for step in decodes)
    return {
        "prompt_tokens_per_s": _rate(sum(step.num_prefill_tokens for step in prefills), prefills),
        "output_tokens_per_s": _rate(num_decoded + num_accepted, decodes),
        "decodes_per_step": num_decoded / len(decodes) if decodes else 0.0,
    }


def _rate(num_tokens: int, steps: list[StepStats]) -> float:
    duration_s = sum(step.duration_s for step in steps)
    return num_tokens / duration_s if duration_s else 0.0
