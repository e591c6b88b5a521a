"""A benchmark's summary.json -> the figures that the rules of diagnosis.py rest on.

Owns which case tells which figure: load and closed cases the queue and the objective, stall the gaps, depth
and turns what length and cache do. The first server's cases only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from edgeserve.doctor.observed import Observed
from edgeserve.errors import UsageError

_SETTINGS_PATH = ("environment", "servers", "A", "props", "engine")


def observe_bench(document: Mapping[str, Any]) -> Observed:
    """Raises UsageError for a document that is no result of `edgeserve bench`."""
    cases = list(_cases(document))
    if not cases:
        raise UsageError("The result holds no cases.", "Give the summary.json of a benchmark.")
    settings = _settings(document)
    found: dict[str, Any] = {}
    for case in cases:
        read = {"load": _load, "closed": _load, "stall": _stall, "turns": _turns}.get(case["kind"])
        found |= read(case) if read else {}
    found |= _depths([case for case in cases if case["kind"] == "depth"])
    target_ms = settings.get("itl_target_ms")
    return Observed(
        **{name: value for name, value in found.items() if value is not None},
        attainment_target=_first_result(document).get("options", {}).get("attainment_target"),
        num_slots=settings.get("n_seq_max"),
        itl_target_s=target_ms / 1e3 if target_ms else None,
        settings=settings,
    )


def _cases(document: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    results = document.get("results", [document])
    if not str(document.get("schema", "")).startswith("edgeserve-bench"):
        raise UsageError("This is no result of `edgeserve bench`.", "Give a benchmark's summary.json.")
    for result in results:
        yield from (case for case in result.get("cases", []) if case.get("server") == "A")


def _first_result(document: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = (document.get("results") or [document])[0]
    return found


def _settings(document: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Any = _first_result(document)
    for key in _SETTINGS_PATH:
        found = found.get(key) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else {}


def _median(case: Mapping[str, Any], name: str) -> float | None:
    spread = case.get("figures", {}).get(name)
    return spread["median"] if spread else None


def _load(case: Mapping[str, Any]) -> dict[str, Any]:
    """The highest rate or the most clients: cases come in rising order, and the last one counts."""
    offered, rejected = _median(case, "offered"), _median(case, "rejected")
    return {
        "num_requests": round(offered) if offered is not None else None,
        "num_rejected": round(rejected) if rejected is not None else None,
        "attainment": _median(case, "attainment"),
        "is_saturated": bool(case.get("is_saturated")),
        "output_tok_s": _median(case, "output_tok_s"),
        "prefill_tok_s": _median(case, "prefill_tok_s"),
    }


def _stall(case: Mapping[str, Any]) -> dict[str, Any]:
    """The stream's gaps before B's prompt came, and the worst of those beside it."""
    usual, worst = _median(case, "a_gap_before_p50_s"), _median(case, "a_gap_max_s")
    during = _median(case, "a_gap_p50_s")
    gaps = _median(case, "a_gaps")
    share = max(0.0, 1 - usual / during) if usual and during else None
    return {
        "num_requests": _counted(case),
        "gap_p50_s": usual,
        "gap_p99_s": _median(case, "a_gap_p99_s") or worst,
        "num_gaps": round(gaps) if gaps is not None else None,
        "stalled_share": share,
    }


def _turns(case: Mapping[str, Any]) -> dict[str, Any]:
    """The first turn is cold; the later ones are hits. They count as many requests as there were repeats."""
    repeats = len(case.get("repeats", []))
    turns = _median(case, "turns")
    evaluated, share = _median(case, "later_evaluated_tokens"), _median(case, "later_evaluated_share")
    prompt = evaluated / share if evaluated and share else None
    return {
        "num_requests": _counted(case),
        "ttft_miss_s": _median(case, "first_ttft_s"),
        "num_misses": repeats,
        "ttft_hit_s": _median(case, "later_ttft_p50_s"),
        "num_hits": round(turns - 1) * repeats if turns else None,
        "hit_prompt_tokens": prompt,
        "hit_cached_tokens": prompt - evaluated if prompt is not None and evaluated is not None else None,
    }


def _counted(case: Mapping[str, Any]) -> int | None:
    ok = _median(case, "ok")
    return None if ok is None else round(ok) * len(case.get("repeats", []))


def _depths(cases: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Time per token at the least and the greatest depth, by the prompt lengths in the cases' labels."""
    points = sorted(
        (depth, tpot)
        for case in cases
        if (tpot := _median(case, "tpot_p50_s")) is not None
        and (depth := _depth_of(str(case.get("label", "")))) is not None
    )
    found: dict[str, Any] = {}
    if points:
        found = {"num_requests": sum(_counted(case) or 0 for case in cases)}
    if len(points) > 1:
        found |= {"shallow_tokens": points[0][0], "shallow_tpot_s": points[0][1]}
        found |= {"deep_tokens": points[-1][0], "deep_tpot_s": points[-1][1]}
    return found


def _depth_of(label: str) -> int | None:
    digits = label.rpartition(" ")[2].replace(",", "")
    return int(digits) if digits.isdecimal() else None
