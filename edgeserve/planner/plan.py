"""Which settings to run a model with on a machine: the plan, its cost, its reasons, and what else there is.

    plan = make_plan(read_header("model.gguf"), target, Goals(min_ctx=8192))
    plan.config                 an EngineConfig, ready to start
    plan.reasons                sentences: which limit bound, and what the next step up would need

Owns the `Plan` and the order of the work: search by closed forms, proof by dry run, reasons. One estimator
(`memory`) stands behind every figure. Never loads the runtime: a dry run is a child process.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from edgeserve.config import EngineConfig
from edgeserve.errors import GGUFError
from edgeserve.gguf_header import GGUFHeader
from edgeserve.planner.alternatives import Idea, ideas
from edgeserve.planner.extras import Extras
from edgeserve.planner.fit import PoolUse, Sizer, pool_uses
from edgeserve.planner.goals import FixedSettings, Goals
from edgeserve.planner.plan_config import engine_config
from edgeserve.planner.plan_speed import PlanSpeed, Speeds
from edgeserve.planner.prove import Measure, Proof, Proven, estimated, prove
from edgeserve.planner.reasons import reasons_for
from edgeserve.planner.remedy import Remedy, remedy_for
from edgeserve.planner.report import MemoryReport
from edgeserve.planner.search import Choice, Search
from edgeserve.planner.settings import Settings
from edgeserve.planner.target import Target

_QUANT = re.compile(r"(?<![A-Za-z])(I?Q\d\w*|MXFP4\w*|NVFP4|BF16|F16|F32|TQ\d_\d)(?![A-Za-z])", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the header says of the model, as far as a plan shows it."""

    name: str
    source: str
    architecture: str
    quant: str
    n_layer: int
    n_ctx_train: int
    file_bytes: int
    has_window: bool
    n_swa: int
    num_experts: int


@dataclass(frozen=True, slots=True)
class Option:
    """One choice of settings with its memory and speed. `label` says what for, "" for the suggestion."""

    label: str
    choice: Choice
    report: MemoryReport
    uses: tuple[PoolUse, ...]
    speed: PlanSpeed

    @property
    def settings(self) -> Settings:
        return self.choice.settings

    @property
    def fits(self) -> bool:
        return self.choice.fits


@dataclass(frozen=True, slots=True)
class Plan:
    """The suggestion (`best`), sentences on why, and what else is worth a look.

    `fits` False: then `remedy` says what would make it fit. `proof`: whether the figures are llama.cpp's own.
    """

    model: ModelFacts
    target: Target
    goals: Goals
    fixed: FixedSettings
    best: Option
    alternatives: tuple[Option, ...]
    reasons: tuple[str, ...]
    proof: Proof
    remedy: Remedy | None

    @property
    def fits(self) -> bool:
        return self.best.fits

    @property
    def settings(self) -> Settings:
        return self.best.settings

    @property
    def config(self) -> EngineConfig:
        """What the engine starts with."""
        return engine_config(self.settings, self.model.source)


def make_plan(
    header: GGUFHeader,
    target: Target,
    goals: Goals | None = None,
    fixed: FixedSettings | None = None,
    *,
    dry_run: bool = True,
    extras: Extras | None = None,
    measure: Measure | None = None,
) -> Plan:
    """The plan for the model of `header` on `target`.

    `fixed` settings win over every goal, and are reported exactly whether they fit or not. `dry_run` False
    stays with closed forms and the estimate of scratch memory, and takes milliseconds. `measure` replaces the
    child process. Raises GGUFError when the model cannot be sized.
    """
    check_is_model(header)
    goals, fixed = goals or Goals(), fixed or FixedSettings()
    speeds = Speeds(header, target)
    search = Search(Sizer(header, target, extras), speeds, goals, fixed)
    best = search.best()
    others = ideas(search, best)
    if dry_run:
        hopeful = Search(Sizer(header, target, extras, hopeful=True), speeds, goals, fixed).best()
        proven, proof = _proven(search, [hopeful, best], others, measure)
    else:
        proven, proof = estimated([best, *(idea.choice for idea in others)], search.sizer)
    options = [
        _option(one, label, target, speeds)
        for one, label in zip(proven, ["", *(idea.label for idea in others)], strict=True)
    ]
    chosen = options[0]
    remedy = None if chosen.fits else remedy_for(search, chosen.choice)
    facts = model_facts(header, search)
    return Plan(
        model=facts,
        target=target,
        goals=goals,
        fixed=fixed,
        best=chosen,
        alternatives=_different(options),
        reasons=(
            *reasons_for(search, chosen.choice, chosen.report, chosen.uses, chosen.speed),
            *_unloadable(proof),
        ),
        proof=proof,
        remedy=remedy,
    )


