"""Refuse to start what does not fit, with the figures, the nearest plan that does, and the way around.

Owns the words of the refusal. Whether something fits is the plan's own figure.
"""

from __future__ import annotations

from edgeserve.errors import OutOfMemoryError, UsageError
from edgeserve.planner.plan import Plan
from edgeserve.planner.plan_config import edgeserve_flags
from edgeserve.planner.words import count, size

FORCE_FLAG = "--force"


def refuse_if_misfit(plan: Plan, *, force: bool = False) -> None:
    """Raise OutOfMemoryError when the plan does not fit, UsageError when llama.cpp would refuse it.

    `force` lets everything through: the library then says what it could not have.
    """
    if force or plan.fits:
        return
    if (rejected := plan.best.report.rejected) is not None:
        raise UsageError(rejected, _ways_out(plan))
    raise OutOfMemoryError(_message(plan), f"{_ways_out(plan)} {FORCE_FLAG} starts it anyway.".strip())


def _message(plan: Plan) -> str:
    """What is needed where, at which settings, and the limit that bound."""
    worst = min(plan.best.uses, key=lambda use: use.left_bytes)
    settings = plan.settings
    return (
        f"{plan.model.name} {plan.model.quant} does not fit: it would take {size(worst.high_bytes)} of"
        f" {worst.pool.name} with {_words(plan)} ({settings.type_k}/{settings.type_v} cache), and"
        f" {size(worst.pool.usable_bytes)} may be used. {worst.pool.reason.rstrip('.')}."
    )


def _words(plan: Plan) -> str:
    resolved = plan.best.report.resolved
    assert resolved is not None, "settings that llama.cpp refuses are told by their own sentence"
    layers = ""
    if plan.target.accelerators:
        layers = f", {plan.settings.n_gpu_layers} layers on the GPU"
    return f"{resolved.n_ctx:,} cells for {count(plan.settings.n_seq_max, 'sequence')}{layers}"


def _ways_out(plan: Plan) -> str:
    """The mildest single change, else the nearest plan, else what is the least that it needs."""
    remedy = plan.remedy
    if remedy is None:
        return ""
    if remedy.changes:
        return f"It fits with {' '.join(remedy.changes[0].flags)}."
    if remedy.nearest is not None:
        flags = edgeserve_flags(
            remedy.nearest.settings,
            on_gpu=bool(plan.target.accelerators),
            has_window=plan.model.has_window,
        )
        return f"This fits: {' '.join(flags)}."
    return remedy.least_sentence
