"""`edgeserve chat`: a conversation or one answer, with a model of this machine or a server that runs already.

Owns the start: which server is asked, and what is said meanwhile, all on standard error. The conversation
itself is terminal_chat's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

from edgeserve.errors import UsageError
from edgeserve.ink import can_redraw, ink_for
from edgeserve.settings.sources import Settings
from edgeserve.settings.values import sampling_options, server_config

if TYPE_CHECKING:
    from edgeserve.chat.terminal_chat import ChatOptions
    from edgeserve.commands.first_tune import FirstTune
    from edgeserve.commands.local_server import LocalServer
    from edgeserve.engine.async_engine import AsyncEngine

_ERASE_LINE = "\r\x1b[K"


def run(settings: Settings, prompt: str | None) -> int:
    """The exit code. Raises what finding, loading or asking raises."""
    message = _message(prompt)
    if message is not None and not message.strip():
        # Nothing to answer: no model is loaded to find that out.
        return talk("", None, chat_options(settings, None), message)
    if settings.text("url"):
        return _with_running_server(settings, message)
    return _with_own_server(settings, message)


def _message(prompt: str | None) -> str | None:
    """The one message to answer; None when a person sits there for a conversation."""
    if prompt is None and sys.stdin.isatty():
        return None
    if prompt is not None and prompt != "-":
        return prompt
    # Not at the top: the import takes a good part of the time in which a model loads.
    from edgeserve.chat.terminal_chat import message_given

    return message_given(prompt)


def _with_running_server(settings: Settings, message: str | None) -> int:
    if misplaced := settings.typed_of("engine", "server"):
        names = ", ".join(setting.spelling for setting in misplaced)
        raise UsageError(f"{names}: not possible for a server that runs already.", "Leave it out, or --url.")
    options = chat_options(settings, settings.text("model") or None)
    return talk(settings.text("url"), settings.text("api_key") or None, options, message)


def _with_own_server(settings: Settings, message: str | None) -> int:
    from edgeserve.commands.model_file import find

    path = find(settings)
    from edgeserve.commands.local_server import LocalServer

    # A conversation goes on for a while; one answer would be over before a measurement had paid.
    first_tune = None
    if message is None:
        from edgeserve.commands.first_tune import FirstTune

        first_tune = FirstTune()

    def load(on_progress: Callable[[float], None]) -> AsyncEngine:
        # Imported on this thread: the rest of the start goes on while the library and the model load.
        from edgeserve.commands.engine_start import make_engine

        started = make_engine(settings, path, on_progress, first_tune)
        for note in started.notes:
            print(note, file=sys.stderr)
        return started.engine

    with LocalServer(server_config(settings), load) as server:
        options = replace(chat_options(settings, None), shows_address=False)
        with closing(LoadingLine(path.stem)) as line:
            _wait(server, line, first_tune)
        return talk(server.url, server.key, options, message)


def _wait(server: LocalServer, line: LoadingLine, first_tune: FirstTune | None) -> None:
    """Until the model answers. The first Ctrl-C during a measurement only ends that."""
    try:
        server.wait(line)
    except KeyboardInterrupt:
        if first_tune is None or not first_tune.skip():
            raise
        server.wait(line)


def chat_options(settings: Settings, model: str | None) -> ChatOptions:
    """How to ask and to show; `model` None takes the server's only one."""
    from edgeserve.chat.terminal_chat import ChatOptions

    max_tokens = settings["max_tokens"]
    return ChatOptions(
        model=model,
        system=settings.text("system"),
        max_tokens=max_tokens if isinstance(max_tokens, int) else None,
        settings=sampling_options(settings),
        plain=settings["plain"] is True,
        timings_per_token=settings["timings_per_token"] is True,
    )


def talk(url: str, key: str | None, options: ChatOptions, message: str | None) -> int:
    """Answer one message, or hold a conversation."""
    from edgeserve.chat import terminal_chat

    if message is not None:
        return terminal_chat.run_once(url, key, options, message)
    return terminal_chat.run_chat(url, key, options)


class LoadingLine:
    """A line on a terminal that says how much of the model is loaded, and disappears."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._redraws = can_redraw(sys.stderr, os.environ)
        self._ink = ink_for(sys.stderr, os.environ)

    def __call__(self, part: float) -> None:
        if self._redraws:
            text = self._ink(f"  loading {self._name}  {part:.0%}".replace("%", " %"), "dim")
            print(f"{_ERASE_LINE}{text}", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._redraws:
            print(_ERASE_LINE, end="", file=sys.stderr, flush=True)
