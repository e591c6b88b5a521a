"""Options of the command line, made from the table of settings.

Owns how a setting becomes an option in Typer, the help in groups, and what is said to an option that does not
exist. Values stay text here: environment and configuration file are read by the same rules
(sources.py).
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from edgeserve.errors import UsageError
from edgeserve.settings.bench_flags import BenchFlag
from edgeserve.settings.kinds import BadValueError, Choice, Switch, TextList, Value, format_value
from edgeserve.settings.llama_server import ABSENT, ALWAYS_SO
from edgeserve.settings.table import SETTINGS, Command, Setting, Target, settings_of
from edgeserve.settings.values import defaults_of

_ATTACHED_NUMBER = re.compile(r"-[A-Za-z]-?\d+")
_OPTION = re.compile(r"--?[A-Za-z][\w-]*")


def with_settings(
    command: Command, *targets: Target, flags: Sequence[BenchFlag] = ()
) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Decorator: every setting of `command` as an option, in place of the function's `**typed`; before them
    the options of another table, `flags`.

    Typer reads options from a function's signature, so the signature is written from the tables. The function
    gets them as keywords by field name, None for what was not typed. With `targets`, only the settings that
    fill one of these.
    """

    def decorate(function: Callable[..., int]) -> Callable[..., int]:
        defaults = defaults_of(command)
        options = [
            _option(setting, defaults.get(setting.field))
            for setting in settings_of(command)
            if not targets or setting.target in targets
        ]
        _write_signature(function, [*map(_bench_option, flags), *options])
        return function

    return decorate


def with_flags(flags: Sequence[BenchFlag]) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Decorator: the options of one table, in place of the function's `**typed`."""

    def decorate(function: Callable[..., int]) -> Callable[..., int]:
        _write_signature(function, [_bench_option(flag) for flag in flags])
        return function

    return decorate


def _write_signature(function: Callable[..., int], options: Sequence[inspect.Parameter]) -> None:
    own = [
        parameter
        for parameter in inspect.signature(function, eval_str=True).parameters.values()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    parameters = [*own, *options]
    vars(function)["__signature__"] = inspect.Signature(parameters, return_annotation=int)
    function.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}


def _option(setting: Setting, default: Value) -> inspect.Parameter:
    text = format_value(default, setting.kind)
    shown = f" [{text}]" if text else ""
    info = typer.Option(
        *_declarations(setting),
        metavar=None if isinstance(setting.kind, Switch) else setting.kind.metavar,
        help=setting.about + shown,
        rich_help_panel=setting.group,
        show_default=False,
    )
    return inspect.Parameter(
        setting.field,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[_type(setting), info],
    )


def _bench_option(flag: BenchFlag) -> inspect.Parameter:
    info = typer.Option(
        *flag.flags,
        metavar=flag.metavar or None,
        help=flag.about,
        rich_help_panel=flag.group,
        show_default=False,
    )
    kind: Any = bool | None if not flag.metavar else list[str] | None if flag.repeats else str | None
    return inspect.Parameter(
        flag.field, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, info]
    )


def _type(setting: Setting) -> Any:
    if isinstance(setting.kind, Switch):
        return bool | None
    return list[str] | None if isinstance(setting.kind, TextList) else str | None


def _declarations(setting: Setting) -> list[str]:
    """Typer's spelling of flags: those that switch off stand behind a slash."""
    return [*setting.flags, *(f" /{flag}" for flag in setting.off_flags)]


class RunByDefault(TyperGroup):
    """A group that takes what is none of its commands for the arguments of `run`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args if args and args[0] in self.commands else ["run", *args])


class SettingsCommand(TyperCommand):
    """A command with settings: its help comes in their groups, and it knows llama-server's other options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, prepare(args, known_flags(self.params)))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if parameter.param_type_name == "argument":
                groups.setdefault("Arguments", []).append(_argument(parameter))
            elif record is not None:
                groups.setdefault(getattr(parameter, "rich_help_panel", None) or "Options", []).append(record)
        for group, records in groups.items():
            with formatter.section(group):
                formatter.write_dl(records, col_max=34)


def _argument(parameter: Any) -> tuple[str, str]:
    return parameter.metavar or "", parameter.help or ""


@dataclass(frozen=True, slots=True)
class Wants:
    """What follows a flag: nothing, a value, or one of a choice's words, which may be left out."""

    value: bool = False
    choice: Choice | None = None


def known_flags(params: Iterable[Any]) -> dict[str, Wants]:
    """Every flag of a command, read from its parameters."""
    known = {"--help": Wants()}
    for param in params:
        if param.param_type_name == "option":
            wants = Wants(value=not param.is_flag)
            known |= dict.fromkeys((*param.opts, *param.secondary_opts), wants)
    for setting in SETTINGS:
        if isinstance(setting.kind, Choice) and setting.kind.bare:
            known |= {flag: Wants(choice=setting.kind) for flag in setting.flags if flag in known}
    return known


def prepare(args: list[str], known: Mapping[str, Wants]) -> list[str]:
    """The arguments as Typer can read them. Raises UsageError for an option that does not exist.

    Typer would take "-ncmoe 4" for -n with the value "cmoe": flags of several letters behind one dash must be
    whole, except for a number that hangs on a letter.
    """
    prepared: list[str] = []
    rest = deque(args)
    while rest:
        argument = rest.popleft()
        flag, is_joined, _ = argument.partition("=")
        if argument == "--":
            return [*prepared, argument, *rest]
        if flag in ALWAYS_SO and flag not in known:
            continue
        prepared.append(argument)
        wants = known.get(flag, Wants())
        if flag not in known and _OPTION.fullmatch(flag) and not _ATTACHED_NUMBER.fullmatch(argument):
            raise unknown_option(flag, known)
        if wants.value and rest and not is_joined:
            prepared.append(rest.popleft())
        elif wants.choice and not is_joined:
            prepared.append(
                rest.popleft() if rest and _is_word(rest[0], wants.choice) else _bare(wants.choice)
            )
    return prepared


def _is_word(text: str, choice: Choice) -> bool:
    try:
        choice.parse(text)
    except BadValueError:
        return False
    return True


def _bare(choice: Choice) -> str:
    assert choice.bare is not None
    return choice.bare


def unknown_option(flag: str, known: Collection[str]) -> UsageError:
    """Names the option, and says why it is not there or what may have been meant."""
    for absent in ABSENT:
        if flag in absent.flags:
            return UsageError(f"edgeserve has no {flag}.", absent.sentence)
    for setting in SETTINGS:
        if flag in setting.flags + setting.off_flags and flag not in known:
            commands = " or ".join(f"`edgeserve {command}`" for command in setting.commands)
            return UsageError(f"{flag} is an option of {commands}.", "It has no meaning here.")
    near = difflib.get_close_matches(flag, known, n=2, cutoff=0.7)
    hint = f"Did you mean {' or '.join(near)}?" if near else "--help lists them."
    return UsageError(f"There is no option {flag}.", hint)
