from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from edgeserve.chat.commands import COMMANDS, Commands, message_of
from edgeserve.chat.session import Conversation, Turn, load_session, save_session
from edgeserve.chat.settings import SETTINGS, format_value, parse_setting
from edgeserve.errors import UsageError


def conversation() -> Conversation:
    talk = Conversation("Be kind.", {"temperature": 0.25, "stop": ("END", "a\nb"), "plain": True})
    talk.add(Turn("hello", "good day", "they greet"))
    return talk


def commands(talk: Conversation) -> Commands:
    return Commands(talk, "some-model", lambda: ("figures",))


# --- settings ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("temp", "0.5", ("temperature", 0.5)),
        ("max_tokens", "1,000", ("max_tokens", 1000)),
        ("stop", "END \\n\\n", ("stop", ("END", "\n\n"))),
        ("PLAIN", "on", ("plain", True)),
        ("timings-per-token", "off", ("timings_per_token", False)),
    ],
)
def test_settings_are_read_as_typed(name: str, text: str, expected: tuple[str, object]) -> None:
    assert parse_setting(name, text) == expected
    assert parse_setting(name, format_value(parse_setting(name, text)[1])) == expected


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("temperature", "hot", "temperature cannot be 'hot'."),
        ("temperature", "-1", "temperature must be between 0 and 100."),
        ("temperature", "nan", "temperature must be between 0 and 100."),
        ("top_k", "1.5", "top_k cannot be '1.5'."),
        ("plain", "maybe", "plain must be on or off."),
        ("temprature", "1", "There is no setting temprature."),
    ],
)
def test_wrong_settings_are_named(name: str, text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_setting(name, text)
    assert caught.value.message == message
    assert caught.value.hint


def test_settings_of_the_display_are_not_sent() -> None:
    assert conversation().request_params() == {"temperature": 0.25, "stop": ["END", "a\nb"]}


# --- the conversation --------------------------------------------------------------------------------------


def test_messages_in_order_and_reasoning_is_not_sent_back() -> None:
    assert conversation().messages("and now") == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "good day"},
        {"role": "user", "content": "and now"},
    ]


def test_taking_back_prefers_the_message_without_an_answer() -> None:
    talk = conversation()
    talk.unanswered = "again"
    assert talk.take_back() == "again"
    talk.unanswered = ""
    assert talk.take_back() == "hello"
    assert talk.turns == []
    with pytest.raises(UsageError):
        talk.take_back()


# --- the file ----------------------------------------------------------------------------------------------


def test_a_session_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    talk = conversation()
    talk.unanswered = "unheard"
    save_session(path, talk, "some-model")
    loaded = load_session(path)
    assert (loaded.system, loaded.turns, loaded.settings) == (talk.system, talk.turns, talk.settings)
    assert loaded.unanswered == "unheard"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert json.loads(path.read_text())["model"] == "some-model"


def test_a_session_may_be_saved_again(tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    save_session(path, conversation(), "m")
    save_session(path, Conversation(), "m")
    assert load_session(path).turns == []


@pytest.mark.parametrize("content", ["my notes", "{}", "[1]", '{"format": "other"}', "[" * 100_000])
def test_no_other_file_is_overwritten(tmp_path: Path, content: str) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(content)
    with pytest.raises(UsageError, match="left as it is"):
        save_session(path, conversation(), "m")
    assert path.read_text() == content
    assert list(tmp_path.iterdir()) == [path]


def test_where_nothing_can_be_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="could not be written: No such file or directory"):
        save_session(tmp_path / "missing" / "talk.json", conversation(), "m")


def session_file(path: Path, **fields: object) -> Path:
    document = {"format": "edgeserve-chat", "version": 1, "messages": [], "settings": {}, **fields}
    path.write_text(json.dumps(document))
    return path


USER = {"role": "user", "content": "a"}
ASSISTANT = {"role": "assistant", "content": "b"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"version": 2}, "another version"),
        ({"messages": [USER, USER, USER]}, "take turns"),
        ({"messages": [ASSISTANT, USER]}, "take turns"),
        ({"messages": [{"role": "user"}]}, "without role and text"),
        ({"messages": [{"role": "user", "content": [1]}]}, "without role and text"),
        ({"settings": [1]}, "settings"),
        ({"settings": {"temperature": "hot"}}, "temperature cannot be"),
    ],
)
def test_a_damaged_session_is_refused(tmp_path: Path, fields: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_session(session_file(tmp_path / "talk.json", **fields))


def test_a_missing_session_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="There is no file"):
        load_session(tmp_path / "none.json")


# --- commands ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "message"),
    [("hi", "hi"), ("//etc/hosts", "/etc/hosts"), ("/help", None), (" /not", " /not")],
)
def test_what_a_line_sends(line: str, message: str | None) -> None:
    assert message_of(line) == message


def test_help_names_every_command() -> None:
    shown = "\n".join(commands(conversation()).run("/help").lines)
    assert all(f"/{name}" in shown for name in COMMANDS)


@pytest.mark.parametrize(
    ("line", "message", "hint"),
    [
        ("/hlep", "Unknown command /hlep.", "Did you mean /help?"),
        ("/usr/bin", "Unknown command /usr/bin.", "two of them"),
        ("/reset\na pasted text", "/reset takes nothing behind it.", "on its own"),
        ("/save", "/save needs the name of a file.", "/save talk.json"),
        ("/set colour blue", "There is no setting colour.", "/set lists them all."),
    ],
)
def test_commands_that_cannot_be_done(line: str, message: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        commands(conversation()).run(line)
    assert caught.value.message == message
    assert hint in caught.value.hint


def test_set_shows_changes_and_goes_back() -> None:
    talk = Conversation()
    run = commands(talk).run
    assert len(run("/set").lines) == len(SETTINGS) + 2
    assert run("/set top_k").lines == (
        "top_k is the server's default: only the k likeliest tokens; 0 for all.",
    )
    assert run("/set top_k 5").lines == ("top_k is 5.",)
    assert talk.request_params() == {"top_k": 5}
    run("/set top_k default")
    assert talk.settings == {}


def test_system_is_set_over_lines_shown_and_taken_out() -> None:
    talk = conversation()
    run = commands(talk).run
    assert run("/system").lines == ("Be kind.",)
    assert "reads the whole conversation again" in run("/system\nLine 1\nLine 2").lines[0]
    assert talk.system == "Line 1\nLine 2"
    run("/system -")
    assert talk.system == ""


def test_reset_keeps_system_and_settings() -> None:
    talk = conversation()
    commands(talk).run("/reset")
    assert (talk.turns, talk.system, "temperature" in talk.settings) == ([], "Be kind.", True)


def test_load_replaces_what_the_chat_holds(tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    talk = Conversation()
    commands(conversation()).run(f"/save {path}")
    outcome = commands(talk).run(f"/load {path}")
    assert outcome.lines == (f"Loaded 1 answer from {path}.",)
    assert talk.messages("x") == conversation().messages("x")


@pytest.mark.parametrize("line", ["/quit", "/exit", "/QUIT"])
def test_leaving(line: str) -> None:
    assert commands(conversation()).run(line).leaves
