"""What the monitor has seen, as the figures that diagnosis rests on; the rules are doctor's.

    findings(facts, history, now_s)     # what `edgeserve doctor --url` would say of the last minute

Owns which of a history's figures is which of diagnosis's. Pure: reads a history, changes nothing. A figure
that a stream of snapshots does not hold stays None.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from edgeserve.doctor.diagnosis import Diagnosis, diagnose
from edgeserve.doctor.observed import Observed, Queue
from tui import words
from tui.history import History, Moment, Ttft
from tui.snapshot import Cells, ServerFacts, Snapshot, Status


def findings(facts: ServerFacts | None, history: History, at_s: float) -> list[Diagnosis]:
    """What stands out of the last minute, problems first."""
    if facts is None or history.latest is None:
        return []
    return sorted(diagnose(observe(facts, history, at_s)), key=lambda found: found.level != "problem")


def observe(facts: ServerFacts, history: History, at_s: float) -> Observed:
    """The last minute, or what has been seen so far."""
    snapshot, ends = history.latest, history.last_minute(at_s)
    assert snapshot is not None, "nothing has been seen yet"
    target_ms = snapshot.itl_target_ms or facts.itl_target_ms
    known = {
        **_first_tokens(history.last_ttfts(at_s)),
        **_gaps(history, at_s),
        **(_between(*ends) if ends else {}),
        **_cells(snapshot.cells),
    }
    return Observed(
        **known,
        queue=_queue(snapshot, history, at_s),
        prefilling=tuple(
            words.short_id(view.request_id) for view in snapshot.running if view.status is Status.PREFILL
        ),
        num_slots=snapshot.num_slots or None,
        itl_target_s=target_ms / 1e3 if target_ms else None,
        settings=facts.engine,
    )


def _queue(snapshot: Snapshot, history: History, at_s: float) -> Queue | None:
    if not snapshot.num_waiting:
        return None
    if not snapshot.waiting:
        return Queue(snapshot.num_waiting)
    first = snapshot.waiting[0]
    return Queue(
        snapshot.num_waiting,
        words.short_id(first.request_id),
        first.waits_for,
        history.waited_s(first, at_s),
        first.num_prompt,
        first.max_tokens,
    )


def _first_tokens(recent: Sequence[Ttft]) -> dict[str, Any]:
    misses = [entry for entry in recent if entry.cache_state == "miss"]
    hits = [entry for entry in recent if entry.cache_state == "hit"]
    ttft_s, queue_s = _mean(e.ttft_s for e in recent), _mean(e.queue_s for e in recent)
    return {
        "num_requests": len(recent),
        "ttft_s": ttft_s,
        "queue_s": queue_s,
        "queue_share": queue_s / ttft_s if ttft_s and queue_s is not None else None,
        "ttft_miss_s": _mean(e.ttft_s for e in misses),
        "num_misses": len(misses),
        "ttft_hit_s": _mean(e.ttft_s for e in hits),
        "num_hits": len(hits),
        "hit_prompt_tokens": _mean(e.num_prompt for e in hits),
        "hit_cached_tokens": _mean(e.num_cached for e in hits),
        "mean_prompt_tokens": _mean(e.num_prompt for e in recent),
    }


def _gaps(history: History, at_s: float) -> dict[str, Any]:
    gaps = history.gaps(at_s)
    decodes = _mean(step.num_decode for step in history.gap_steps(at_s))
    return {
        "num_gaps": gaps.n,
        "gap_p50_s": gaps.p50,
        "gap_p99_s": gaps.p99,
        "gap_mean_s": gaps.mean,
        "decodes_per_step": decodes,
    }


def _between(first: Moment, last: Moment) -> dict[str, Any]:
    """What sums say of the time between two moments."""
    window_s = last.at_s - first.at_s
    decode_s = last.decode_s - first.decode_s
    known: dict[str, Any] = {
        "window_s": window_s,
        "num_waiting_first": first.num_waiting,
        "num_waiting_last": last.num_waiting,
        "num_running": float(len(first.running & last.running)),
        "busy_share": _busy_share(first, last),
        "stalled_share": (last.stalled_s - first.stalled_s) / decode_s if decode_s else None,
    }
    if first.totals is None or last.totals is None:
        return known
    prefill_s = (last.totals.prefill_ms - first.totals.prefill_ms) / 1e3
    evaluated = last.totals.evaluated_tokens - first.totals.evaluated_tokens
    rejected = last.totals.finished.get("rejected", 0) - first.totals.finished.get("rejected", 0)
    return known | {
        "num_rejected": rejected if last.totals.finished else None,
        "prefill_tok_s": evaluated / prefill_s if prefill_s > 0 and evaluated > 0 else None,
        "output_tok_s": (last.totals.output_tokens - first.totals.output_tokens) / window_s,
    }


def _busy_share(first: Moment, last: Moment) -> float | None:
    if first.step_s is None or last.step_s is None:
        return None
    # A step that began before the first moment is booked after it as a whole.
    return min(1.0, (last.step_s - first.step_s) / (last.at_s - first.at_s))


def _cells(cells: Cells | None) -> dict[str, Any]:
    """Diagnosis counts idle prefixes apart from cells in use."""
    if cells is None:
        return {}
    return {
        "cells_total": cells.total,
        "cells_used": cells.used - (cells.cached or 0),
        "cells_cached": cells.cached,
    }


def _mean(values: Any) -> float | None:
    found = list(values)
    return fmean(found) if found else None
