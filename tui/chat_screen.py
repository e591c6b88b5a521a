"""Chat with the running server: what was said, the answer as it grows, its figures, sessions.

Owns the keys and the order of things. The conversation is chat/session.py's, asking is chat_talk.py's.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.timer import Timer
from textual.widgets import Footer, Static
from textual.worker import Worker, WorkerCancelled

from edgeserve.chat.answer import Answer
from edgeserve.chat.session import Conversation
from edgeserve.errors import EdgeserveError, UsageError
from tui import words
from tui.chat_dialogs import ChatList, SettingsForm
from tui.chat_store import ChatStore
from tui.chat_talk import Talk
from tui.chat_widgets import AnswerView, Composer, LiveMeter, Said
from tui.clipboard import copy
from tui.feed_screen import FeedScreen
from tui.lines import TwoEndedLine
from tui.messages import FeedChanged

REPAINT_S = 0.125
MAX_SHOWN_TURNS = 30


class ChatScreen(FeedScreen):
    """One conversation at a time, kept after every answer."""

    CSS = """
    ChatScreen {
        background: $background;
        & #transcript { height: 1fr; padding: 0 1; scrollbar-size-vertical: 1; background: $background; }
        & #transcript > .hint { color: $quiet; padding: 1 1; }
        & Composer { margin: 0 1; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "stop", "stop", show=False),
        Binding("ctrl+r", "regenerate", "again", priority=True),
        Binding("ctrl+y", "copy", "copy", priority=True),
        Binding("ctrl+s", "settings", "settings"),
        Binding("ctrl+l", "open", "chats", priority=True),
        Binding("ctrl+n", "new", "new", priority=True),
        # The message's own editor knows F6 too.
        Binding("f6", "export", "export", show=False, priority=True),
        Binding("pageup", "scroll_transcript(-1)", "Back", show=False, priority=True),
        Binding("pagedown", "scroll_transcript(1)", "Forward", show=False, priority=True),
    ]

    def __init__(self, store: ChatStore | None = None) -> None:
        super().__init__()
        self.store = store or ChatStore()
        self.conversation = Conversation()
        self._path: Path | None = None
        self._talk: Talk | None = None
        self._view: AnswerView | None = None
        self._worker: Worker[None] | None = None
        self._painter: Timer | None = None
        self._num_context: int | None = None

    def compose(self) -> ComposeResult:
        yield TwoEndedLine(id="top")
        yield VerticalScroll(id="transcript")
        yield LiveMeter(id="meter")
        yield Composer()
        yield Footer(show_command_palette=False, compact=True)

    def on_mount(self) -> None:
        self.transcript.anchor()
        self._painter = self.set_interval(REPAINT_S, self._paint, pause=True)
        self.query_one(Composer).focus()
        self._show_hint()
        self.show()

    @property
    def transcript(self) -> VerticalScroll:
        return self.query_one("#transcript", VerticalScroll)

    @property
    def is_answering(self) -> bool:
        return self._worker is not None and self._worker.is_running

    @property
    def n_ctx(self) -> int | None:
        """Tokens that one conversation may hold."""
        return self.feed.facts.n_ctx_seq if self.feed.facts else None

    @property
    def model(self) -> str:
        return self.feed.facts.model if self.feed.facts else ""

    def on_feed_changed(self, message: FeedChanged) -> None:
        self.show()

    def show(self) -> None:
        """The lines above and below what was said."""
        if not self.is_drawn:
            return
        self.show_top()
        if not self.is_answering:
            self.query_one(LiveMeter).show_idle(self._settings_text(), self._context_text())

    def _settings_text(self) -> str:
        parts = [f"{name} {value}" for name, value in self.conversation.settings.items()]
        system = ["system prompt"] if self.conversation.system else []
        return "  ".join([*system, *parts]) or "default settings"

    def _context_text(self) -> str:
        if self._num_context is None or not self.n_ctx:
            return f"context {words.count(self.n_ctx)}" if self.n_ctx else ""
        return f"context {self._num_context:,} of {self.n_ctx:,}"

    def _show_hint(self) -> None:
        if not self.conversation.turns:
            text = "A new chat. What you write stays on this machine: it goes to the server above only."
            self.transcript.mount(Static(text, classes="hint"))

    # --- asking

    async def on_composer_sent(self, message: Composer.Sent) -> None:
        if self.is_answering:
            self.notify("The last answer still runs: Esc stops it.", timeout=3)
            return
        self.query_one(Composer).clear()
        await self._say(message.text)

    async def _say(self, text: str) -> None:
        await self.transcript.query(".hint").remove()
        self._view = AnswerView()
        await self.transcript.mount_all([Said(text), self._view])
        self.transcript.anchor()
        self._talk = Talk(self.feed.url, self.feed.api_key, self.conversation)
        self._worker = self.run_worker(self._answer(self._talk, self._view, text), group="answer")
        if self._painter is not None:
            self._painter.resume()

    async def _answer(self, talk: Talk, view: AnswerView, text: str) -> None:
        try:
            answer = await talk.ask(text, lambda: None)
        except EdgeserveError as error:
            await view.fail(f"{error}  Ctrl+R asks again.")
        else:
            await self._finish(view, answer)
        finally:
            self._worker = None
            if self._painter is not None:
                self._painter.pause()
            self.show()

    async def _finish(self, view: AnswerView, answer: Answer) -> None:
        ending = "stopped" if answer.was_stopped else ""
        if answer.finish_reason == "length":
            ending = "cut at the token limit"
        await view.end(answer, self.n_ctx, ending)
        if answer.usage is not None:
            self._num_context = answer.usage.prompt_tokens + answer.usage.completion_tokens
        self._keep()

    async def _paint(self) -> None:
        """What has come since the last time; the server's pace is not the screen's."""
        answer = self._talk.answer if self._talk else None
        if answer is None or self._view is None or not self.is_answering:
            return
        snapshot = self.feed.latest
        num_waiting = (snapshot.num_waiting or 0) if snapshot is not None else 0
        self.query_one(LiveMeter).show_answer(answer, time.perf_counter(), num_waiting)
        await self._view.grow(answer)

    def _keep(self) -> None:
        if self._path is None:
            self._path = self.store.new_path(self.conversation.turns[0].user)
        try:
            self.store.save(self._path, self.conversation, self.model)
        except UsageError as error:
            self.notify(str(error), severity="warning")

    # --- keys

    async def action_stop(self) -> None:
        """End the running answer; what came of it stays."""
        worker, talk, view = self._worker, self._talk, self._view
        if worker is None or talk is None or view is None or not worker.is_running:
            self.query_one(Composer).focus()
            return
        worker.cancel()
        try:
            await worker.wait()
        except WorkerCancelled:
            answer = talk.answer
            if answer is not None:
                answer.was_stopped = True
                if answer.stamps_s:
                    await self._finish(view, answer)
                else:
                    await view.fail("Stopped before the first token.  Ctrl+R asks again.")
        self.show()

    async def action_regenerate(self) -> None:
        """Send the last message again in place of its answer."""
        if self.is_answering:
            await self.action_stop()
        try:
            message = self.conversation.take_back()
        except UsageError as error:
            self.notify(str(error), timeout=3)
            return
        for widget in list(self.transcript.children)[-2:]:
            await widget.remove()
        await self._say(message)

    def action_copy(self) -> None:
        if not self.conversation.turns:
            self.notify("There is no answer yet.", timeout=2)
            return
        copy(self.app, self.conversation.turns[-1].answer, "The last answer")

    def action_export(self) -> None:
        if not self.conversation.turns or self._path is None:
            self.notify("There is nothing to export yet.", timeout=2)
            return
        try:
            target = self.store.export(self._path, self.conversation, self.model)
        except UsageError as error:
            self.notify(str(error), severity="warning")
        else:
            self.notify(f"Written to {target}", timeout=6)

    def action_settings(self) -> None:
        def taken(_: bool | None) -> None:
            self.show()

        defaults = self.feed.facts.request_defaults if self.feed.facts else {}
        self.app.push_screen(SettingsForm(self.conversation, defaults), taken)

    async def action_new(self) -> None:
        if self.is_answering:
            await self.action_stop()
        fresh = Conversation(self.conversation.system, self.conversation.settings)
        await self._show_conversation(fresh, None)

    def action_open(self) -> None:
        async def chosen(path: Path | None) -> None:
            if path is None:
                return
            try:
                await self._show_conversation(self.store.load(path), path)
            except UsageError as error:
                self.notify(str(error), severity="warning")

        self.app.push_screen(ChatList(self.store.saved()), chosen)

    async def _show_conversation(self, conversation: Conversation, path: Path | None) -> None:
        """Another chat in place of this one; of a long one, the end."""
        if self.is_answering:
            await self.action_stop()
        self.conversation, self._path, self._num_context = conversation, path, None
        await self.transcript.remove_children()
        left_out = len(conversation.turns) - MAX_SHOWN_TURNS
        if left_out > 0:
            text = f"{words.plural(left_out, 'earlier turn')} not shown; they are sent all the same."
            await self.transcript.mount(Static(text, classes="hint"))
        for turn in conversation.turns[-MAX_SHOWN_TURNS:]:
            await self.transcript.mount_all([Said(turn.user), AnswerView(turn.answer, turn.reasoning)])
        self._show_hint()
        self.transcript.anchor()
        self.show()

    def action_scroll_transcript(self, pages: int) -> None:
        if pages < 0:
            self.transcript.scroll_page_up()
        else:
            self.transcript.scroll_page_down()
