"""From settings to an engine that is ready to start, and what there is to say about it.

Owns the order (AMX is tried before it is used) and the facts that the library only tells in its log. Expects
a file whose header was checked (models.locate does). Knows nothing of HTTP.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from edgeserve import ggml
from edgeserve.amx_guard import judge
from edgeserve.commands.planned import planned_start
from edgeserve.config import EngineConfig
from edgeserve.engine.async_engine import AsyncEngine
from edgeserve.host import cpu_budget
from edgeserve.llama import Log, Model
from edgeserve.placement import Placement
from edgeserve.settings.sources import Settings

if TYPE_CHECKING:
    from edgeserve.commands.first_tune import FirstTune

_OFFLOADED = re.compile(r"offloaded (\d+)/(\d+) layers to GPU")


@dataclass(frozen=True, slots=True)
class Offload:
    """Layers on a GPU, out of all of them (the output counts as one, as llama.cpp counts)."""

    num_layers: int
    num_total: int
    is_possible: bool

    def __str__(self) -> str:
        shown = f"{self.num_layers} of {self.num_total} layers on a GPU"
        return shown if self.is_possible else f"{shown}: this build has no GPU support"


@dataclass(frozen=True, slots=True)
class Started:
    """An engine (its thread not yet running) and what is worth saying about how it was set up."""

    engine: AsyncEngine
    offload: Offload
    threads_reason: str
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model placed as asked for, and the settings for its context."""

    model: Model
    config: EngineConfig
    offload: Offload
    notes: tuple[str, ...]


def make_engine(
    settings: Settings,
    path: Path,
    on_progress: Callable[[float], None],
    first_tune: FirstTune | None = None,
) -> Started:
    """Load the model and make its context. `first_tune` may measure a model that never was before its context
    is made. Raises ModelError, OutOfMemoryError or UsageError."""
    loaded = load_model(settings, path, on_progress)
    if first_tune is not None and first_tune.run_if_due(settings, loaded.model, loaded.config):
        loaded = replace(loaded, config=_planned_again(settings, path, loaded.config))
    engine = AsyncEngine(loaded.model, loaded.config)
    notes = (*loaded.notes, *prefix_notes(engine.config, engine.can_cut_prefixes))
    return Started(engine, loaded.offload, threads_reason(settings, engine.config), notes)


def _planned_again(settings: Settings, path: Path, loaded: EngineConfig) -> EngineConfig:
    """The configuration with what was just measured: of a model that stays where it is."""
    config = planned_start(settings, path).config
    return replace(
        config,
        n_gpu_layers=loaded.n_gpu_layers,
        n_cpu_moe=loaded.n_cpu_moe,
        use_extra_bufts=loaded.use_extra_bufts,
    )


def prefix_notes(config: EngineConfig, can_cut: bool) -> tuple[str, ...]:
    """What there is to say about reusing prefixes: nothing, where all can be and none is kept elsewhere.
    `can_cut`: whether the model can drop a part of its memory."""
    notes = []
    if not can_cut:
        how = f"it goes back to checkpoints, {config.checkpoint_mib} MiB at most (--cache-checkpoints)"
        none = "without checkpoints (--cache-checkpoints 0) it reuses a history only as a whole"
        what = how if config.checkpoint_mib else none
        notes.append(f"prefixes   this model cannot drop a part of its memory: {what}")
    if config.cache_ram_mib:
        notes.append(f"prefixes   in RAM, {config.cache_ram_mib} MiB at most")
    if config.cache_disk:
        notes.append(f"prefixes   in {config.cache_disk}, {config.cache_disk_mib} MiB at most")
    return tuple(notes)


def threads_reason(settings: Settings, config: EngineConfig) -> str:
    """Why there are so many threads, without a full stop."""
    budget = cpu_budget()
    if settings.is_given("n_threads"):
        return "as asked for"
    if config.n_threads < budget.n_threads:
        return f"measured to be faster than the {budget.n_threads} allowed"
    return budget.reason.rstrip(".")


def load_model(
    settings: Settings, path: Path, on_progress: Callable[[float], None], *, is_tuned: bool = True
) -> Loaded:
    """Load the model, without a context yet. `is_tuned` False leaves out what was measured. Raises
    ModelError, OutOfMemoryError or UsageError."""
    start = planned_start(settings, path, is_tuned=is_tuned)
    log = Log(echo=settings["verbose"] is True)
    config, amx_note = _without_trapped_amx(start.config, path)
    model = Model(
        path,
        n_gpu_layers=config.n_gpu_layers,
        use_mmap=config.use_mmap,
        use_mlock=config.use_mlock,
        use_extra_bufts=config.use_extra_bufts,
        place=Placement(config),
        log=log,
        on_progress=on_progress,
    )
    # Making a context clears the log.
    offload = offload_of(model, "\n".join(log.lines))
    notes = [note for note in (*start.notes, amx_note, unused_gpu_warning(settings, offload)) if note]
    return Loaded(model, config, offload, tuple(notes))


def _without_trapped_amx(config: EngineConfig, path: Path) -> tuple[EngineConfig, str]:
    if not config.use_extra_bufts:
        return config, ""
    verdict = judge(path, config.n_threads or cpu_budget().n_threads)
    return replace(config, use_extra_bufts=verdict.is_safe), verdict.note


def offload_of(model: Model, log: str) -> Offload:
    """What llama.cpp really placed on a GPU: its log tells, since a number asked for is no number had."""
    found = _OFFLOADED.search(log)
    if found:
        return Offload(int(found[1]), int(found[2]), True)
    return Offload(0, model.n_layer + 1, ggml.supports_gpu_offload())


def unused_gpu_warning(settings: Settings, offload: Offload) -> str:
    """One loud line when layers were asked onto a GPU and none went there; "" otherwise."""
    if not settings.is_given("n_gpu_layers") or settings["n_gpu_layers"] == 0 or offload.num_layers:
        return ""
    asked = (
        f"-ngl from {settings.source('n_gpu_layers')}"
        if settings.source("n_gpu_layers") != "flag"
        else "-ngl"
    )
    if offload.is_possible:
        return f"warning: {asked} has no effect: this build can use a GPU but found none."
    return (
        f"warning: {asked} has no effect: this build has no GPU support (llama_supports_gpu_offload() is"
        " false). `make install BACKEND=cuda` (or metal, vulkan, rocm) installs one that has."
    )
