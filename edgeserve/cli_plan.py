"""The commands of the planner: `plan`, `devices`, `models fit`; which option leads where.

Owns their options. Settings are spelled, read and explained as in the table of settings; what they do is the
commands' matter. `mount` puts them into the command line.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from edgeserve.cli_options import RunByDefault, SettingsCommand
from edgeserve.settings.kinds import Switch
from edgeserve.settings.table import SETTINGS, Setting

MEMORY_FIELDS = (
    "n_ctx", "n_seq_max", "n_batch", "n_ubatch", "type_k", "type_v", "flash_attn", "kv_unified", "swa_full",
    "n_gpu_layers", "n_cpu_moe", "offload_kqv", "tensor_split", "use_mmap", "use_extra_bufts",
)  # fmt: skip
"""Settings that decide memory: those that a plan can be held to."""

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Device = Annotated[
    str | None,
    typer.Option("--device", metavar="NAME", help='Plan for another machine: "MacBook Air M2 16 GB".'),
]
Backend = Annotated[
    str, typer.Option("--backend", metavar="NAME", help="cuda, metal, vulkan, rocm or cpu, where it has it.")
]
Memory = Annotated[
    str | None, typer.Option("--memory", metavar="SIZE", help="Use at most this much RAM: 6GiB, 512MiB.")
]
GpuMemory = Annotated[
    str | None, typer.Option("--gpu-memory", metavar="SIZE", help="Use at most this much of each GPU.")
]
Offline = Annotated[bool, typer.Option("--offline", help="Use only what is on this machine already.")]
Typed = bool | str | None


def with_memory_settings(function: Callable[..., int]) -> Callable[..., int]:
    """Decorator: every setting that decides memory as an option, in place of the function's `**typed`."""
    own = [
        parameter
        for parameter in inspect.signature(function, eval_str=True).parameters.values()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    options = [_option(setting) for setting in SETTINGS if setting.field in MEMORY_FIELDS]
    parameters = [*own, *options]
    vars(function)["__signature__"] = inspect.Signature(parameters, return_annotation=int)
    function.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return function


def _option(setting: Setting) -> inspect.Parameter:
    is_switch = isinstance(setting.kind, Switch)
    info = typer.Option(
        *setting.flags,
        *(f" /{flag}" for flag in setting.off_flags),
        metavar=None if is_switch else setting.kind.metavar,
        help=setting.about,
        rich_help_panel="Settings to hold the plan to",
        show_default=False,
    )
    kind: Any = bool | None if is_switch else str | None
    return inspect.Parameter(
        setting.field, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, info]
    )


@with_memory_settings
def plan(
    reference: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="A name, a file or its header, ORG/REPO[:QUANT], or an URL."),
    ] = None,
    device: Device = None,
    backend: Backend = "",
    min_ctx: Annotated[
        int, typer.Option("--min-ctx", metavar="N", help="Tokens that each sequence must be able to hold.")
    ] = 0,
    prefer: Annotated[
        str, typer.Option("--prefer", metavar="WHAT", help="balanced, context, speed or quality.")
    ] = "balanced",
    memory: Memory = None,
    gpu_memory: GpuMemory = None,
    fit_target: Annotated[
        str | None,
        typer.Option("--fit-target", metavar="SIZE", help="Leave this much free; a bare number is MiB."),
    ] = None,
    outputs_max: Annotated[
        int | None,
        typer.Option("--outputs-max", metavar="N", help="Rows of logits a step; 0 is llama.cpp's default."),
    ] = None,
    mmproj: Annotated[
        str | None, typer.Option("--mmproj", metavar="FILE", help="Count a vision projector as well.")
    ] = None,
    estimate: Annotated[
        bool, typer.Option("--estimate", help="Closed forms only, without a dry run of llama.cpp.")
    ] = False,
    show_table: Annotated[
        bool, typer.Option("--table", help="Contexts by cache types by layers: what fits, and how fast.")
    ] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="A block to paste.")] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Load it on the processor; show planned beside real bytes.")
    ] = False,
    quants: Annotated[
        bool, typer.Option("--quants", help="Compare the quantizations beside this one.")
    ] = False,
    offline: Offline = False,
    as_json: Json = False,
    **typed: Typed,
) -> int:
    """Say whether a model fits, with which settings it runs best, how fast, and why."""
    from edgeserve.commands import plan as command

    request = command.Request(
        reference, device, backend, min_ctx, prefer, memory, gpu_memory, fit_target, outputs_max, mmproj,
        offline, typed,
    )  # fmt: skip
    form = command.Form(estimate, show_table, markdown, verify, quants, as_json)
    return command.run(request, form)


devices_app = typer.Typer(
    cls=RunByDefault, help="Show the machines that can be planned for; measure this one."
)


@devices_app.command("run", hidden=True)
def devices_run(
    name: Annotated[str | None, typer.Argument(metavar="NAME")] = None, as_json: Json = False
) -> int:
    """The known machines, or one of them."""
    from edgeserve.commands import devices as command

    return command.run(name, as_json=as_json)


@devices_app.command("list")
def devices_list(as_json: Json = False) -> int:
    """Show the machines known by name."""
    from edgeserve.commands import devices as command

    return command.run(None, as_json=as_json)


@devices_app.command("show")
def devices_show(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="A name, a key or a .toml file; none: this machine.")
    ] = None,
    as_json: Json = False,
) -> int:
    """Show one machine: memory that a plan may use, bandwidth, and what was measured."""
    from edgeserve.commands import machine as command

    return command.show(name, as_json=as_json)


@devices_app.command("calibrate")
def devices_calibrate(
    model: Annotated[
        list[str] | None,
        typer.Option("--model", metavar="MODEL", help="Measure with this model; may be given twice."),
    ] = None,
    export: Annotated[
        Path | None, typer.Option("--export", metavar="FILE.toml", help="Write this machine as a profile.")
    ] = None,
    as_json: Json = False,
) -> int:
    """Measure this machine in under a minute, so that expected speeds become narrow."""
    from edgeserve.commands import machine as command

    return command.calibrate(model or [], export, as_json=as_json)


def models_fit(
    device: Device = None,
    backend: Backend = "",
    memory: Memory = None,
    gpu_memory: GpuMemory = None,
    as_json: Json = False,
) -> int:
    """Show which models of the list fit this machine or another, with how much context, and how fast."""
    from edgeserve.commands import models_fit as command

    return command.run(device, backend, memory, gpu_memory, as_json=as_json)


def mount(app: typer.Typer, models_app: typer.Typer) -> None:
    """Put the planner's commands into the command line."""
    app.command("plan", cls=SettingsCommand)(plan)
    app.add_typer(devices_app, name="devices")
    models_app.command("fit")(models_fit)
