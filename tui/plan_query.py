"""What the plan screen asks the planner: a model and a device by name, goals and settings as typed.

Owns the reading of the form and the remembering of headers and targets between two questions. Every figure
is the planner's, the same that `edgeserve plan` prints. Blocking: call it on a thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from edgeserve import models
from edgeserve.errors import ModelNotFoundError, UsageError
from edgeserve.gguf_header import GGUFHeader
from edgeserve.models_view import list_rows
from edgeserve.planner.device import list_profiles
from edgeserve.planner.device_search import find_profile
from edgeserve.planner.goals import PREFERENCES, FixedSettings, Goals, Preference
from edgeserve.planner.here import here
from edgeserve.planner.plan import Option, Plan, make_plan
from edgeserve.planner.target import Target, described_target

THIS_MACHINE = "this machine"
_LEAST_CONTEXT = 512


@dataclass(frozen=True, slots=True)
class PlanForm:
    """The form as typed; "" leaves a choice to the plan."""

    model: str
    device: str = THIS_MACHINE
    n_ctx: str = ""
    n_seq_max: str = ""
    n_gpu_layers: str = ""
    kv_type: str = ""
    min_ctx: str = ""
    prefer: str = ""

    def goals(self) -> Goals:
        """Raises UsageError for what cannot be understood."""
        known: dict[str, Preference] = {name: name for name in PREFERENCES}
        prefer = self.prefer.strip().lower() or "balanced"
        if prefer not in known:
            raise UsageError(f"A plan cannot prefer {prefer}.", f"One of: {', '.join(PREFERENCES)}.")
        return Goals(min_ctx=_whole("at least", self.min_ctx) or 0, prefer=known[prefer])

    def fixed(self) -> FixedSettings:
        """Raises UsageError for what cannot be understood."""
        kv_type = self.kv_type.strip().lower() or None
        return FixedSettings(
            n_ctx=_whole("context", self.n_ctx),
            n_seq_max=_whole("sequences", self.n_seq_max),
            n_gpu_layers=_whole("layers", self.n_gpu_layers),
            type_k=kv_type,
            type_v=kv_type,
        )


def _whole(name: str, text: str) -> int | None:
    """`16384`, `16,384` or `16k`; None for nothing."""
    plain = text.strip().lower().replace(",", "").replace("_", "")
    if not plain:
        return None
    factor = 1024 if plain.endswith("k") else 1
    try:
        return int(plain.removesuffix("k")) * factor
    except ValueError:
        raise UsageError(f"{name}: {text!r} is not a whole number.", "Write 16384 or 16k.") from None


@dataclass
class PlanDesk:
    """Answers forms. `read_here` looks at this machine; it is asked once."""

    read_here: Callable[[Goals], Target] = here
    _headers: dict[str, GGUFHeader] = field(default_factory=dict)
    _targets: dict[tuple[str, Goals], Target] = field(default_factory=dict)

    def answer(self, form: PlanForm, *, dry_run: bool) -> Plan:
        """The plan for a form. Raises UsageError, ModelError and GGUFError."""
        goals, fixed = form.goals(), form.fixed()
        header = self._header(form.model.strip())
        target = self._target(form.device.strip() or THIS_MACHINE, goals)
        return make_plan(header, target, goals, fixed, dry_run=dry_run)

    def other_contexts(self, form: PlanForm, plan: Plan) -> list[Option]:
        """What more or less context would cost, everything else as in `plan`, which was made for `form`;
        estimated, shortest first. Empty where contexts are not what matters."""
        if plan.best.report.rejected is not None:
            return []
        settings = plan.settings
        header, target = self._header(form.model.strip()), plan.target
        fixed = replace(
            plan.fixed, n_seq_max=settings.n_seq_max, type_k=settings.type_k, type_v=settings.type_v
        )
        shares = max(1, settings.n_ctx // max(1, plan.best.choice.n_ctx_seq))
        own = plan.best.choice.n_ctx_seq
        return [
            plan.best
            if each == own
            else make_plan(
                header, target, plan.goals, replace(fixed, n_ctx=each * shares), dry_run=False
            ).best
            for each in contexts_around(own, plan.model.n_ctx_train)
        ]

    def _header(self, reference: str) -> GGUFHeader:
        if reference not in self._headers:
            self._headers[reference] = _read_header(reference)
        return self._headers[reference]

    def _target(self, device: str, goals: Goals) -> Target:
        key = (device, goals)
        if key not in self._targets:
            is_here = device == THIS_MACHINE
            self._targets[key] = (
                self.read_here(goals) if is_here else described_target(find_profile(device), goals)
            )
        return self._targets[key]


def contexts_around(n_ctx_seq: int, n_ctx_train: int) -> list[int]:
    """Contexts of one sequence to compare with `n_ctx_seq`, itself included: what the model was trained for,
    and halves of it, within a factor of sixteen."""
    most = min(n_ctx_seq, n_ctx_train)
    halves = [n_ctx_train >> shift for shift in range(n_ctx_train.bit_length())]
    near = {each for each in halves if each >= _LEAST_CONTEXT and most / 16 <= each <= most * 16}
    return sorted(near | {n_ctx_seq})


def _read_header(reference: str) -> GGUFHeader:
    """Of a file here, or of a hub repository by parts; a model that would have to be downloaded whole is not
    fetched just to look at it."""
    if not reference:
        raise UsageError("No model is chosen.", "Ctrl+O lists those that are known.")
    if "://" not in reference:
        found = models.resolve(reference)
        if isinstance(found, models.DownloadPlan) and found.requirement:
            raise ModelNotFoundError(
                f"{reference} is not on this machine yet.", f"`edgeserve models pull {reference}` fetches it."
            )
    return models.read_model_header(reference)


def name_of(path: str) -> str:
    """What to call a model file in a command: by its name in the list, or else by its path."""
    return next((row.entry.name for row in list_rows() if row.path == Path(path)), path)


def device_names() -> list[str]:
    """This machine, then every profile by name."""
    return [THIS_MACHINE, *(profile.name for profile in list_profiles())]
