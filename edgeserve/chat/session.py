"""A conversation: what was said, with which settings, and the file it can be kept in.

Owns the order of messages (system, then user and assistant in turn), what becomes of a message that got no
answer, and the session file. Knows nothing of servers or terminals.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeserve.chat.settings import SETTINGS, Value, format_value, parse_setting
from edgeserve.errors import UsageError

FORMAT = "edgeserve-chat"
VERSION = 1
MAX_FILE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Turn:
    """A message and its answer. Reasoning is kept for the reader and never sent back."""

    user: str
    answer: str
    reasoning: str = ""


class Conversation:
    """The turns so far. `unanswered` is the message whose answer failed or was stopped before it began."""

    def __init__(self, system: str = "", settings: Mapping[str, Value] | None = None) -> None:
        self.system = system
        self.settings: dict[str, Value] = dict(settings or {})
        self.turns: list[Turn] = []
        self.unanswered = ""

    def messages(self, text: str) -> list[dict[str, str]]:
        """What to send for the next message `text`."""
        sent = [{"role": "system", "content": self.system}] if self.system else []
        for turn in self.turns:
            sent.append({"role": "user", "content": turn.user})
            sent.append({"role": "assistant", "content": turn.answer})
        return [*sent, {"role": "user", "content": text}]

    def request_params(self) -> dict[str, object]:
        """The settings that belong into a request."""
        sent = {name: value for name, value in self.settings.items() if not SETTINGS[name].is_local}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in sent.items()}

    def add(self, turn: Turn) -> None:
        self.turns.append(turn)
        self.unanswered = ""

    def take_back(self) -> str:
        """The message to send again: the unanswered one, or the last one, whose answer is dropped."""
        if self.unanswered:
            return self.unanswered
        if not self.turns:
            raise UsageError("There is no message to send again.")
        return self.turns.pop().user

    def reset(self) -> None:
        """Forget what was said; the system message and the settings stay."""
        self.turns.clear()
        self.unanswered = ""

    def set(self, name: str, text: str) -> str:
        """Change one setting as typed; `default` takes it out. Returns the setting's own name."""
        name, value = parse_setting(name, text)
        self.settings[name] = value
        return name


# --- the file ----------------------------------------------------------------------------------------------


def save_session(path: Path, conversation: Conversation, model: str) -> None:
    """Write the conversation. Raises UsageError rather than overwrite a file that is not a session."""
    if path.exists():
        try:
            _read_document(path)
        except UsageError as error:
            raise UsageError(
                f"{path} exists and is not a chat session; it was left as it is.", "Choose another name."
            ) from error
    try:
        _write_whole(path, json.dumps(_document(conversation, model), ensure_ascii=False, indent=1) + "\n")
    except OSError as error:
        raise UsageError(f"{path} could not be written: {error.strerror}.") from error


def load_session(path: Path) -> Conversation:
    """Read a session file. Raises UsageError when it is missing or holds something else."""
    document = _read_document(path)
    system, turns, unanswered = _read_messages(path, document.get("messages"))
    conversation = Conversation(system, _read_settings(path, document.get("settings")))
    conversation.turns = turns
    conversation.unanswered = unanswered
    return conversation


def _document(conversation: Conversation, model: str) -> dict[str, Any]:
    messages: list[dict[str, str]] = []
    if conversation.system:
        messages.append({"role": "system", "content": conversation.system})
    for turn in conversation.turns:
        messages.append({"role": "user", "content": turn.user})
        reasoning = {"reasoning_content": turn.reasoning} if turn.reasoning else {}
        messages.append({"role": "assistant", "content": turn.answer, **reasoning})
    if conversation.unanswered:
        messages.append({"role": "user", "content": conversation.unanswered})
    settings = {name: format_value(value) for name, value in conversation.settings.items()}
    return {"format": FORMAT, "version": VERSION, "model": model, "settings": settings, "messages": messages}


def _write_whole(path: Path, text: str) -> None:
    """Through a file beside it, so that a full disk never leaves half a session. mkstemp makes it 0600."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _read_document(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise UsageError(f"{path} is too large to be a chat session.")
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"There is no file {path}.") from None
    except OSError as error:
        raise UsageError(f"{path} could not be read: {error.strerror}.") from error
    except (ValueError, RecursionError):
        raise UsageError(f"{path} is not a chat session.", "/save writes one.") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise UsageError(f"{path} is not a chat session.", "/save writes one.")
    if document.get("version") != VERSION:
        raise UsageError(f"{path} is a session of another version ({document.get('version')}).")
    return document


def _read_messages(path: Path, messages: object) -> tuple[str, list[Turn], str]:
    """(system, turns, unanswered message): user and assistant must take turns."""
    entries = [_read_message(path, entry) for entry in messages] if isinstance(messages, list) else []
    system = entries.pop(0)[1] if entries and entries[0][0] == "system" else ""
    unanswered = entries.pop()[1] if entries and len(entries) % 2 else ""
    if [role for role, _, _ in entries] != ["user", "assistant"] * (len(entries) // 2):
        raise UsageError(f"{path}: user and assistant messages do not take turns.")
    turns = [
        Turn(user[1], answer[1], answer[2]) for user, answer in zip(entries[::2], entries[1::2], strict=True)
    ]
    return system, turns, unanswered


def _read_message(path: Path, entry: object) -> tuple[str, str, str]:
    fields = entry if isinstance(entry, dict) else {}
    role, content = fields.get("role"), fields.get("content")
    reasoning = fields.get("reasoning_content", "")
    if not (isinstance(role, str) and isinstance(content, str) and isinstance(reasoning, str)):
        raise UsageError(f"{path} holds a message without role and text.")
    return role, content, reasoning


def _read_settings(path: Path, settings: object) -> dict[str, Value]:
    if settings is not None and not isinstance(settings, dict):
        raise UsageError(f"{path}: the settings are not a list of names and values.")
    try:
        return dict(parse_setting(str(name), str(text)) for name, text in (settings or {}).items())
    except UsageError as error:
        raise UsageError(f"{path}: {error.message}", error.hint) from error
