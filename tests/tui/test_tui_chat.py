"""Chat in the TUI: asking, stopping, asking again, settings, sessions, and what goes wrong."""

from __future__ import annotations

import json
import threading
from dataclasses import replace

import pytest
from mock_openai import MockServer, Step, chunk, sse, usage_chunk
from screen_text import press, resize, screen_text, until, until_shown
from textual import events
from textual.widgets import Input, Markdown, TextArea
from tui_server import streams

from edgeserve.chat.session import Conversation, Turn
from tui.app import EdgeserveApp
from tui.chat_dialogs import SHOWN_SETTINGS, ChatList, SettingsForm
from tui.chat_screen import MAX_SHOWN_TURNS
from tui.chat_store import ChatStore, as_markdown
from tui.chat_widgets import AnswerView, Composer, LiveMeter, Said, arranged
from tui.feed import Feed


def chat_app(url):
    return EdgeserveApp(Feed(url), mode="chat")


async def opened(pilot):
    await until(pilot, lambda: pilot.app.feed.facts is not None, "for the server")
    await until(pilot, lambda: bool(pilot.app.screen.query(Composer)), "for the chat")
    screen = pilot.app.screen
    screen.conversation.settings.update(temperature=0.0, max_tokens=16)
    return screen


async def say(pilot, screen, text):
    screen.query_one(Composer).text = text
    await press(pilot, "enter")
    await until(pilot, lambda: screen.is_answering or screen.query(".figures, .error"), "for the question")


def num_pieces(screen):
    """Pieces of the answer that have come."""
    answer = screen._talk.answer if screen._talk is not None else None
    return len(answer.stamps_s) if answer is not None else 0


async def answered(pilot, screen, count=1):
    await until(pilot, lambda: len(screen.query(".figures")) >= count, "for the figures")


async def test_an_answer_streams_in_and_leaves_its_figures(live):
    app = chat_app(live.url)
    async with app.run_test(size=(110, 30)) as pilot:
        screen = await opened(pilot)
        await say(pilot, screen, "The capital of France is")
        await answered(pilot, screen)
        (turn,) = screen.conversation.turns
        assert turn.user == "The capital of France is"
        assert screen.query_one(Markdown).source == turn.answer
        figures = screen.query_one(AnswerView).figures_text
        assert figures.startswith("prompt ") and "ttft " in figures and "ms/token" in figures
        assert f"/{app.feed.facts.n_ctx_seq:,}" in figures
        direct = live.chat("The capital of France is", max_tokens=16)
        assert turn.answer == direct["choices"][0]["message"]["content"]
        assert f"prompt {direct['usage']['prompt_tokens']}" in figures
        await until_shown(pilot, "context ")


async def test_a_message_of_many_lines_is_one_message(live):
    app = chat_app(live.url)
    pasted = "\n".join(f"line {number}" for number in range(45))
    async with app.run_test(size=(100, 30)) as pilot:
        screen = await opened(pilot)
        composer = screen.query_one(Composer)
        composer.insert(pasted)
        await press(pilot, "ctrl+j", "o", "k", "enter")
        await answered(pilot, screen)
        assert screen.conversation.turns[0].user == f"{pasted}\nok"
        said = screen.query_one(Said)
        assert "more lines, all of them sent" in said.shown
        assert composer.text == ""


async def test_escape_stops_and_keeps_what_came(live):
    app = chat_app(live.url)
    async with app.run_test(size=(100, 30)) as pilot:
        screen = await opened(pilot)
        screen.conversation.settings["max_tokens"] = 800
        with live.unhurried():
            await say(pilot, screen, "Write a very long story about a river.")
            await until(pilot, lambda: num_pieces(screen) > 5, "for tokens")
            await until_shown(pilot, "Esc stops")
            meter = screen.query_one(LiveMeter)
            await until(pilot, lambda: "decode" in meter.text, "for the meter to follow")
            await press(pilot, "escape")
            await answered(pilot, screen)
        assert "stopped" in screen.query_one(AnswerView).figures_text
        assert screen.conversation.turns[0].answer
        live.wait_until_idle()


async def test_asking_again_replaces_the_answer(live):
    app = chat_app(live.url)
    async with app.run_test(size=(100, 30)) as pilot:
        screen = await opened(pilot)
        await say(pilot, screen, "Say a word.")
        await answered(pilot, screen)
        first = screen.query_one(AnswerView)
        await press(pilot, "ctrl+r")
        await until(pilot, lambda: first not in screen.query(AnswerView), "for the second try")
        await answered(pilot, screen)
        assert len(screen.conversation.turns) == 1
        assert len(screen.query(AnswerView)) == 1


