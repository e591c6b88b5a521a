"""Prove a few choices by llama.cpp's own dry run, and correct their contexts to what it says.

Owns the rounds: measure the choices in one child process, compare its scratch memory with the estimate,
stretch or shrink contexts that memory bounds, and measure those again. Without a runtime, or where a dry run
fails, the estimate stays and a note says why.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from edgeserve.planner.fit import Sizer, pool_uses, with_n_ctx_seq
from edgeserve.planner.measure import DryRunFailure, measure
from edgeserve.planner.report import MemoryReport
from edgeserve.planner.search import Choice
from edgeserve.planner.settings import CELL_STEP, Settings

Measure = Callable[[Sequence[Settings]], list[MemoryReport | DryRunFailure]]
Reports = Mapping[Settings, MemoryReport]

_MAX_ROUNDS = 3
# A longer context is only worth another round when it is longer by more than this.
_WORTH_ROUND = 1.03


@dataclass(frozen=True, slots=True)
class Proof:
    """How the figures were found. `seconds` is what the dry runs took; `failure` why there was none, and
    `is_loadable` False when that is that llama.cpp refuses the model itself."""

    is_dry_run: bool
    seconds: float = 0.0
    failure: str = ""
    is_loadable: bool = True


@dataclass(frozen=True, slots=True)
class Proven:
    """A choice and its memory report, from a dry run or, where none could be had, from the estimate."""

    choice: Choice
    report: MemoryReport


def estimated(choices: Sequence[Choice], sizer: Sizer) -> tuple[list[Proven], Proof]:
    """The choices with their estimates."""
    return [Proven(choice, sizer.report(choice.settings)) for choice in choices], Proof(False)


def prove(
    choices: Sequence[Choice],
    sizer: Sizer,
    limits: Sequence[int],
    *,
    run: Measure | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[list[Proven], Proof]:
    """The choices with contexts and figures as llama.cpp has them.

    A choice that turns out too large is shrunk; one that was found by memory is stretched to what the dry run
    shows to be free, up to its entry in `limits` (0: it is not stretched). Settings that the user gave are
    never changed: their `fits` is.
    """
    run = run or _runner(sizer)
    start = clock()
    reports: dict[Settings, MemoryReport] = {}
    current, failure, is_loadable = list(choices), "", True
    for _ in range(_MAX_ROUNDS):
        asked = list(dict.fromkeys(choice.settings for choice in current if choice.settings not in reports))
        if not asked:
            break
        for settings, answer in zip(asked, run(asked), strict=True):
            if isinstance(answer, DryRunFailure):
                reports[settings], failure = sizer.report(settings), answer.message
                is_loadable = is_loadable and answer.kind != "not loaded"
            else:
                reports[settings] = answer
        current = [
            _corrected(choice, reports, sizer, limit) for choice, limit in zip(current, limits, strict=True)
        ]
    proven = [_longest_proven(choice, reports, sizer) for choice in current]
    is_dry_run = bool(proven) and proven[0].report.compute_source == "dry-run"
    return proven, Proof(is_dry_run, clock() - start, failure, is_loadable)


def _runner(sizer: Sizer) -> Measure:
    def run(all_settings: Sequence[Settings]) -> list[MemoryReport | DryRunFailure]:
        return measure(sizer.model.header, all_settings, sizer.target.accelerators, extras=sizer.extras)

    return run


def _corrected(choice: Choice, reports: Reports, sizer: Sizer, limit: int) -> Choice:
    """The choice with the context that fits by the ratio of measured to estimated scratch memory."""
    report = reports[choice.settings]
    if choice.bound == "given" or report.compute_source != "dry-run" or not choice.fits:
        return choice
    fits = _fits(report, sizer)
    if fits and (choice.bound != "memory" or not limit):
        return choice
    most = limit or choice.n_ctx_seq
    n_ctx_seq = sizer.longest(choice.settings, most, _ratios(report, sizer.report(choice.settings)))
    if fits and n_ctx_seq < _WORTH_ROUND * choice.n_ctx_seq:
        return choice
    if not fits:
        n_ctx_seq = max(CELL_STEP, min(n_ctx_seq, choice.n_ctx_seq - CELL_STEP))
    resized = replace(choice, settings=with_n_ctx_seq(choice.settings, n_ctx_seq), n_ctx_seq=n_ctx_seq)
    known = reports.get(resized.settings)
    return resized if known is None or _fits(known, sizer) else choice


def _ratios(measured: MemoryReport, estimate: MemoryReport) -> dict[str, float]:
    ratios = {}
    for device in estimate.devices:
        real = measured.device(device.name).compute_bytes
        ratios[device.name] = real / device.compute_bytes if device.compute_bytes else 1.0
    return ratios


def _longest_proven(choice: Choice, reports: Reports, sizer: Sizer) -> Proven:
    """The choice, or the longest context of its kind that was measured and fits when it does not."""
    report = reports.get(choice.settings)
    if report is not None and (_fits(report, sizer) or choice.bound == "given" or not choice.fits):
        return Proven(replace(choice, fits=_fits(report, sizer)), report)
    kin = [
        settings
        for settings, known in reports.items()
        if replace(settings, n_ctx=choice.settings.n_ctx) == choice.settings and _fits(known, sizer)
    ]
    if not kin:
        report = report or sizer.report(choice.settings)
        return Proven(replace(choice, fits=_fits(report, sizer)), report)
    settings = max(kin, key=lambda one: one.n_ctx)
    streams = 1 if settings.kv_unified else settings.n_seq_max
    return Proven(
        replace(choice, settings=settings, n_ctx_seq=settings.n_ctx // streams, fits=True), reports[settings]
    )


def _fits(report: MemoryReport, sizer: Sizer) -> bool:
    return report.rejected is None and all(use.fits for use in pool_uses(report, sizer.target))
