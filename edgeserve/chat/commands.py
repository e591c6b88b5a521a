"""What a line that begins with a slash does in the chat.

Owns the commands' names, their words, and what they change in a conversation. Each answers with lines to
show; none of them prints, waits or talks to a server.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from edgeserve.chat.session import Conversation, load_session, save_session
from edgeserve.chat.settings import SETTINGS, canonical_name, format_value
from edgeserve.errors import UsageError


@dataclass(frozen=True, slots=True)
class Outcome:
    """Lines to show, a message to send next, or the end of the chat."""

    lines: tuple[str, ...] = ()
    message: str = ""
    leaves: bool = False


@dataclass(frozen=True, slots=True)
class Command:
    run: Callable[[Commands, str], Outcome]
    argument: str
    about: str


ALIASES = {"?": "help", "exit": "quit", "bye": "quit", "clear": "reset"}


class Commands:
    """The commands over one conversation. `stats` gives the lines of /stats."""

    def __init__(self, conversation: Conversation, model: str, stats: Callable[[], tuple[str, ...]]) -> None:
        self.conversation = conversation
        self._model = model
        self._stats = stats

    def run(self, line: str) -> Outcome:
        """Run one line such as `/set temperature 0.2`. Raises UsageError for what cannot be done."""
        name, *rest = re.split(r"\s", line[1:], maxsplit=1)
        argument = "".join(rest).strip()
        command = find_command(name)
        if argument and not command.argument:
            # Text behind such a command was probably meant as a message, and would be lost.
            raise UsageError(f"/{name} takes nothing behind it.", "Send the message on its own.")
        return command.run(self, argument)

    def help(self, _: str) -> Outcome:
        width = max(len(usage(name)) for name in COMMANDS)
        lines = [f"{usage(name):{width}}   {command.about}" for name, command in COMMANDS.items()]
        keys = (
            "Enter sends; Alt-Enter, or a backslash at the end of a line, begins another line.",
            "Ctrl-C stops an answer; Ctrl-D on an empty line leaves.",
            "A message that begins with a slash: write two slashes.",
        )
        return Outcome((*lines, "", *keys))

    def reset(self, _: str) -> Outcome:
        self.conversation.reset()
        return Outcome(("The conversation begins anew.",))

    def system(self, text: str) -> Outcome:
        conversation = self.conversation
        if not text:
            return Outcome((conversation.system or "There is no system message.",))
        conversation.system = "" if text == "-" else text
        said = "The system message is gone." if text == "-" else "The system message is set."
        # It stands before everything else, so nothing that the server has resident can be reused.
        cost = "  The next answer reads the whole conversation again." if conversation.turns else ""
        return Outcome((said + cost,))

    def save(self, name: str) -> Outcome:
        path = _path(name, "/save")
        save_session(path, self.conversation, self._model)
        return Outcome((f"Saved {_count(len(self.conversation.turns), 'answer')} to {path}.",))

    def load(self, name: str) -> Outcome:
        path = _path(name, "/load")
        loaded = load_session(path)
        conversation = self.conversation
        conversation.system, conversation.turns = loaded.system, loaded.turns
        conversation.settings, conversation.unanswered = loaded.settings, loaded.unanswered
        return Outcome((f"Loaded {_count(len(loaded.turns), 'answer')} from {path}.",))

    def retry(self, _: str) -> Outcome:
        return Outcome(message=self.conversation.take_back())

    def set(self, text: str) -> Outcome:
        name, _, value = text.partition(" ")
        settings = self.conversation.settings
        if not name:
            return Outcome(_settings_lines(self.conversation))
        name = canonical_name(name)
        if not value.strip():
            shown = format_value(settings[name]) if name in settings else "the server's default"
            return Outcome((f"{name} is {shown}: {SETTINGS[name].about}.",))
        if value.strip() == "default":
            settings.pop(name, None)
            return Outcome((f"{name} is the server's default again.",))
        self.conversation.set(name, value.strip())
        return Outcome((f"{name} is {format_value(settings[name])}.",))

    def stats(self, _: str) -> Outcome:
        return Outcome(self._stats())

    def quit(self, _: str) -> Outcome:
        return Outcome(leaves=True)


COMMANDS: Mapping[str, Command] = {
    "help": Command(Commands.help, "", "this list"),
    "reset": Command(Commands.reset, "", "forget the conversation; system message and settings stay"),
    "system": Command(Commands.system, "TEXT", "set the system message; - takes it out, nothing shows it"),
    "save": Command(Commands.save, "FILE", "keep the conversation in a file"),
    "load": Command(Commands.load, "FILE", "go on with a kept conversation"),
    "retry": Command(Commands.retry, "", "send the last message again"),
    "set": Command(Commands.set, "NAME VALUE", "change a setting; without a name lists them"),
    "stats": Command(Commands.stats, "", "figures of this chat"),
    "quit": Command(Commands.quit, "", "leave"),
}


def usage(name: str) -> str:
    """A command as one writes it: `/set NAME VALUE`."""
    return f"/{name} {COMMANDS[name].argument}".rstrip()


def find_command(name: str) -> Command:
    """The command of that name. Raises UsageError, with the nearest one, when there is none."""
    name = ALIASES.get(name.lower(), name.lower())
    if name in COMMANDS:
        return COMMANDS[name]
    near = difflib.get_close_matches(name, COMMANDS, n=1)
    guess = f"Did you mean /{near[0]}?" if near else "/help lists them all."
    raise UsageError(
        f"Unknown command /{name}.", f"{guess} A message that begins with a slash needs two of them."
    )


def message_of(line: str) -> str | None:
    """The message that a line sends, or None when it is a command. `//x` sends `/x`."""
    if line.startswith("//"):
        return line[1:]
    return None if line.startswith("/") else line


def _path(name: str, command: str) -> Path:
    if not name:
        raise UsageError(f"{command} needs the name of a file.", f"{command} talk.json")
    return Path(name).expanduser()


def _settings_lines(conversation: Conversation) -> tuple[str, ...]:
    settings = conversation.settings
    width = max(map(len, SETTINGS))
    shown = {name: format_value(settings[name]) if name in settings else "-" for name in SETTINGS}
    values = max(map(len, shown.values()))
    lines = [
        f"{name:{width}}   {shown[name]:{values}}   {setting.about}" for name, setting in SETTINGS.items()
    ]
    return (*lines, "", "- is the server's default; `/set NAME default` goes back to it.")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
