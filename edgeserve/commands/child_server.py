"""A server for one benchmark, in a process of its own: a client that shares its threads would measure itself.

Owns the child's start, what it tells (its address, or why it did not start) and its end, which comes with the
parent's, however that ends. `python -m edgeserve.commands.child_server` is the child: it reads what was typed
from standard input, so that it takes its settings from flags, environment and file as `edgeserve serve` does.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TextIO

from edgeserve.errors import EdgeserveError

if TYPE_CHECKING:
    from edgeserve.engine.async_engine import AsyncEngine

_HOST = "127.0.0.1"
_END_S = 10.0


@dataclass(frozen=True, slots=True)
class ServeCommand:
    """What `edgeserve serve` would be told: the model and the flags, as typed."""

    reference: str | None
    typed: Mapping[str, bool | str | list[str] | None]
    config: Path | None = None
    is_verbose: bool = False


class ChildServer:
    """`with ChildServer(command) as server:`, then ask at `server.url` with `server.key`.

    Raises what the start raised in the child, with its exit code.
    """

    def __init__(self, command: ServeCommand) -> None:
        self.key = secrets.token_urlsafe(32)
        self.url = ""
        self.notes: tuple[str, ...] = ()
        self._command = command
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "edgeserve.commands.child_server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if self._command.is_verbose else subprocess.DEVNULL,
            text=True,
            # A Ctrl-C is for the benchmark, which wants to report: it must not reach the server as well.
            start_new_session=True,
        )
        try:
            self._read(self._ask(self._process))
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _ask(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        assert process.stdin is not None
        assert process.stdout is not None
        request = {
            "reference": self._command.reference,
            "typed": dict(self._command.typed),
            "config": str(self._command.config) if self._command.config else None,
            "key": self.key,
        }
        print(json.dumps(request), file=process.stdin, flush=True)
        answer = process.stdout.readline()
        if not answer:
            code = process.wait()
            how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
            raise EdgeserveError(
                f"The server {how} before it was ready.",
                "`edgeserve serve` with the same options shows more.",
            )
        found = json.loads(answer)
        assert isinstance(found, dict)
        return found

    def _read(self, answer: Mapping[str, Any]) -> None:
        if "error" in answer:
            failure = EdgeserveError(answer["error"], answer["hint"])
            failure.exit_code = answer["exit_code"]
            raise failure
        self.url, self.notes = answer["url"], tuple(answer["notes"])

    def _end(self) -> None:
        process = self._process
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


# --- the child ---------------------------------------------------------------------------------------------


def main() -> int:
    """Serve until standard input ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever is printed must not get between
    request = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        _serve(request, answers)
    except EdgeserveError as error:
        failure = {"error": error.message, "hint": error.hint, "exit_code": error.exit_code}
        print(json.dumps(failure), file=answers, flush=True)
        return error.exit_code
    return 0


def _end_with_parent() -> None:
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)


def _serve(request: Mapping[str, Any], answers: TextIO) -> None:
    from edgeserve.commands.engine_start import make_engine
    from edgeserve.commands.given import read_settings
    from edgeserve.commands.model_file import find
    from edgeserve.server.run import run_server
    from edgeserve.settings.values import server_config

    config_file = Path(request["config"]) if request["config"] else None
    settings = read_settings("serve", request["reference"], request["typed"], config_file)
    config = replace(server_config(settings), host=_HOST, port=0, api_keys=(request["key"],))
    notes: list[str] = []

    def load(on_progress: Callable[[float], None]) -> AsyncEngine:
        started = make_engine(settings, find(settings), on_progress)
        notes.extend(started.notes)
        return started.engine

    def tell(url: str) -> None:
        print(json.dumps({"url": url, "notes": notes}), file=answers, flush=True)

    run_server(config, load, on_ready=tell)


if __name__ == "__main__":
    raise SystemExit(main())
