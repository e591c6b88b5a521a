"""A window to choose from a list by typing a part of a name."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList
from textual.widgets.option_list import Option

from edgeserve.ink import printable
from edgeserve.local_models import find_local_models
from edgeserve.models_view import list_rows
from edgeserve.planner.words import size

Choice = tuple[str, str]
"""(value, what is shown)"""


def known_models() -> list[Choice]:
    """Models by name, then the others that are on this machine."""
    rows = list_rows()
    width = max(len(row.entry.name) for row in rows)
    named = [
        (
            row.entry.name,
            f"{row.entry.name:<{width}}  {_size(row.entry.n_bytes):>9}  {'here' if row.path else '':<4}"
            f"  {row.entry.note}",
        )
        for row in rows
    ]
    listed = {row.path for row in rows}
    local = [
        (model.reference, f"{model.reference}  {size(model.n_bytes)}  {model.source}")
        for model in find_local_models()
        if model.path not in listed
    ]
    return [*named, *local]


def _size(n_bytes: int | None) -> str:
    return "" if n_bytes is None else size(n_bytes)


class PickList(ModalScreen[str | None]):
    """The chosen value, or None."""

    DEFAULT_CSS = """
    PickList {
        align: center middle; background: $background 60%;
        & > .box {
            width: 90; max-width: 95%; height: 80%; padding: 0 1;
            background: $surface; border: round $frame-focus;
            border-title-color: $foreground; border-subtitle-color: $quiet;
        }
        & Input { height: 1; border: none; padding: 0 1; background: $panel; }
        & OptionList { height: 1fr; border: none; background: $surface; padding: 0; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss(None)", "Leave"),
        Binding("down", "move(1)", "Down", show=False, priority=True),
        Binding("up", "move(-1)", "Up", show=False, priority=True),
    ]

    def __init__(self, title: str, choices: list[Choice]) -> None:
        super().__init__()
        self._title, self._choices = title, choices
        self._found = choices

    def compose(self) -> ComposeResult:
        with Vertical(classes="box") as box:
            box.border_title, box.border_subtitle = self._title, "type to find, Enter takes, Esc leaves"
            yield Input(placeholder="a part of its name", compact=True)
            yield OptionList()

    def on_mount(self, event: events.Mount) -> None:
        self.call_after_refresh(self._list, "")

    def on_input_changed(self, event: Input.Changed) -> None:
        self._list(event.value)

    def _list(self, wanted: str) -> None:
        words = wanted.lower().split()
        self._found = [choice for choice in self._choices if all(word in choice[1].lower() for word in words)]
        listed = self.query_one(OptionList)
        listed.clear_options()
        width = max(20, listed.size.width - 2)
        listed.add_options(Option(Text(_cut(printable(shown), width))) for _, shown in self._found)
        if self._found:
            listed.highlighted = 0

    def action_move(self, by: int) -> None:
        listed = self.query_one(OptionList)
        if self._found:
            listed.highlighted = max(0, min((listed.highlighted or 0) + by, len(self._found) - 1))

    def on_input_submitted(self) -> None:
        index = self.query_one(OptionList).highlighted
        if self._found and index is not None:
            self.dismiss(self._found[index][0])

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(self._found[event.option_index][0])


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