async def test_no_text_is_lost_when_the_size_changes_while_it_streams(live):
    app = chat_app(live.url)
    async with app.run_test(size=(100, 30)) as pilot:
        screen = await opened(pilot)
        screen.conversation.settings["max_tokens"] = 60
        await say(pilot, screen, "Tell me about bread.")
        for size in ((80, 24), (160, 50), (60, 20), (100, 30)):
            resize(pilot, *size)
            await until(pilot, lambda wanted=size: app.size == wanted, "for the size")
        await answered(pilot, screen)
        assert screen.query_one(Markdown).source == screen.conversation.turns[0].answer


async def test_a_chat_is_kept_opened_again_and_exported(live, own_folders):
    app = chat_app(live.url)
    async with app.run_test(size=(100, 30)) as pilot:
        screen = await opened(pilot)
        await say(pilot, screen, "Name a fruit.")
        await answered(pilot, screen)
        (kept,) = screen.store.saved()
        assert kept.title == "name a fruit"
        await press(pilot, "f6")
        exported = kept.path.with_suffix(".md")
        await until(pilot, lambda: exported.exists() and exported.read_text(), "for the export")
        assert exported.read_text() == as_markdown(screen.conversation, app.feed.facts.model)
        await press(pilot, "ctrl+n")
        await until(pilot, lambda: not screen.conversation.turns, "for a new chat")
        assert not screen.query(AnswerView)
        await press(pilot, "ctrl+l")
        await until(pilot, lambda: isinstance(app.screen, ChatList), "for the list")
        await until_shown(pilot, "Enter opens")
        await press(pilot, "down", "enter")
        await until(pilot, lambda: bool(screen.conversation.turns), "for the chat")
        assert screen.conversation.turns[0].user == "Name a fruit."
        assert json.loads(kept.path.read_text())["model"] == app.feed.facts.model


async def test_of_a_long_chat_the_end_is_shown_and_all_is_sent(live, own_folders):
    store = ChatStore()
    conversation = Conversation()
    for number in range(MAX_SHOWN_TURNS + 5):
        conversation.add(Turn(f"question {number}", f"answer {number}"))
    path = store.new_path("long")
    store.save(path, conversation, "m")
    app = chat_app(live.url)
    async with app.run_test(size=(100, 30)) as pilot:
        screen = await opened(pilot)
        await screen._show_conversation(store.load(path), path)
        assert len(screen.query(AnswerView)) == MAX_SHOWN_TURNS
        assert len(screen.conversation.turns) == MAX_SHOWN_TURNS + 5


async def test_settings_are_taken_over_whole_or_not_at_all(live):
    app = chat_app(live.url)
    async with app.run_test(size=(100, 34)) as pilot:
        screen = await opened(pilot)
        await press(pilot, "ctrl+s")
        await until(pilot, lambda: isinstance(app.screen, SettingsForm), "for the form")
        form = app.screen
        await until(pilot, lambda: len(form.query(Input)) == len(SHOWN_SETTINGS), "for the fields")
        form.query_one("#system", TextArea).text = "Be brief."
        form.query_one("#top_p", Input).value = "7"
        await press(pilot, "ctrl+s")
        await until_shown(pilot, "top_p must be between 0 and 1")
        assert screen.conversation.system == ""
        form.query_one("#top_p", Input).value = "0.5"
        await press(pilot, "ctrl+s")
        await until(pilot, lambda: app.screen is screen, "for the chat")
        assert (screen.conversation.system, screen.conversation.settings["top_p"]) == ("Be brief.", 0.5)


async def test_an_overloaded_server_says_so_and_the_message_is_kept(live):
    app = chat_app(live.url)
    async with app.run_test(size=(110, 30)) as pilot:
        screen = await opened(pilot)
        with streams(live, 4):
            await say(pilot, screen, "Anybody there?")
            await until(pilot, lambda: bool(screen.query(".error")), "for the refusal")
            await until_shown(pilot, "2 requests are waiting")
            assert screen.conversation.unanswered == "Anybody there?"
        await press(pilot, "ctrl+r")
        await answered(pilot, screen)
        assert screen.conversation.turns[0].user == "Anybody there?"


