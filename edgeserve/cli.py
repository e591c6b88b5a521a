"""The command line: which command leads where, and how every error ends.

Each command imports what it needs when it runs, so that `--help` and the commands without a model start at
once. Owns exit codes (0 done, 1 failed, 2 usage, others in errors.py, 130 interrupted) and the line that an
error becomes. Does not know how any command does its work.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgeserve import cli_plan
from edgeserve.cli_options import RunByDefault, SettingsCommand, with_flags, with_settings
from edgeserve.errors import EdgeserveError
from edgeserve.settings.bench_flags import BENCH_FLAGS, SIMULATE_FLAGS

if TYPE_CHECKING:
    from edgeserve.settings.sources import Settings

EXIT_FAILED, EXIT_INTERRUPTED = 1, 130

app = typer.Typer(
    help="Run language models on this machine: chat in the terminal, serve an OpenAI-compatible API.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
bench_app = typer.Typer(cls=RunByDefault, help="Measure a server, or compare two results.")
models_app = typer.Typer()
key_app = typer.Typer(help="Make API keys.", no_args_is_help=True)
service_app = typer.Typer(help="Run the server as a service of this system.", no_args_is_help=True)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="Read this file instead of the user's own.")
]
PrintConfig = Annotated[
    bool, typer.Option("--print-config", help="Show every setting and where it comes from, then leave.")
]
Model = Annotated[str | None, typer.Argument(metavar="MODEL", help="A name, a file, or ORG/REPO[:QUANT].")]
Typed = bool | str | list[str] | None


def _show_version(wanted: bool) -> None:
    if wanted:
        from edgeserve.commands.version import version_lines

        print("\n".join(version_lines()))
        raise typer.Exit


@app.callback()
def top(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show versions.")
    ] = False,
) -> None:
    """Options of edgeserve itself."""


@app.command(cls=SettingsCommand)
@with_settings("chat")
def chat(
    reference: Model = None,
    prompt: Annotated[
        str | None,
        typer.Option("-p", "--prompt", metavar="TEXT", help="Answer this and leave; - reads standard input."),
    ] = None,
    config: ConfigFile = None,
    print_config: PrintConfig = False,
    as_json: Json = False,
    **typed: Typed,
) -> int:
    """Talk to a model in the terminal, or answer one message."""
    from edgeserve.commands import chat as command
    from edgeserve.commands.given import read_settings

    settings = read_settings("chat", reference, typed, config)
    return _print_config(settings, as_json) if print_config else command.run(settings, prompt)


@app.command(cls=SettingsCommand)
@with_settings("serve")
def serve(
    reference: Model = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Listen beyond this machine without a key.")
    ] = False,
    config: ConfigFile = None,
    print_config: PrintConfig = False,
    as_json: Json = False,
    **typed: Typed,
) -> int:
    """Serve a model over HTTP, with the API of OpenAI and llama-server."""
    from edgeserve.commands import serve as command
    from edgeserve.commands.given import read_settings

    settings = read_settings("serve", reference, typed, config)
    return _print_config(settings, as_json) if print_config else command.run(settings, is_insecure=insecure)


def _print_config(settings: Settings, as_json: bool) -> int:
    from edgeserve.commands.given import config_lines

    print("\n".join(config_lines(settings, as_json=as_json)))
    return 0


@app.command(cls=SettingsCommand)
@with_settings("serve", "run", "engine")
def tune(reference: Model = None, config: ConfigFile = None, as_json: Json = False, **typed: Typed) -> int:
    """Measure which settings are fastest for a model on this machine, and keep them for later starts."""
    from edgeserve.commands import tune as command
    from edgeserve.commands.given import read_settings

    return command.run(read_settings("serve", reference, typed, config), as_json=as_json)


@app.command()
def doctor(
    reference: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Decode a token with it; it must be here already.")
    ] = None,
    url: Annotated[
        str | None, typer.Option("--url", metavar="URL", help="Examine the server that runs there instead.")
    ] = None,
    api_key: Annotated[str | None, typer.Option("--api-key", metavar="KEY", help="Key for --url.")] = None,
    window_s: Annotated[float, typer.Option("--window", metavar="S", help="Seconds to watch it.")] = 10.0,
    bench: Annotated[
        Path | None,
        typer.Option("--bench", metavar="FILE", help="Examine a benchmark's summary.json instead."),
    ] = None,
    as_json: Json = False,
) -> int:
    """Say what this machine can do, or why a server is slow, and what to change."""
    from edgeserve.commands import doctor as command

    if url or bench:
        return command.run_diagnosis(reference, url, api_key, window_s, bench, as_json=as_json)
    return command.run(reference, as_json=as_json)


@app.command()
def tui(
    url: Annotated[
        str | None,
        typer.Option("--url", metavar="URL", help="The server to look at [http://127.0.0.1:8080]."),
    ] = None,
    api_key: Annotated[str | None, typer.Option("--api-key", metavar="KEY", help="Its key.")] = None,
    no_mouse: Annotated[bool, typer.Option("--no-mouse", help="Leave the mouse to the terminal.")] = False,
    screen: Annotated[
        str, typer.Option("--screen", metavar="NAME", help="The first screen, or the one to write.")
    ] = "monitor",
    theme: Annotated[str, typer.Option("--theme", metavar="NAME", help="dark, light or contrast.")] = "dark",
    screenshot: Annotated[
        Path | None, typer.Option("--screenshot", metavar="FILE", help="Write the screen as SVG, and leave.")
    ] = None,
    size: Annotated[
        str, typer.Option("--size", metavar="COLUMNSxROWS", help="Size of the screenshot.")
    ] = "100x30",
    wait_s: Annotated[
        float, typer.Option("--wait", metavar="S", help="Watch this long before the screenshot.")
    ] = 3.0,
) -> int:
    """Watch a server: requests, speeds, memory; chat and measure."""
    from edgeserve.commands import tui as command

    picture = (screenshot, size, wait_s) if screenshot is not None else None
    return command.run(url, api_key, no_mouse=no_mouse, screen=screen, theme=theme, picture=picture)


@bench_app.command("run", cls=SettingsCommand)
@with_settings("serve", "run", "engine", flags=BENCH_FLAGS)
def bench_run(
    reference: Model = None, config: ConfigFile = None, as_json: Json = False, **typed: Typed
) -> int:
    """Measure any OpenAI-compatible server, or one that is started for the run with the options of `serve`.

    `edgeserve bench compare A.json B.json` puts two results side by side.
    """
    from edgeserve.commands import bench as command

    return command.run(reference, typed, config, as_json=as_json)


@bench_app.command("compare")
def bench_compare(
    first: Annotated[Path, typer.Argument(metavar="A.json")],
    second: Annotated[Path, typer.Argument(metavar="B.json")],
    as_json: Json = False,
) -> int:
    """Ratios of two results, and which of them stand out from the noise."""
    from edgeserve.commands import bench as command

    return command.run_compare(first, second, as_json=as_json)


@app.command(cls=SettingsCommand)
@with_flags(SIMULATE_FLAGS)
def simulate(reference: Model = None, as_json: Json = False, **typed: Typed) -> int:
    """What a machine would do with N users: the real scheduler over a formula for the cost of a step."""
    from edgeserve.commands import simulate as command

    return command.run(reference, typed, as_json=as_json)


app.add_typer(bench_app, name="bench")
app.add_typer(models_app, name="models")
cli_plan.mount(app, models_app)
app.add_typer(key_app, name="key")
app.add_typer(service_app, name="service")


@models_app.callback(invoke_without_command=True)
def models(context: typer.Context) -> int:
    """List, download and remove models."""
    return models_list() if context.invoked_subcommand is None else 0


@models_app.command("list")
def models_list(
    local: Annotated[bool, typer.Option("--local", help="Only what is on this machine.")] = False,
    as_json: Json = False,
) -> int:
    """Show the models known by name, and those found on this machine."""
    from edgeserve.commands import models as command

    return command.show_list(only_local=local, as_json=as_json)


@models_app.command("pull")
def models_pull(name: Annotated[str, typer.Argument(metavar="MODEL")]) -> int:
    """Download a model and check it; prints where it is."""
    from edgeserve.commands import models as command

    return command.pull(name)


@models_app.command("path")
def models_path(name: Annotated[str, typer.Argument(metavar="MODEL")]) -> int:
    """Print the file of a model that is on this machine."""
    from edgeserve.commands import models as command

    return command.show_path(name)


@models_app.command("rm")
def models_rm(name: Annotated[str, typer.Argument(metavar="MODEL")]) -> int:
    """Remove a model that was downloaded."""
    from edgeserve.commands import models as command

    return command.remove(name)


@key_app.command("new")
def key_new(
    file: Annotated[
        Path | None, typer.Option("--file", metavar="FILE", help="Write it there, readable only by you.")
    ] = None,
) -> int:
    """Make a random API key; prints it, or the file that holds it."""
    from edgeserve.commands import keys as command

    return command.new(file)


@service_app.command("print")
def service_print(
    system: Annotated[str, typer.Argument(metavar="systemd|launchd")],
    reference: Annotated[str | None, typer.Argument(metavar="MODEL")] = None,
) -> int:
    """Print a service definition that starts the server at login."""
    from edgeserve.commands import service as command

    return command.show(system, reference)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit code. No error that a user can meet ends in a traceback."""
    try:
        code = _run(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has seen enough. Python flushes standard output once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    return code


def _run(arguments: list[str]) -> int:
    command = typer.main.get_command(app)
    try:
        result = command.main(arguments, prog_name="edgeserve", standalone_mode=False)
    except EdgeserveError as error:
        return _fail(error.message, error.hint, error.exit_code)
    except typer.TyperException as error:
        message = error.format_message().strip()
        if message.startswith("Usage:"):
            # What Typer raises for a group without a command is the help itself.
            print(message, file=sys.stderr)
            return error.exit_code
        return _fail(message, "--help shows what is possible.", error.exit_code)
    return int(result or 0)


def _fail(message: str, hint: str, exit_code: int) -> int:
    from edgeserve.ink import ink_for, printable

    ink = ink_for(sys.stderr, os.environ)
    print(f"{ink('error:', 'stalled')} {printable(message)}", file=sys.stderr)
    if hint:
        print(f"  {printable(hint)}", file=sys.stderr)
    return exit_code
