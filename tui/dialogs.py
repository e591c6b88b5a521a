"""Small windows over a screen: a question, a list of figures, help."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from edgeserve.ink import printable

_MAX_COLUMNS = 104
_CSS = """
%s {
    align: center middle;
    background: $background 60%%;
    & > .box {
        width: auto; min-width: 40; max-width: 90%%;
        height: auto; max-height: 90%%;
        padding: 1 2;
        background: $surface;
        border: round $frame-focus;
        border-title-color: $foreground;
        border-subtitle-color: $quiet;
        scrollbar-size-vertical: 1;
    }
    & Static { width: auto; max-width: 100%%; }
}
"""


class Question(ModalScreen[bool]):
    """A question with two answers; the careful one is the default."""

    DEFAULT_CSS = _CSS % "Question"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "Yes"),
        Binding("n,escape,enter,q", "answer(False)", "No"),
    ]

    def __init__(self, question: str, yes: str) -> None:
        super().__init__()
        self._question, self._yes = question, yes

    def compose(self) -> ComposeResult:
        with Vertical(classes="box") as box:
            box.border_subtitle = "y / n"
            yield Static(Text(f"{printable(self._question)}\n\n[y] {self._yes}    [n] leave it"))

    def action_answer(self, answer: bool) -> None:
        self.dismiss(answer)


class Figures(ModalScreen[None]):
    """Names and values under a sentence, in sections of a title and rows."""

    DEFAULT_CSS = _CSS % "Figures"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,enter,q,e,question_mark", "dismiss", "Close")]

    Section = tuple[str, str, Sequence[tuple[str, str]]]

    def __init__(self, title: str, sections: Sequence[Section]) -> None:
        """A section is (sentence, remedy or "", rows of name and value)."""
        super().__init__()
        self._title, self._sections = title, sections

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="box") as box:
            box.border_title, box.border_subtitle = self._title, "Esc closes"
            yield Static(self.text)

    def on_resize(self, event: events.Resize) -> None:
        # Sentences are hard to read over a whole wide screen.
        self.query_one(".box").styles.max_width = min(_MAX_COLUMNS, event.size.width * 9 // 10)

    @property
    def text(self) -> Text:
        """All sections as one text."""
        width = max((len(name) for _, _, rows in self._sections for name, _ in rows), default=0)
        text = Text()
        for index, (sentence, remedy, rows) in enumerate(self._sections):
            text.append("\n\n" if index else "")
            text.append(printable(sentence), style="bold")
            text.append(f"\n{printable(remedy)}" if remedy else "")
            for name, value in rows:
                text.append(f"\n  {name:<{width}}   ", style="dim")
                text.append(printable(value))
        return text
