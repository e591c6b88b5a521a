"""What llama-server tells by `/slots` and `/metrics`, as the same snapshots that edgeserve streams.

Owns the reading of both, in their several versions, and the list of what they leave out. Asked again and
again: what happened between two looks is known only as sums. Knows nothing of sockets.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tui.snapshot import SequenceView, Snapshot, Status, Totals

_SAMPLE = re.compile(r"^(?P<name>[A-Za-z_:][\w:]*)(?:\{[^}]*\})?\s+(?P<value>\S+)", re.MULTILINE)

NO_STEPS = "Steps, the gaps between tokens and TTFT: only edgeserve's own server tells them."
NO_SLOTS = "Running requests: this server does not offer /slots (start it with --slots)."
NO_METRICS = "Prefill speed and queue length: this server does not offer /metrics (start it with --metrics)."
NO_CELLS = "KV cells in use by idle prefixes: llama-server does not tell them."
NO_QUEUE = "Who waits and for what: llama-server only counts its queue."


def read_metrics(text: str) -> dict[str, float]:
    """Samples without labels of a Prometheus text, by name; the `llamacpp:` prefix is left out."""
    samples: dict[str, float] = {}
    for match in _SAMPLE.finditer(text):
        try:
            samples[match["name"].removeprefix("llamacpp:")] = float(match["value"])
        except ValueError:
            continue
    return samples


def read_poll(
    slots: list[Mapping[str, Any]] | None, metrics: Mapping[str, float] | None, at_s: float
) -> Snapshot:
    """One look. `slots` or `metrics` is None when the server does not offer it."""
    deferred = metrics.get("requests_deferred") if metrics is not None else None
    busy = [slot for slot in slots or [] if slot.get("is_processing")]
    return Snapshot(
        at_s=at_s,
        running=tuple(_sequence(slot) for slot in busy),
        waiting=None,
        num_waiting=None if deferred is None else int(deferred),
        num_slots=len(slots or []),
        totals=_totals(metrics) if metrics else None,
    )


def _totals(metrics: Mapping[str, float]) -> Totals:
    """Counters that grow when a prompt is done and when an answer ends; cached tokens are counted apart."""
    cached = int(metrics.get("prompt_tokens_cached_total", 0))
    return Totals(
        prompt_tokens=int(metrics.get("prompt_tokens_total", 0)) + cached,
        cached_tokens=cached,
        output_tokens=int(metrics.get("tokens_predicted_total", 0)),
        prefill_ms=metrics.get("prompt_seconds_total", 0.0) * 1e3,
        decode_ms=metrics.get("tokens_predicted_seconds_total", 0.0) * 1e3,
    )


def _sequence(slot: Mapping[str, Any]) -> SequenceView:
    num_output, num_left = _output(slot)
    num_cached = slot.get("n_prompt_tokens_cache")
    num_evaluated = _evaluated(slot, num_cached)
    num_prompt = slot.get("n_prompt_tokens")
    if num_output and num_prompt is not None and num_evaluated is not None:
        # By now it counts the answer too.
        num_prompt = num_evaluated + (num_cached or 0)
    return SequenceView(
        request_id=str(slot.get("id_task", "")),
        status=Status.DECODE if num_output else Status.PREFILL,
        slot=int(slot.get("id", -1)),
        num_prompt=num_prompt,
        num_cached=num_cached,
        num_evaluated=num_evaluated,
        num_output=num_output,
        max_tokens=num_output + num_left if num_left > 0 else None,
    )


def _output(slot: Mapping[str, Any]) -> tuple[int, int]:
    """Tokens that are out, and those that may follow: -1 without a limit. `next_token` is an object in older
    versions and a list of one in newer ones."""
    entry = slot.get("next_token")
    entry = entry[0] if isinstance(entry, list) and entry else entry
    if not isinstance(entry, dict):
        return 0, -1
    return int(entry.get("n_decoded", 0)), int(entry.get("n_remain", -1))


def _evaluated(slot: Mapping[str, Any], num_cached: int | None) -> int | None:
    """`n_prompt_tokens_processed` counts what was computed; prompts read from the cache are not in it."""
    processed = slot.get("n_prompt_tokens_processed")
    if processed is None:
        return None
    total = slot.get("n_prompt_tokens")
    return min(int(processed), int(total) - (num_cached or 0)) if total else int(processed)
