"""The line at the bottom of the chat: an editor over several lines, with history and completion.

Owns the keys, pasted text, the history file, and the terminal's quiet while an answer streams. Knows nothing
of conversations or servers.

A paste is one message. With bracketed paste the terminal says what was pasted; without, lines that arrive
faster than anybody types belong together, and only an Enter that stays the last key sends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.buffer import Buffer
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.input import create_input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.output import Output, create_output
from prompt_toolkit.output.vt100 import Vt100_Output
from prompt_toolkit.styles import Style

from edgeserve.folders import state_dir

# Nobody presses Enter this soon after another key; a paste or a program does.
BURST_S = 0.02
# A burst that has been silent for so long is over.
QUIET_S = 0.1
HISTORY_NAME = "chat_history"

_STYLE = Style.from_dict({"mark": "bold", "placeholder": "#888888"})


class Editor:
    """Reads one message at a time from the terminal."""

    def __init__(self, completer: Completer, history: History) -> None:
        self._last_change_s = 0.0
        self._session: PromptSession[str] = PromptSession(
            message=FormattedText([("class:mark", "> ")]),
            input=create_input(),
            output=_terminal_output(),
            multiline=True,
            prompt_continuation="",
            key_bindings=self._keys(),
            completer=completer,
            complete_while_typing=True,
            reserve_space_for_menu=5,
            history=history,
            enable_open_in_editor=True,
            enable_suspend=True,
            style=_STYLE,
        )
        self._session.default_buffer.on_text_changed += self._note_change

    async def read(self, placeholder: str = "") -> str:
        """The next message. Raises EOFError for Ctrl-D and KeyboardInterrupt for Ctrl-C on an empty line."""
        return await self._session.prompt_async(
            placeholder=FormattedText([("class:placeholder", placeholder)])
        )

    def _note_change(self, _: Buffer) -> None:
        self._last_change_s = time.monotonic()

    def _keys(self) -> KeyBindings:
        keys = KeyBindings()
        keys.add("enter")(self._enter)
        keys.add("escape", "enter")(_insert_newline)
        keys.add("c-c")(_clear_or_leave)
        keys.add(Keys.Any)(_insert_all_that_came)
        return keys

    def _enter(self, event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.newline(copy_margin=False)
        elif self._is_in_burst(event):
            buffer.newline(copy_margin=False)
            event.app.create_background_task(self._send_unless_more_comes(event))
        else:
            buffer.validate_and_handle()

    def _is_in_burst(self, event: KeyPressEvent) -> bool:
        return bool(event.key_processor.input_queue) or time.monotonic() - self._last_change_s < BURST_S

    async def _send_unless_more_comes(self, event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        before = buffer.document
        await asyncio.sleep(QUIET_S)
        if buffer.document == before and not event.key_processor.input_queue:
            buffer.delete_before_cursor()
            buffer.validate_and_handle()


def _terminal_output() -> Output:
    """Where the person looks, even if standard output is a file."""
    output = create_output(always_prefer_tty=True)
    if isinstance(output, Vt100_Output):
        # Asking for the cursor's position costs a second where no answer comes, and an answer that comes
        # late reads as typed text. It is only needed for toolbars.
        output.enable_cpr = False
    return output


def _insert_newline(event: KeyPressEvent) -> None:
    event.current_buffer.newline(copy_margin=False)


def _insert_all_that_came(event: KeyPressEvent) -> None:
    """Insert a whole burst at once: one by one, each character of a long paste costs a pass over the text."""
    text = event.data
    waiting = event.key_processor.input_queue
    while waiting and not isinstance(waiting[0].key, Keys):
        text += waiting.popleft().data
    event.current_buffer.insert_text(text * event.arg)


def _clear_or_leave(event: KeyPressEvent) -> None:
    if event.current_buffer.text:
        event.current_buffer.reset()
    else:
        event.app.exit(exception=KeyboardInterrupt())


class CommandCompleter(Completer):
    """Completes `/name`, then the command's own argument: a setting's name or a file."""

    def __init__(self, commands: Sequence[tuple[str, str]], settings: Sequence[tuple[str, str]]) -> None:
        """Both hold (name, what it does)."""
        self._commands = commands
        self._settings = settings
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        line = document.text_before_cursor
        if not line.startswith("/") or line.startswith("//") or "\n" in line:
            return
        name, space, argument = line[1:].partition(" ")
        if not space:
            yield from _matching(self._commands, name)
        elif name == "set" and " " not in argument:
            yield from _matching(self._settings, argument)
        elif name in ("save", "load"):
            below = Document(argument, len(argument))
            yield from self._paths.get_completions(below, complete_event)


def _matching(entries: Sequence[tuple[str, str]], start: str) -> Iterator[Completion]:
    for name, about in entries:
        if name.startswith(start.lower()):
            yield Completion(name, start_position=-len(start), display_meta=about)


def open_history(path: Path | None = None) -> History:
    """The history file, readable by its owner only; kept in memory where no file can be written."""
    path = path or state_dir() / HISTORY_NAME
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600))
        path.chmod(0o600)
    except OSError:
        return InMemoryHistory()
    return FileHistory(path)


@contextlib.contextmanager
def quiet_terminal() -> Iterator[None]:
    """What is typed while no prompt is open is kept for the next one, and not echoed into an answer.

    For the whole chat rather than for each answer: in between, the terminal's own line editing would swallow
    Ctrl-D. Ctrl-C still raises its signal. Does nothing where there is no POSIX terminal.
    """
    if sys.platform == "win32" or not sys.stdin.isatty():
        yield
        return
    import termios

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    quiet = termios.tcgetattr(descriptor)
    quiet[0] &= ~termios.ICRNL  # keep Enter as the key that the editor will read
    quiet[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(descriptor, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSANOW, before)
