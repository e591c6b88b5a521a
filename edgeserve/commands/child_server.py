"""A server for one benchmark, in a process of its own: a client that shares its threads would measure itself.

Owns what is asked of the child and what it tells. `python -m edgeserve.commands.child_server` is the child:
it is told what was typed, so that it takes its settings from flags, environment and file as `edgeserve
serve` does.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from edgeserve.commands.child import Child, answer_parent
from edgeserve.errors import EdgeserveError

if TYPE_CHECKING:
    from edgeserve.engine.async_engine import AsyncEngine
    from edgeserve.settings.sources import Settings

_HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class ServeCommand:
    """What `edgeserve serve` would be told: the model and the flags, as typed."""

    reference: str | None
    typed: Mapping[str, bool | str | list[str] | None]
    config: Path | None = None
    is_verbose: bool = False

    def request(self, **more: Any) -> dict[str, Any]:
        config = str(self.config) if self.config else None
        return {"reference": self.reference, "typed": dict(self.typed), "config": config, **more}


def settings_of(request: Mapping[str, Any]) -> Settings:
    """The child's settings, from what `ServeCommand.request` made."""
    from edgeserve.commands.given import read_settings

    config = Path(request["config"]) if request["config"] else None
    return read_settings("serve", request["reference"], request["typed"], config)


class ChildServer:
    """`with ChildServer(command) as server:`, then ask at `server.url` with `server.key`.

    Raises what the start raised in the child, with its exit code.
    """

    def __init__(self, command: ServeCommand) -> None:
        self.key = secrets.token_urlsafe(32)
        self.url = ""
        self.notes: tuple[str, ...] = ()
        request = command.request(key=self.key)
        self._child = Child("edgeserve.commands.child_server", request, is_verbose=command.is_verbose)

    def __enter__(self) -> Self:
        self._child.__enter__()
        try:
            self._wait()
        except BaseException:
            self._child.__exit__(None, None, None)
            raise
        return self

    def _wait(self) -> None:
        answer = next(self._child.answers(), None)
        if answer is None:
            raise EdgeserveError("The server ended before it was ready.", "-v shows what it says.")
        self.url, self.notes = answer["url"], tuple(answer["notes"])

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._child.__exit__(kind, error, trace)


def serve(request: Mapping[str, Any], tell: Callable[[Mapping[str, Any]], None]) -> None:
    """The child's work: serve until a signal."""
    from edgeserve.commands.engine_start import make_engine
    from edgeserve.commands.model_file import find
    from edgeserve.server.run import run_server
    from edgeserve.settings.values import server_config

    settings = settings_of(request)
    config = replace(server_config(settings), host=_HOST, port=0, api_keys=(request["key"],))
    notes: list[str] = []

    def load(on_progress: Callable[[float], None]) -> AsyncEngine:
        started = make_engine(settings, find(settings), on_progress)
        notes.extend(started.notes)
        return started.engine

    run_server(config, load, on_ready=lambda url: tell({"url": url, "notes": notes}))


if __name__ == "__main__":
    raise SystemExit(answer_parent(serve))
