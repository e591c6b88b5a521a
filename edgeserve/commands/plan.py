"""`edgeserve plan`: a model, a machine and wishes in; settings, bytes, speeds and reasons out.

Owns the reading of what was typed and the choice of the output's form. Loads no runtime: dry runs and loads
for --verify happen in child processes.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeserve import models
from edgeserve.commands.planned import known_tuning, with_tuning
from edgeserve.commands.progress import ProgressLine
from edgeserve.config import EngineConfig
from edgeserve.engine.tuning import Tuning
from edgeserve.errors import UsageError
from edgeserve.gguf_header import GGUFHeader
from edgeserve.ink import ink_for
from edgeserve.model_list import find_entry, read_models_list
from edgeserve.model_reference import parse_hub_reference
from edgeserve.planner.device_search import find_profile
from edgeserve.planner.extras import Extras
from edgeserve.planner.goals import PREFERENCES, FixedSettings, Goals, Preference
from edgeserve.planner.here import here
from edgeserve.planner.plan import Plan, make_plan
from edgeserve.planner.plan_json import plan_to_json
from edgeserve.planner.plan_text import plan_lines
from edgeserve.planner.target import Target, described_target
from edgeserve.settings.kinds import BadValueError, Size
from edgeserve.settings.sources import parse
from edgeserve.settings.table import SETTINGS


@dataclass(frozen=True, slots=True)
class Request:
    """What was typed; `typed` holds the settings by field, None for what was not given."""

    reference: str | None
    device: str | None = None
    backend: str = ""
    min_ctx: int = 0
    prefer: str = "balanced"
    memory: str | None = None
    gpu_memory: str | None = None
    fit_target: str | None = None
    outputs_max: int | None = None
    mmproj: str | None = None
    offline: bool = False
    typed: Mapping[str, bool | str | None] | None = None


@dataclass(frozen=True, slots=True)
class Form:
    """How the answer is wanted."""

    estimate: bool = False
    table: bool = False
    markdown: bool = False
    verify: bool = False
    quants: bool = False
    as_json: bool = False


def run(request: Request, form: Form) -> int:
    """Print the plan; 0 also for one that does not fit, which is an answer like any other."""
    _check_form(form)
    reference = request.reference or read_models_list()[0].name
    goals, fixed = goals_of(request), fixed_of(request)
    header = header_of(reference, offline=request.offline)
    target, fixed = with_tuning(target_of(request, goals), fixed, _known_tuning(header, fixed))
    plan = make_plan(header, target, goals, fixed, dry_run=not form.estimate, extras=_extras(request))
    print(_answer(plan, header, reference, request, form))
    return 0


def _check_form(form: Form) -> None:
    """Raises UsageError when one answer is asked for in two forms."""
    forms = {
        "--quants": form.quants,
        "--table": form.table,
        "--markdown": form.markdown,
        "--verify": form.verify,
    }
    asked = [flag for flag, is_asked in forms.items() if is_asked]
    if form.markdown and form.as_json:
        asked.append("--json")
    if len(asked) > 1:
        raise UsageError(f"{' and '.join(asked)} do not go together.", "Ask for one of them at a time.")


def _answer(plan: Plan, header: GGUFHeader, reference: str, request: Request, form: Form) -> str:
    # Forms that few ask for are imported when they are: a plan should be there at once.
    if form.quants:
        from edgeserve.commands import plan_quants

        rows = plan_quants.compare(reference, header, plan, offline=request.offline)
        return plan_quants.quants_json(rows) if form.as_json else "\n".join(plan_quants.lines(rows, plan))
    if form.table:
        return _table(plan, header, form)
    if form.markdown:
        from edgeserve.planner.plan_markdown import plan_markdown

        return plan_markdown(plan)
    repo = hub_name(reference, plan.model.quant)
    document = plan_to_json(plan, reference, repo)
    lines = plan_lines(plan, reference, ink_for(sys.stdout, os.environ), repo)
    if form.verify:
        from edgeserve.planner.verify import verify, verify_json, verify_lines

        compared = verify(plan, header)
        document["verified"] = verify_json(compared)
        lines += ["", *verify_lines(compared)]
    return _dump({"reference": reference, **document}) if form.as_json else "\n".join(lines)


def _table(plan: Plan, header: GGUFHeader, form: Form) -> str:
    from edgeserve.planner.fit import Sizer
    from edgeserve.planner.plan_speed import Speeds
    from edgeserve.planner.plan_table import table_json, table_lines, table_of

    cells = table_of(plan, Sizer(header, plan.target), Speeds(header, plan.target))
    return _dump(table_json(cells, plan)) if form.as_json else "\n".join(table_lines(cells, plan))


def _dump(document: Mapping[str, Any]) -> str:
    return json.dumps(document, indent=1, allow_nan=False)


# --- what was typed


def header_of(reference: str, *, offline: bool) -> GGUFHeader:
    """The model's header: of a file, of a header-only copy, or read from afar as far as it goes."""
    with closing(ProgressLine()) as progress:
        return models.read_model_header(reference, offline=offline, progress=progress)


