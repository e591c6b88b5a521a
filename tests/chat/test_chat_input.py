from __future__ import annotations

import stat
from pathlib import Path

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, InMemoryHistory

from edgeserve.chat.input import CommandCompleter, open_history

COMPLETER = CommandCompleter(
    [("save", ""), ("set", ""), ("system", ""), ("quit", "")], [("temperature", ""), ("top_k", "")]
)


def completions(line: str) -> list[str]:
    found = COMPLETER.get_completions(Document(line, len(line)), CompleteEvent())
    return [completion.text for completion in found]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("/", ["save", "set", "system", "quit"]),
        ("/s", ["save", "set", "system"]),
        ("/set ", ["temperature", "top_k"]),
        ("/set te", ["temperature"]),
        ("/set temperature 0", []),
        ("//s", []),
        ("hello /s", []),
        ("/s\n", []),
        ("", []),
    ],
)
def test_commands_and_their_arguments_are_completed(line: str, expected: list[str]) -> None:
    assert completions(line) == expected


def test_file_names_are_completed(tmp_path: Path) -> None:
    (tmp_path / "talk.json").touch()
    assert completions(f"/save {tmp_path}/ta") == ["lk.json"]


def test_history_is_the_owners_alone_even_if_it_was_open(tmp_path: Path) -> None:
    path = tmp_path / "state" / "history"
    path.parent.mkdir()
    path.touch(mode=0o644)
    history = open_history(path)
    history.append_string("secret")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "secret" in path.read_text()
    assert isinstance(open_history(path), FileHistory)


def test_without_a_place_for_the_file_history_stays_in_memory(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    assert isinstance(open_history(blocked / "history"), InMemoryHistory)
