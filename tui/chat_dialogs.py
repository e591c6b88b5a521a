"""The chat's two forms: system prompt with sampling settings, and the list of kept chats."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Input, Label, OptionList, Static, TextArea
from textual.widgets.option_list import Option

from edgeserve.chat.session import Conversation
from edgeserve.chat.settings import SETTINGS, Value, format_value, parse_setting
from edgeserve.errors import UsageError
from tui.chat_store import SavedChat

SHOWN_SETTINGS = tuple(name for name, setting in SETTINGS.items() if not setting.is_local)


class SettingsForm(ModalScreen[bool]):
    """Changes a conversation's system prompt and settings; True when something was taken over."""

    DEFAULT_CSS = """
    SettingsForm {
        align: center middle; background: $background 60%;
        & > .box {
            width: 84; max-width: 95%; height: auto; max-height: 95%;
            padding: 0 1; background: $surface;
            border: round $frame-focus; border-subtitle-color: $quiet;
        }
        & TextArea { height: 5; border: round $frame; background: $surface; }
        & TextArea:focus { border: round $frame-focus; }
        & Horizontal { height: 1; }
        & Horizontal Label { width: 20; color: $foreground; }
        & Input { width: 16; height: 1; border: none; padding: 0 1; background: $panel; }
        & Horizontal .about { width: 1fr; padding: 0 0 0 2; color: $quiet; }
        & .error { color: $stalled; height: auto; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss(False)", "Leave"),
        Binding("ctrl+s", "take", "Take over", priority=True),
    ]

    def __init__(self, conversation: Conversation, defaults: Mapping[str, object]) -> None:
        """`defaults` are the server's own values, shown where nothing is set."""
        super().__init__()
        self._conversation, self._defaults = conversation, defaults

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="box") as box:
            box.border_title, box.border_subtitle = "chat settings", "Ctrl+S or Enter takes over, Esc leaves"
            yield Label("system prompt")
            yield TextArea(self._conversation.system, id="system", soft_wrap=True, tab_behavior="focus")
            for name in SHOWN_SETTINGS:
                with Horizontal():
                    yield Label(name)
                    yield Input(self._text_of(name), self._default_of(name), id=name, compact=True)
                    yield Label(SETTINGS[name].about, classes="about")
            yield Static("", classes="error", markup=False)

    def _text_of(self, name: str) -> str:
        value = self._conversation.settings.get(name)
        return "" if value is None else format_value(value)

    def _default_of(self, name: str) -> str:
        value = self._defaults.get(name)
        return "server's" if value in (None, [], "") else f"{value}"

    def on_input_submitted(self) -> None:
        self.action_take()

    def action_take(self) -> None:
        """Parse everything first: half a form is never taken over."""
        try:
            settings = self._parsed()
        except UsageError as error:
            self.query_one(".error", Static).update(str(error))
            return
        self._conversation.system = self.query_one("#system", TextArea).text.strip()
        self._conversation.settings.clear()
        self._conversation.settings.update(settings)
        self.dismiss(True)

    def _parsed(self) -> dict[str, Value]:
        texts = {name: self.query_one(f"#{name}", Input).value.strip() for name in SHOWN_SETTINGS}
        return dict(parse_setting(name, text) for name, text in texts.items() if text)


class ChatList(ModalScreen[Path | None]):
    """Kept chats, the newest first; the chosen one's file."""

    DEFAULT_CSS = """
    ChatList {
        align: center middle; background: $background 60%;
        & > .box {
            width: 84; max-width: 95%; height: auto; max-height: 80%;
            padding: 0 1; background: $surface;
            border: round $frame-focus; border-subtitle-color: $quiet;
        }
        & OptionList { height: auto; max-height: 100%; border: none; background: $surface; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q", "dismiss(None)", "Leave")]

    def __init__(self, chats: list[SavedChat]) -> None:
        super().__init__()
        self._chats = chats

    def compose(self) -> ComposeResult:
        with Vertical(classes="box") as box:
            box.border_title, box.border_subtitle = "kept chats", "Enter opens, Esc leaves"
            if not self._chats:
                yield Static("None yet. A chat is kept after its first answer.")
            yield OptionList(
                *(
                    Option(f"{chat.saved:%Y-%m-%d %H:%M}   {chat.title}".replace("[", "\\["), id=str(index))
                    for index, chat in enumerate(self._chats)
                )
            )

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(self._chats[event.option_index].path)