def hub_name(reference: str, quant: str) -> str:
    """What llama-server's -hf takes for it; "" for what is not on the hub."""
    entry = find_entry(reference, read_models_list())
    if entry is not None:
        return f"{entry.repo}:{quant}" if entry.repo and quant else entry.repo
    hub = None if Path(reference).exists() else parse_hub_reference(reference)
    if hub is None or hub.file is not None:
        return ""
    return f"{hub.repo}:{hub.tag}" if hub.tag else hub.repo


def target_of(request: Request, goals: Goals) -> Target:
    """The machine that the plan is for."""
    if request.device is not None:
        return described_target(find_profile(request.device), goals, request.backend)
    return here(goals, request.backend)


def _known_tuning(header: GGUFHeader, fixed: FixedSettings) -> Tuning | None:
    """What was measured on this machine for a file that is here, with these settings."""
    if not header.is_local:
        return None
    names = ("n_seq_max", "type_k", "type_v", "offload_kqv", "n_gpu_layers", "n_cpu_moe")
    asked = {name: value for name in names if (value := getattr(fixed, name)) is not None}
    return known_tuning(EngineConfig(header.source, **asked))


def goals_of(request: Request) -> Goals:
    prefer: Preference = next((one for one in PREFERENCES if one == request.prefer), "balanced")
    if prefer != request.prefer:
        raise UsageError(f"A plan cannot prefer {request.prefer}.", f"One of: {', '.join(PREFERENCES)}.")
    return Goals(
        min_ctx=request.min_ctx,
        prefer=prefer,
        memory_bytes=size_bytes(request.memory, "--memory", "G"),
        gpu_memory_bytes=size_bytes(request.gpu_memory, "--gpu-memory", "G"),
        margin_bytes=size_bytes(request.fit_target, "--fit-target", "M"),
    )


def size_bytes(text: str | None, flag: str, bare: str) -> int | None:
    """Bytes of "6GiB", "512M" or a number in the unit `bare`. Raises UsageError that names the flag."""
    if text is None:
        return None
    kind = Size(bare)
    try:
        n_bytes = kind.parse(text.strip())
    except BadValueError as error:
        raise UsageError(f"{flag}: {text!r} {error}.", kind.allowed) from None
    assert isinstance(n_bytes, int)
    return n_bytes


def fixed_of(request: Request) -> FixedSettings:
    """Settings that the plan is held to; 0 and auto leave a choice to the plan."""
    values: dict[str, Any] = {}
    for setting in SETTINGS:
        typed = (request.typed or {}).get(setting.field)
        if typed is None or (setting.field, typed) == ("n_gpu_layers", "auto"):
            continue
        value = typed if isinstance(typed, bool) else parse(setting, typed, setting.spelling)
        if value is not None and not (setting.field == "n_ctx" and value == 0):
            values[setting.field] = value
    if request.outputs_max is not None:
        values["n_outputs_max"] = request.outputs_max
    return FixedSettings(**values)


def _extras(request: Request) -> Extras:
    if request.mmproj is None:
        return Extras()
    return Extras(projector=header_of(request.mmproj, offline=request.offline))