def _unloadable(proof: Proof) -> tuple[str, ...]:
    """What a start would end with, whatever the memory."""
    if proof.is_loadable:
        return ()
    return (f"This build of llama.cpp does not load the model: {proof.failure.rstrip('.')}.",)


def _proven(
    search: Search, bests: Sequence[Choice], others: Sequence[Idea], measure: Measure | None
) -> tuple[list[Proven], Proof]:
    """Choices as llama.cpp sizes them: the hopeful one if it holds, else the careful one, then the others."""
    choices = [*bests, *(idea.choice for idea in others)]
    limits = [search.target, search.target, *(idea.most for idea in others)]
    stretched = [search.target, *(0 for _ in choices[1:])]
    proven, proof = prove(choices, search.sizer, stretched, run=measure)
    proven = [
        replace(one, choice=replace(one.choice, bound=search.bound_at(one.choice.n_ctx_seq, limit)))
        for one, limit in zip(proven, limits, strict=True)
    ]
    hopeful, careful, *rest = proven
    return [hopeful if _holds(hopeful.choice, careful.choice, search.floor) else careful, *rest], proof


def _holds(hopeful: Choice, careful: Choice, floor: int) -> bool:
    """Whether the hopeful choice still is what it was chosen for, once it is measured."""
    if not (hopeful.fits and careful.fits):
        return hopeful.fits or not careful.fits
    return hopeful.n_ctx_seq >= min(floor, careful.n_ctx_seq)


def _option(proven: Proven, label: str, target: Target, speeds: Speeds) -> Option:
    choice = proven.choice
    return Option(
        label,
        choice,
        proven.report,
        pool_uses(proven.report, target),
        speeds.at(choice.settings, choice.n_ctx_seq),
    )


def _different(options: Sequence[Option]) -> tuple[Option, ...]:
    """Alternatives that still fit and still differ once they are proven."""
    best, *others = options
    seen = {best.settings}
    kept = []
    for option in others:
        if option.fits and option.settings not in seen:
            seen.add(option.settings)
            kept.append(option)
    return tuple(kept)


def check_is_model(header: GGUFHeader) -> None:
    """Raises GGUFError for files that go with a model but are none."""
    if header.architecture == "clip" or header.get_str("general.type") == "mmproj":
        from edgeserve.gguf_checks import check_loadable

        check_loadable(header)
    if not header.architecture:
        raise GGUFError(
            f"Cannot size {header.source}: the key general.architecture is missing from its header.",
            "llama.cpp's tools did not write it.",
        )


def model_facts(header: GGUFHeader, search: Search) -> ModelFacts:
    hparams = search.hparams
    return ModelFacts(
        name=_spoken_name(header),
        source=header.source,
        architecture=header.architecture,
        quant=quant_label(header),
        n_layer=hparams.n_layer,
        n_ctx_train=hparams.n_ctx_train,
        file_bytes=header.total_bytes,
        has_window=hparams.has_window,
        n_swa=hparams.n_swa,
        num_experts=header.arch_get_int("expert_count") or 0,
    )


def _spoken_name(header: GGUFHeader) -> str:
    """The file's name without its quantization: headers often say something less telling."""
    stem = re.sub(r"-\d{5}-of-\d{5}$", "", PurePosixPath(header.source.replace("\\", "/")).stem)
    plain = _QUANT.sub("", stem).rstrip("-_. ")
    return plain if plain and plain != stem else header.name or stem


def quant_label(header: GGUFHeader) -> str:
    """The quantization as the file's name has it, else the type that most of the weights have."""
    stem = PurePosixPath(header.source.replace("\\", "/")).stem
    found = _QUANT.findall(re.sub(r"-\d{5}-of-\d{5}$", "", stem))
    if found:
        return str(found[-1]).upper()
    sizes: dict[str, int] = {}
    for tensor in header.tensors:
        sizes[tensor.type_name] = sizes.get(tensor.type_name, 0) + tensor.n_bytes
    return max(sizes, key=lambda name: sizes[name]).upper() if sizes else ""
