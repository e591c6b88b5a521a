"""Where chats are kept: a file each in the user's data directory, named by its time and first words.

Owns names, the list, and the export to Markdown. The format of a session is chat/session.py's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from edgeserve.chat.session import Conversation, load_session, save_session
from edgeserve.errors import UsageError
from edgeserve.folders import data_dir

_MAX_LISTED = 200


@dataclass(frozen=True, slots=True)
class SavedChat:
    path: Path
    saved: datetime

    @property
    def title(self) -> str:
        """The first words, as they stand in the file's name."""
        return re.sub(r"^\d{8}-\d{6}-?", "", self.path.stem).replace("-", " ") or "chat"


class ChatStore:
    """Chats in `directory`; by default the user's own data directory."""

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = directory or data_dir() / "chats"

    def new_path(self, first_message: str) -> Path:
        """A name that sorts by time and says what the chat is about."""
        words = re.findall(r"\w+", first_message.lower())[:6]
        slug = "-".join(words)[:48]
        return self.directory / f"{datetime.now():%Y%m%d-%H%M%S}{'-' if slug else ''}{slug}.json"

    def save(self, path: Path, conversation: Conversation, model: str) -> None:
        """Raises UsageError when it cannot be written."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{path.parent} cannot be made: {error.strerror}.") from error
        save_session(path, conversation, model)

    def load(self, path: Path) -> Conversation:
        """Raises UsageError when it is no session."""
        return load_session(path)

    def saved(self) -> list[SavedChat]:
        """The newest first."""
        try:
            found = [(path.stat().st_mtime, path) for path in self.directory.glob("*.json")]
        except OSError:
            return []
        newest = sorted(found, reverse=True)[:_MAX_LISTED]
        return [SavedChat(path, datetime.fromtimestamp(modified_s)) for modified_s, path in newest]

    def export(self, path: Path, conversation: Conversation, model: str) -> Path:
        """The chat as Markdown beside its session; returns the file. Raises UsageError."""
        target = path.with_suffix(".md")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(as_markdown(conversation, model), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{target} could not be written: {error.strerror}.") from error
        return target


def as_markdown(conversation: Conversation, model: str) -> str:
    """A whole chat for reading elsewhere."""
    parts = [f"# Chat with {model or 'a model'}"]
    if conversation.system:
        parts.append(f"*System prompt:* {conversation.system}")
    for turn in conversation.turns:
        quoted = "\n".join(f"> {line}" for line in turn.user.splitlines())
        parts += [quoted, turn.answer]
    return "\n\n".join(parts) + "\n"