async def test_without_a_server_the_message_is_kept():
    app = chat_app("127.0.0.1:9")
    async with app.run_test(size=(100, 30)) as pilot:
        await until(pilot, lambda: bool(app.screen.query(Composer)), "for the chat")
        screen = app.screen
        await say(pilot, screen, "Hello?")
        await until_shown(pilot, "No server answers")
        assert screen.conversation.unanswered == "Hello?"


async def test_keys_for_typing_reach_the_message_and_not_the_application(live):
    app = chat_app(live.url)
    async with app.run_test(size=(100, 30)) as pilot:
        screen = await opened(pilot)
        await press(pilot, "q", "question_mark", "c")
        await until(pilot, lambda: screen.query_one(Composer).text == "q?c", "for the text")
        assert app.is_running


async def test_what_a_model_says_cannot_move_the_cursor_or_be_markup(live):
    app = chat_app(live.url)
    async with app.run_test(size=(100, 30)) as pilot:
        screen = await opened(pilot)
        await screen.transcript.mount_all(
            [Said("[red]\x1b[2Jhi[/red]"), AnswerView("a\x1b]0;title\x07b [bold]c")]
        )
        await until_shown(pilot, "[red]␛[2Jhi[/red]")
        await until_shown(pilot, "[bold]c")
        assert "\x1b" not in screen_text(app)


@pytest.mark.parametrize("word", ["prefill", "decode", "stalled"])
def test_figures_carry_their_colour_and_stay_whole(word):
    parts = ["prompt 3", f"{word} 12.0 [ms]", "context 4"]
    coloured = f"[${word}]{word} 12.0 \\[ms][/]"
    assert arranged(parts, 80) == [f"prompt 3   {coloured}   context 4"]
    assert arranged(parts, 24) == ["prompt 3", coloured, "context 4"]
    assert arranged(parts, len(f"prompt 3   {parts[1]}")) == [f"prompt 3   {coloured}", "context 4"]


async def test_a_message_is_sent_whole_however_fast_it_is_typed(live):
    app = chat_app(live.url)
    async with app.run_test(size=(100, 30)) as pilot:
        screen = await opened(pilot)
        # All at once, as a busy machine gets to see them.
        for key in [*"hello", "ctrl+j", *"you", "enter"]:
            app.simulate_key(key)
        await answered(pilot, screen)
        assert screen.conversation.turns[0].user == "hello\nyou"
        assert screen.query_one(Composer).text == ""


SECTION = ["## Rivers\n\n", *["A river bends, "] * 90, "**often**.\n\n", *["- by ", "itself\n"] * 4, "\n"]


async def test_ten_thousand_tokens_stream_in_whole_and_keys_are_heard_meanwhile():
    """From a script: the small model's context ends long before."""
    typed = threading.Event()
    pieces = [SECTION[index % len(SECTION)] for index in range(10_000)]
    steps = [Step(chunk({"content": piece})) for piece in pieces]
    # The second half comes only when a key that was pressed during the first one stands in the message.
    steps[5000] = replace(steps[5000], until=typed.is_set)
    steps += [Step(chunk({}, "stop")), Step(usage_chunk(10, 10_000)), Step(sse("[DONE]"))]
    with MockServer(lambda body: steps).running() as server:
        app = chat_app(server.url)
        async with app.run_test(size=(100, 30)) as pilot:
            screen = await opened(pilot)
            await say(pilot, screen, "Tell me everything.")
            await until(pilot, lambda: num_pieces(screen) > 4000, "for the first half")
            await press(pilot, "o", "k")
            await until(pilot, lambda: screen.query_one(Composer).text == "ok", "for the keys")
            typed.set()
            await until(pilot, lambda: bool(screen.query(".figures")), "for the end", 180)
            (turn,) = screen.conversation.turns
            assert turn.answer == "".join(pieces)
            assert screen.query_one(Markdown).source == turn.answer
            await until_shown(pilot, "context 10,010")


async def test_a_paste_of_ten_thousand_characters_is_one_message(live):
    app = chat_app(live.url)
    pasted = "wörter 语言 " * 1000
    async with app.run_test(size=(100, 30)) as pilot:
        screen = await opened(pilot)
        composer = screen.query_one(Composer)
        app.post_message(events.Paste(pasted))  # as a terminal does: to the focused widget
        await until(pilot, lambda: composer.text == pasted, "for the text")
        await press(pilot, "enter")
        # Longer than a sequence: the server's refusal, and the message is not lost.
        await until(pilot, lambda: bool(screen.query(".error")), "for the refusal")
        assert screen.conversation.unanswered == pasted
