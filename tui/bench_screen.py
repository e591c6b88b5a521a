"""Measure the server: choose a scenario, watch it run, read the report, compare it with an earlier one.

Owns the layout and the keys. Scenarios, figures and reports are bench's; the run is a child process.
"""

from __future__ import annotations

import shlex
from contextlib import aclosing
from typing import ClassVar

from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.widgets import Footer, Input, Label, OptionList, Select, Static
from textual.widgets.option_list import Option
from textual.worker import Worker

from edgeserve.bench.options import Scenario
from edgeserve.errors import UsageError
from edgeserve.ink import printable
from edgeserve.settings.bench_flags import BENCH_FLAGS
from tui.bench_runs import ABOUT, FIELDS, BenchChild, BenchRun, BenchStore, command_of, compared
from tui.charts import TimeChart
from tui.clipboard import copy
from tui.feed_screen import FeedScreen
from tui.lines import TwoEndedLine
from tui.messages import FeedChanged
from tui.speed_charts import show_speeds

NARROW_COLUMNS = 110


class BenchScreen(FeedScreen):
    """One benchmark at a time."""

    CSS = """
    BenchScreen {
        background: $background;
        & .panel { border: round $frame; border-title-color: $foreground; border-subtitle-color: $quiet; }
        & .panel:focus-within { border: round $frame-focus; }
        & #columns { height: 1fr; }
        & #left { width: 44; }
        &.-narrow #left { width: 34; }
        & #form { height: auto; max-height: 60%; padding: 0 1; }
        & #runs {
            height: 1fr; background: $background; border: round $frame;
            border-title-color: $foreground; border-subtitle-color: $quiet;
        }
        & #runs:focus { border: round $frame-focus; }
        & #charts { height: 8; display: none; }
        &.-running #charts { display: block; }
        & #prefill, & #decode { width: 1fr; }
        & #report { height: 1fr; padding: 0 1; scrollbar-size: 1 1; }
        & #report Static { width: auto; }
        & Select { height: 1; margin: 0 0 1 0; & SelectCurrent { border: none; height: 1; padding: 0 1; } }
        & .row { height: 1; & Label { width: 15; } }
        & .row Input { width: 1fr; height: 1; border: none; padding: 0 1; background: $panel; }
        & #about { color: $quiet; }
        & #fields { height: auto; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+r", "run", "run", priority=True),
        Binding("escape", "stop", "stop"),
        Binding("x", "compare", "compare"),
        Binding("y", "copy_command", "copy"),
    ]

    def __init__(self, store: BenchStore | None = None) -> None:
        super().__init__()
        self.store = store or BenchStore()
        self.report = ""
        self._runs: list[BenchRun] = []
        self._shown: BenchRun | None = None
        self._child: BenchChild | None = None
        self._worker: Worker[None] | None = None

    def compose(self) -> ComposeResult:
        yield TwoEndedLine(id="top")
        with Horizontal(id="columns"):
            with Vertical(id="left"):
                with VerticalScroll(id="form", classes="panel"):
                    yield Select(
                        [(scenario.value, scenario) for scenario in Scenario],
                        value=Scenario.STALL,
                        allow_blank=False,
                        compact=True,
                        id="scenario",
                    )
                    yield Static(id="about")
                    yield Vertical(id="fields")
                yield OptionList(id="runs")
            with Vertical():
                with Horizontal(id="charts"):
                    yield TimeChart("prefill", id="prefill", classes="panel")
                    yield TimeChart("decode", id="decode", classes="panel")
                with VerticalScroll(id="report", classes="panel"):
                    yield Static(id="text", markup=False)
        yield TwoEndedLine(id="progress")
        yield Footer(show_command_palette=False, compact=True)

    async def on_mount(self) -> None:
        self.query_one("#form").border_title = "benchmark"
        self.query_one("#runs").border_title = "earlier runs"
        self.query_one("#runs").border_subtitle = "Enter shows, x compares"
        self.query_one("#report").border_title = "report"
        self._list_runs()
        self._show_text("Ctrl+R runs it against the server above.\nF1 shows the server meanwhile.")
        self.show()

    def on_resize(self, event: events.Resize) -> None:
        self.set_class(event.size.width < NARROW_COLUMNS, "-narrow")

    def on_feed_changed(self, message: FeedChanged) -> None:
        self.show()

    def show(self) -> None:
        """What the feed knows: who is measured, and its speeds while a benchmark runs."""
        if not self.is_drawn:
            return
        self.show_top()
        if self.is_measuring:
            show_speeds(
                self.feed, self.query_one("#prefill", TimeChart), self.query_one("#decode", TimeChart), 1.0
            )

    # --- the form

    @property
    def scenario(self) -> Scenario:
        value = self.query_one("#scenario", Select).value
        assert isinstance(value, Scenario)
        return value

    @property
    def typed(self) -> dict[str, str]:
        """The options by name, as typed."""
        texts = {str(field.name): field.value.strip() for field in self.query("#fields Input").results(Input)}
        return {"scenario": self.scenario.value, **texts}

    @property
    def is_measuring(self) -> bool:
        return self._worker is not None and self._worker.is_running

    async def on_select_changed(self, event: Select.Changed) -> None:
        self.query_one("#about", Static).update(f"{ABOUT[self.scenario]}\n")
        fields = self.query_one("#fields", Vertical)
        hints = {flag.field: flag for flag in BENCH_FLAGS}
        await fields.remove_children()
        rows = []
        for name in FIELDS[self.scenario]:
            field = Input(placeholder="default", name=name, compact=True)
            field.tooltip = hints[name].about if name in hints else None
            rows.append(Horizontal(Label(name.replace("_", " ")), field, classes="row"))
        await fields.mount_all(rows)

    def on_descendant_focus(self, event: events.DescendantFocus) -> None:
        """What the field is for, without a mouse to ask with."""
        about = event.widget.tooltip
        if not self.is_measuring:
            self.query_one("#progress", TwoEndedLine).show([(str(about), "quiet")] if about else [])

    # --- running

    def action_run(self) -> None:
        if self.is_measuring:
            self.notify("A benchmark runs already: Esc stops it.", timeout=3)
            return
        directory = self.store.new_directory(self.scenario)
        try:
            self._child = BenchChild(self.feed.url, self.feed.api_key, self.typed, directory)
        except UsageError as error:
            self.notify(str(error), severity="warning")
            return
        self.add_class("-running")
        self._show_text(shlex.join(command_of(self.feed.url, self.typed)))
        self._worker = self.run_worker(self._follow(self._child), group="bench")

    async def _follow(self, child: BenchChild) -> None:
        progress = self.query_one("#progress", TwoEndedLine)
        progress.show([("starting", "quiet")], [("Esc stops", "quiet")])
        try:
            async with aclosing(child.news()) as news:
                async for item in news:
                    if "progress" in item:
                        progress.show([(item["progress"], "decode")], [("Esc stops", "quiet")])
                    elif "error" in item:
                        self._show_text(item["error"])
                    else:
                        self._finish()
        finally:
            self._worker = None
            progress.show([])
            self.remove_class("-running")

    def _finish(self) -> None:
        self._list_runs()
        self._show_run(self._runs[0])

    def action_stop(self) -> None:
        """End the benchmark; what it has measured is kept and shown as partial."""
        if self._child is not None and self.is_measuring:
            self._child.stop()
            self.query_one("#progress", TwoEndedLine).show([("stopping", "stalled")])

    def action_copy_command(self) -> None:
        copy(self.app, shlex.join(command_of(self.feed.url, self.typed)), "The command")

    # --- results

    def _list_runs(self) -> None:
        self._runs = self.store.runs()
        listed = self.query_one("#runs", OptionList)
        listed.clear_options()
        listed.add_options(Option(Text(printable(run.title))) for run in self._runs)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        if event.option_list.id == "runs":
            self._show_run(self._runs[event.option_index])

    def _show_run(self, run: BenchRun) -> None:
        self._shown = run
        self._show_text(run.report)

    def _show_text(self, text: str) -> None:
        self.report = text
        self.query_one("#text", Static).update(Text(printable(text)))
        self.query_one("#report").scroll_home(animate=False)

    def action_compare(self) -> None:
        """The shown run against the one under the cursor, the older one first."""
        index = self.query_one("#runs", OptionList).highlighted
        if self._shown is None or index is None or self._runs[index] == self._shown:
            self.notify("Show one run with Enter, move to another, then x.", timeout=4)
            return
        pair = sorted((self._shown, self._runs[index]), key=lambda run: run.directory.name)
        try:
            self._show_text(compared(*pair))
        except UsageError as error:
            self.notify(str(error), severity="warning")
