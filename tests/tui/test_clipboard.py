"""Copying: what leaves for the terminal is the text itself, and an obstacle that is known is named."""

from __future__ import annotations

import base64
import re

import pytest
from screen_text import press, until, until_shown
from textual.widgets import Input

from edgeserve.chat.session import Turn
from tui.app import EdgeserveApp
from tui.bench_runs import command_of as bench_command
from tui.clipboard import obstacle_in
from tui.feed import Feed
from tui.plan_texts import command_of


@pytest.fixture(autouse=True)
def able_terminal(monkeypatch):
    """One that nothing is known against, whatever the tests themselves run in."""
    for name in ("TMUX", "STY", "TERM_PROGRAM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr("tui.plan_screen.PROVE_AFTER_S", 1000.0)


def written_to(app, monkeypatch):
    """What the application has its terminal told, from now on."""
    written = []
    monkeypatch.setattr(app._driver, "write", written.append)
    return written


def clipboards(written):
    """The texts of all OSC 52 sequences."""
    found = re.findall("\x1b\\]52;c;([A-Za-z0-9+/=]*)\x07", "".join(written))
    return [base64.b64decode(text).decode() for text in found]


async def test_the_command_of_a_plan_reaches_the_terminal(monkeypatch, model_path):
    app = EdgeserveApp(Feed("127.0.0.1:9"), mode="plan")
    async with app.run_test(size=(100, 30), notifications=True) as pilot:
        await until(pilot, lambda: bool(app.screen.query("#prefer")), "for the form")
        screen = app.screen
        written = written_to(app, monkeypatch)
        screen.query_one("#model", Input).value = "nothing-like-it"
        await until_shown(pilot, "No model answers to")
        await press(pilot, "ctrl+y")
        await until_shown(pilot, "There is no plan to copy.")
        assert clipboards(written) == []
        screen.query_one("#model", Input).value = str(model_path)
        await until(pilot, lambda: screen.plan is not None, "for a plan")
        await press(pilot, "ctrl+y")
        await until_shown(pilot, "The command is in the clipboard")
        command = command_of(screen.plan, str(model_path))
        assert command.startswith("edgeserve serve ")
        assert clipboards(written) == [command]
        assert app.clipboard == command


async def test_the_last_answer_of_a_chat_reaches_the_terminal_whole(monkeypatch):
    app = EdgeserveApp(Feed("127.0.0.1:9"), mode="chat")
    async with app.run_test(size=(100, 30), notifications=True) as pilot:
        await until(pilot, lambda: app.current_mode == "chat" and bool(app.screen.query("#top")), "for it")
        written = written_to(app, monkeypatch)
        await press(pilot, "ctrl+y")
        await until_shown(pilot, "There is no answer yet.")
        assert clipboards(written) == []
        answer = "Vier: \x1b[2J 中文\n\n```\ncode  \n```\n" + "long " * 2000
        app.screen.conversation.add(Turn("first", "not this one"))
        app.screen.conversation.add(Turn("second", answer, "nor what led to it"))
        await press(pilot, "ctrl+y")
        await until_shown(pilot, "The last answer is in the clipboard")
        assert clipboards(written) == [answer]
        assert app.clipboard == answer


async def test_the_command_of_a_benchmark_reaches_the_terminal(monkeypatch):
    app = EdgeserveApp(Feed("127.0.0.1:9"), mode="bench")
    async with app.run_test(size=(100, 30), notifications=True) as pilot:
        await until(pilot, lambda: app.current_mode == "bench" and bool(app.screen.query("#top")), "for it")
        written = written_to(app, monkeypatch)
        app.screen.action_copy_command()
        await until_shown(pilot, "The command is in the clipboard")
        (copied,) = clipboards(written)
        assert copied.split() == bench_command(app.feed.url, app.screen.typed)


async def test_the_user_of_an_address_is_neither_shown_nor_copied(monkeypatch):
    app = EdgeserveApp(Feed("me:secret@127.0.0.1:9"), mode="bench")
    async with app.run_test(size=(100, 30), notifications=True) as pilot:
        await until(pilot, lambda: app.current_mode == "bench" and bool(app.screen.query("#top")), "for it")
        written = written_to(app, monkeypatch)
        await until_shown(pilot, "***@127.0.0.1:9")
        app.screen.action_copy_command()
        await until_shown(pilot, "The command is in the clipboard")
        (copied,) = clipboards(written)
    assert "***@127.0.0.1:9" in copied
    assert "secret" not in copied
    assert "secret" in app.feed.url


async def test_a_terminal_that_is_known_not_to_take_it_has_its_way_out_named(monkeypatch):
    monkeypatch.setenv("TERM_PROGRAM", "Apple_Terminal")
    app = EdgeserveApp(Feed("127.0.0.1:9"), mode="bench")
    async with app.run_test(size=(100, 30), notifications=True) as pilot:
        await until(pilot, lambda: app.current_mode == "bench" and bool(app.screen.query("#top")), "for it")
        app.screen.action_copy_command()
        await until_shown(pilot, "may not be in the")
        await until_shown(pilot, "F8 gives the mouse back")


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({}, ""),
        ({"TERM": "xterm-kitty"}, ""),
        ({"TERM": "linux"}, "has none"),
        ({"TERM": "tmux-256color", "TMUX": "/somewhere/default,1,0"}, "set-clipboard on"),
        ({"TERM": "screen", "STY": "1.pts-0"}, "GNU screen"),
        ({"TERM": "xterm-256color", "TERM_PROGRAM": "Apple_Terminal"}, "macOS's Terminal"),
    ],
)
def test_obstacles_are_told_by_the_environment(environ, said):
    obstacle = obstacle_in(environ)
    assert said in obstacle and bool(said) == bool(obstacle)
