"""A plan for what is about to start: what was given is kept, the rest is chosen to fit this machine now.

Owns the way from a command's settings to a plan and back to an EngineConfig, and the refusal of what does not
fit. Takes milliseconds: a dry run is only asked before something is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from edgeserve.config import EngineConfig
from edgeserve.engine.tuning import Tuning, read_tunings, tuning_path
from edgeserve.errors import GGUFError
from edgeserve.gguf import read_header
from edgeserve.host import cpu_budget
from edgeserve.planner.extras import Extras
from edgeserve.planner.goals import FixedSettings, Goals
from edgeserve.planner.here import here
from edgeserve.planner.plan import Plan, make_plan
from edgeserve.planner.refuse import FORCE_FLAG, refuse_if_misfit
from edgeserve.planner.target import Target
from edgeserve.planner.words import size
from edgeserve.settings.sources import Settings
from edgeserve.settings.values import engine_config

# What a plan may choose of a configuration.
_CHOSEN = (
    "n_ctx", "n_seq_max", "n_batch", "n_ubatch", "n_gpu_layers", "n_cpu_moe", "type_k", "type_v",
    "flash_attn", "swa_full", "kv_unified",
)  # fmt: skip
_NO_DEVICES = ("none",)


@dataclass(frozen=True, slots=True)
class PlannedStart:
    """The configuration to start with, and the lines that say why it is so. `plan` None: nothing was
    planned."""

    config: EngineConfig
    notes: tuple[str, ...]
    plan: Plan | None = None
    tuning: Tuning | None = None
    """What the configuration owes to a measurement; None when this model was not measured here."""


def planned_start(settings: Settings, path: Path, *, is_tuned: bool = True) -> PlannedStart:
    """The configuration for `path`: given settings as they are, the others from a plan, and from what was
    measured for this model here unless `is_tuned` is False.

    Raises OutOfMemoryError, with figures and the nearest plan that fits, for what does not fit, and GGUFError
    for what cannot be sized, unless `--force` was given.
    """
    given = engine_config(settings, path)
    if flag := _placed_by_hand(settings):
        note = f"plan       none: {flag} places the model by hand, so nobody has checked that it fits."
        return PlannedStart(given, (note,))
    force = settings["force"] is True
    tuning = known_tuning(given) if is_tuned else None
    try:
        plan = plan_for(settings, path, tuning)
    except GGUFError as error:
        if force:
            return PlannedStart(given, (f"Not planned: {error.message}",))
        raise GGUFError(error.message, f"{error.hint} {FORCE_FLAG} starts it anyway.".strip()) from None
    refuse_if_misfit(plan, force=force)
    chosen: dict[str, Any] = {
        name: value
        for name in _CHOSEN
        if not _is_given(settings, name) and (value := getattr(plan.config, name)) is not None
    }
    # A chat has its answers to show; what a plan did matters there when memory was short.
    is_told = settings.command == "serve" or plan.best.choice.bound == "memory"
    config = with_tuned(replace(given, **chosen), tuning)
    return PlannedStart(config, start_notes(plan) if is_told else (), plan, tuning)


def _placed_by_hand(settings: Settings) -> str:
    """The flag of a placement that a plan does not see through, "" when there is none."""
    if settings.is_given("override_tensor"):
        return "-ot"
    return "-dev" if settings.is_given("devices") and settings["devices"] != _NO_DEVICES else ""


def plan_for(settings: Settings, path: Path, tuning: Tuning | None = None) -> Plan:
    """The plan behind a start; proven by a dry run only when it would be refused without."""
    header, fixed, goals = read_header(path), fixed_of(settings), goals_of(settings)
    backend = "cpu" if settings["devices"] == _NO_DEVICES else ""
    target, fixed = with_tuning(here(goals, backend), fixed, tuning)
    ram_mib = settings["cache_ram_mib"]
    extras = Extras(prefix_cache_bytes=(ram_mib if isinstance(ram_mib, int) else 0) << 20)
    plan = make_plan(header, target, goals, fixed, dry_run=False, extras=extras)
    if plan.fits or plan.best.report.rejected:
        return plan
    return make_plan(header, target, goals, fixed, extras=extras)


def goals_of(settings: Settings) -> Goals:
    """What a start is planned for: one sequence for a chat, within the limits that were set on memory."""
    most_parallel = 1 if settings.command == "chat" else Goals().most_parallel
    names = ("memory_bytes", "gpu_memory_bytes", "margin_bytes")
    limits: dict[str, Any] = {name: settings[name] for name in names}
    return Goals(most_parallel=most_parallel, **limits)


def known_tuning(given: EngineConfig) -> Tuning | None:
    """What was measured for a model on this machine, with these settings that were asked for."""
    tunings = read_tunings(tuning_path(given.model_path, given))
    return tunings.of(given.n_seq_max) if tunings else None


def with_tuning(target: Target, fixed: FixedSettings, tuning: Tuning | None) -> tuple[Target, FixedSettings]:
    """What a plan starts from, with what was measured on this machine: the cells' layout where none was asked
    for, and flash attention on the processor. On a GPU that stays on: a plan counts on the memory it saves.
    """
    if tuning is None or not target.is_here:
        return target, fixed
    if tuning.kv_unified and fixed.kv_unified is None:
        fixed = replace(fixed, kv_unified=True)
    if not target.accelerators:
        target = replace(target, flash_attn_on_cpu=tuning.flash_attn == "on")
    return target, fixed


def with_tuned(config: EngineConfig, tuning: Tuning | None) -> EngineConfig:
    """A planned configuration with the threads that were found fastest, where none were asked for, and with
    what steps then cost."""
    if tuning is None:
        return config
    budget = cpu_budget().n_threads
    if not config.n_threads:
        n_threads_batch = config.n_threads_batch or min(budget, tuning.n_threads_batch)
        n_threads = min(budget, tuning.n_threads)
        config = replace(config, n_threads=n_threads, n_threads_batch=n_threads_batch)
    is_as_measured = (config.n_threads, config.n_threads_batch) == (tuning.n_threads, tuning.n_threads_batch)
    if is_as_measured and config.flash_attn in (tuning.flash_attn, "auto"):
        steps = tuple((step.num_decodes, step.num_prefill, step.duration_s) for step in tuning.steps)
        config = replace(config, step_samples=steps)
    return config


def fixed_of(settings: Settings) -> FixedSettings:
    """What was given, from whatever source, as far as it decides memory."""
    names = [field.name for field in fields(FixedSettings)]
    values: dict[str, Any] = {name: settings[name] for name in names if _is_given(settings, name)}
    fixed = FixedSettings(**values)
    per_request = settings["n_ctx_seq"]
    if isinstance(per_request, int) and per_request and fixed.n_ctx is None:
        count = fixed.n_seq_max or (1 if settings.command == "chat" else Goals().most_parallel)
        fixed = replace(fixed, n_ctx=per_request * count, n_seq_max=count)
    return replace(fixed, n_outputs_max=_rows_with_drafts(settings, fixed))


def _rows_with_drafts(settings: Settings, fixed: FixedSettings) -> int | None:
    """Rows of logits where tokens are drafted; None leaves the usual one a sequence."""
    config = engine_config(settings, Path())
    if not config.num_draft_rows:
        return None
    num_sequences = fixed.n_seq_max or (1 if settings.command == "chat" else Goals().most_parallel)
    return num_sequences + config.num_draft_rows


def _is_given(settings: Settings, name: str) -> bool:
    """A context of 0, like flash attention "auto", means that nobody decided."""
    if not settings.is_given(name):
        return False
    return settings[name] != 0 if name == "n_ctx" else True


def start_notes(plan: Plan) -> tuple[str, ...]:
    """One line: what bounds the context, and the memory that it all takes."""
    uses = ", ".join(
        f"{size(use.high_bytes)} of {size(use.pool.usable_bytes)} {use.pool.name}" for use in plan.best.uses
    )
    return (f"plan       {plan.reasons[0]} Memory: at most {uses}.",)
