"""From what is seen to why, in one sentence and with a remedy; each backed by the figures it rests on.

Owns the rules and their thresholds. Pure: reads a history, changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from tui import words
from tui.history import History, Ttft
from tui.snapshot import SequenceView, ServerFacts, Snapshot, Status

_MIN_STEPS = 8
_CLEARLY = 1.5
_MIN_REQUESTS = 3
_CELLS_FULL = 0.9
_MIN_COLD_TOKENS = 100


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence on what is so, one on what to do, and the figures behind them by name."""

    text: str
    remedy: str
    evidence: tuple[tuple[str, str], ...]
    is_problem: bool = True


def findings(facts: ServerFacts | None, history: History, at_s: float) -> list[Finding]:
    """What stands out at this moment, the most pressing first."""
    snapshot = history.latest
    if snapshot is None or facts is None:
        return []
    found = [
        *_waiting(snapshot),
        *_stalls(facts, history, snapshot, at_s),
        *_queue_before_first_token(history, at_s),
        *_full_cells(snapshot),
        *_cold_prompts(history, at_s),
    ]
    return sorted(found, key=lambda finding: not finding.is_problem)


def _waiting(snapshot: Snapshot) -> Iterator[Finding]:
    if not snapshot.num_waiting:
        return
    if not snapshot.waiting:
        yield Finding(
            f"{words.plural(snapshot.num_waiting, 'request')} wait in the server's queue.",
            "More slots (-np) serve more at once, each a little slower.",
            (("waiting", words.count(snapshot.num_waiting)), ("slots", words.count(snapshot.num_slots))),
        )
        return
    first = snapshot.waiting[0]
    others = f", and {snapshot.num_waiting - 1:,} behind it" if snapshot.num_waiting > 1 else ""
    yield Finding(
        f"{words.short_id(first.request_id)} waits for {first.waits_for or 'its turn'}{others}.",
        "A larger -c, or a smaller max_tokens in the requests, lets it in sooner."
        if "cells" in first.waits_for
        else "More sequences (-np) serve more at once, each a little slower.",
        (
            ("waiting", words.count(snapshot.num_waiting)),
            (
                "its prompt",
                f"{words.count(first.num_prompt)} tokens, at most {words.count(first.max_tokens)} out",
            ),
            ("running", f"{len(snapshot.running)} of {snapshot.num_slots} sequences"),
            *_cell_evidence(snapshot),
        ),
    )


def _stalls(facts: ServerFacts, history: History, snapshot: Snapshot, at_s: float) -> Iterator[Finding]:
    """Steps that carried others' prompt tokens took clearly longer than those that did not."""
    steps = list(history.gap_steps(at_s))
    pure = [step.duration_s for step in steps if not step.num_prefill]
    mixed = [step.duration_s for step in steps if step.num_prefill]
    if len(pure) < _MIN_STEPS or len(mixed) < _MIN_STEPS or median(mixed) < _CLEARLY * median(pure):
        return
    target_ms = snapshot.itl_target_ms or facts.itl_target_ms
    is_kept = bool(target_ms) and max(mixed) * 1e3 <= (target_ms or 0.0)
    whose = _names([view for view in snapshot.running if view.status is Status.PREFILL])
    longest, alone = words.duration(max(mixed)), words.duration(median(pure))
    text = f"Decode gaps come from {whose}: up to {longest} while a prompt is read, {alone} without."
    remedy = (
        f"That keeps the target of {words.duration((target_ms or 0.0) / 1e3)}."
        if is_kept
        else "A lower --itl-target-ms makes the gaps shorter and the prompt's own wait longer."
    )
    yield Finding(
        text,
        remedy,
        (
            (
                "steps with a prompt",
                f"{len(mixed):,}, median {words.duration(median(mixed))}, longest {longest}",
            ),
            ("steps without", f"{len(pure):,}, median {alone}"),
            ("target", _target_text(target_ms)),
            ("window", "the last minute"),
        ),
        is_problem=not is_kept,
    )


def _names(views: list[SequenceView]) -> str:
    if not views:
        return "other requests' prompts"
    return " and ".join(f"{words.short_id(view.request_id)}'s prefill" for view in views[:2])


def _target_text(target_ms: float | None) -> str:
    if target_ms is None:
        return "not told by this server"
    return words.duration(target_ms / 1e3) if target_ms else "automatic (--itl-target-ms sets it)"


def _queue_before_first_token(history: History, at_s: float) -> Iterator[Finding]:
    recent = history.last_ttfts(at_s)
    queued = [entry for entry in recent if entry.queue_s > 0.5 * entry.ttft_s and entry.queue_s > 0.2]
    if len(queued) < _MIN_REQUESTS or 2 * len(queued) < len(recent):
        return
    yield Finding(
        f"Most of the wait for a first token is queueing: {words.duration(median(e.queue_s for e in queued))}"
        " of it, by the median.",
        "More sequences if cells allow, shorter answers, or fewer requests at once.",
        (
            ("requests", f"{len(queued)} of {len(recent)} spent more than half of their TTFT waiting"),
            ("median TTFT", words.duration(median(entry.ttft_s for entry in queued))),
            ("window", "the last minute"),
        ),
    )


def _full_cells(snapshot: Snapshot) -> Iterator[Finding]:
    cells = snapshot.cells
    if cells is None or cells.used - (cells.cached or 0) < _CELLS_FULL * cells.total:
        return
    yield Finding(
        "Nearly all KV cells are held by running requests.",
        "A larger -c, a quantized cache (-ctk q8_0 -ctv q8_0), or a smaller max_tokens.",
        _cell_evidence(snapshot),
    )


def _cell_evidence(snapshot: Snapshot) -> tuple[tuple[str, str], ...]:
    cells = snapshot.cells
    if cells is None:
        return ()
    text = f"{cells.used:,} of {cells.total:,} used, {words.count(cells.cached)} of them reusable"
    return (("KV cells", text),)


def _cold_prompts(history: History, at_s: float) -> Iterator[Finding]:
    """Several long prompts, and none began like an earlier one."""
    recent: list[Ttft] = [e for e in history.last_ttfts(at_s) if e.num_prompt >= _MIN_COLD_TOKENS]
    if len(recent) < _MIN_REQUESTS or any(entry.num_cached for entry in recent):
        return
    num_tokens = sum(entry.num_prompt for entry in recent)
    yield Finding(
        f"None of the last {len(recent)} prompts began like an earlier one: {num_tokens:,} tokens, all new.",
        "Put what stays the same first (system prompt, examples), what changes last.",
        (
            (
                "prompts",
                f"{len(recent)} of {_MIN_COLD_TOKENS} tokens or more, {num_tokens:,} tokens together",
            ),
            ("cached", "0 tokens"),
            ("median TTFT", words.duration(median(entry.ttft_s for entry in recent))),
            ("window", "the last minute"),
        ),
        is_problem=False,
    )
