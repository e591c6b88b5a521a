"""The first screen: prefill against decode now and over time, the last steps, requests, memory, findings.

Owns the layout and which figure goes where. Reads the feed; computes nothing that history, metrics or
findings define.
"""

from __future__ import annotations

from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, Horizontal
from textual.widgets import Footer, Static

from edgeserve.doctor.diagnosis import Diagnosis
from edgeserve.metrics import Summary
from edgeserve.model_list import read_models_list
from tui import words
from tui.charts import DECODE_MARK, MIXED_MARK, PREFILL_MARK, StepTimeline, TimeChart
from tui.dialogs import Figures, Question
from tui.feed_screen import FeedScreen
from tui.findings import findings
from tui.history import BUCKET_S
from tui.lines import TwoEndedLine
from tui.llama_server import NO_STEPS
from tui.memory_panel import MemoryPanel
from tui.messages import FeedChanged, StartServer
from tui.request_list import RequestList, Row
from tui.snapshot import LinkState, SequenceView, ServerKind, Status
from tui.speed_charts import show_speeds, target_ms
from tui.status_texts import absent_text, request_figures

COLUMN_CHOICES_S = (1.0, 2.0, 5.0, 10.0, 0.5)
NARROW_COLUMNS, SHORT_ROWS = 110, 30
CHARTS_EVERY_S = 0.9
CACHE_WORDS = {"miss": "cold", "partial": "partly cached", "hit": "warm"}


class MonitorScreen(FeedScreen):
    """Watches the application's feed."""

    CSS = """
    MonitorScreen {
        background: $background;
        & .panel {
            border: round $frame;
            border-title-color: $foreground;
            border-subtitle-color: $quiet;
            background: $background;
        }
        & .panel:focus { border: round $frame-focus; }
        & #charts { height: 2fr; min-height: 6; }
        & #prefill { width: 2fr; }
        & #decode { width: 3fr; }
        & #steps { height: 1fr; min-height: 5; max-height: 12; }
        & #lower { height: 2fr; min-height: 6; layout: horizontal; }
        & #requests { width: 1fr; }
        & #memory { width: 40; }
        & #absent { display: none; height: 1fr; align: center middle; }
        & #absent Static { width: auto; max-width: 100%; }
        &.-absent #body { display: none; }
        &.-absent #absent { display: block; }
        &.-narrow #lower { layout: vertical; }
        &.-narrow #requests { width: 100%; height: 1fr; }
        &.-narrow #memory { width: 100%; height: 4; }
        &.-narrow #prefill { width: 1fr; }
        &.-narrow #decode { width: 1fr; }
        &.-short #charts { height: 7; }
        &.-short #steps { height: 5; }
        &.-stepless #steps { height: 3; min-height: 3; }
        &.-narrow.-short #charts { height: 6; }
        &.-narrow.-short #memory { height: 2; border: none; }
        &.-short #lower { height: 1fr; }
        &.-short #remedy { display: none; }
        &.-lost #charts, &.-lost #steps, &.-lost #lower { opacity: 50%; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("c", "cancel_request", "cancel"),
        Binding("e", "evidence", "evidence"),
        Binding("w", "window", "window"),
        Binding("s", "start_server", "start a server", show=False),
    ]

    def __init__(self) -> None:
        super().__init__()
        self.column_s = COLUMN_CHOICES_S[0]
        self.findings: list[Diagnosis] = []
        self._charts_at_s = float("-inf")

    def compose(self) -> ComposeResult:
        yield TwoEndedLine(id="top")
        with Container(id="body"):
            with Horizontal(id="charts"):
                yield TimeChart("prefill", id="prefill", classes="panel")
                yield TimeChart("decode", id="decode", classes="panel")
            yield StepTimeline(id="steps", classes="panel")
            with Container(id="lower"):
                yield RequestList(id="requests", classes="panel")
                yield MemoryPanel(id="memory", classes="panel")
        with Container(id="absent"):
            yield Static(markup=False)
        yield TwoEndedLine(id="finding")
        yield TwoEndedLine(id="remedy")
        yield Footer(show_command_palette=False, compact=True)

    def on_mount(self) -> None:
        self.query_one("#requests").border_title = "requests"
        self.query_one("#memory").border_title = "memory"
        self.query_one(RequestList).focus()
        self.show()

    def on_resize(self, event: events.Resize) -> None:
        self.set_class(event.size.width < NARROW_COLUMNS, "-narrow")
        self.set_class(event.size.height < SHORT_ROWS, "-short")
        # The charts have their new width only after the layout.
        self.call_after_refresh(self.show)

    def on_feed_changed(self, message: FeedChanged) -> None:
        # Their columns are a second wide, and they are the largest things to draw.
        has_new_column = self.feed.now() - self._charts_at_s >= CHARTS_EVERY_S
        self.show(with_charts=has_new_column)

    # --- showing

    def show(self, *, with_charts: bool = True) -> None:
        """Everything as the feed has it now."""
        if not self.is_drawn:
            return
        feed = self.feed
        self.show_top()
        is_absent = feed.latest is None
        self.set_class(is_absent, "-absent")
        self.set_class(not is_absent and feed.link.state is LinkState.LOST, "-lost")
        if is_absent:
            self.findings = []
            self.query_one("#absent Static", Static).update(absent_text(feed))
            self.query_one("#finding", TwoEndedLine).show([])
            self.query_one("#remedy", TwoEndedLine).show([])
            return
        if with_charts:
            self._charts_at_s = feed.now()
            prefill, decode = self.query_one("#prefill", TimeChart), self.query_one("#decode", TimeChart)
            show_speeds(feed, prefill, decode, self.column_s)
            self._show_steps()
            self._show_finding()
        self._show_requests()
        self._show_memory()

    def _show_steps(self) -> None:
        timeline = self.query_one(StepTimeline)
        history = self.feed.history
        is_absent = self.feed.latest is not None and self.feed.latest.steps is None
        self.set_class(is_absent, "-stepless")
        if is_absent:
            timeline.entitle("steps")
            timeline.show_absent(NO_STEPS)
            return
        timeline.show(list(history.steps)[-max(1, timeline.num_columns) :], target_ms(self.feed))
        timeline.entitle(
            f"steps, ms   [$decode]{DECODE_MARK}[/] decode  [$prefill]{PREFILL_MARK}[/] prefill"
            f"  [$prefill]{MIXED_MARK}[/] both{self._share_text()}",
            self._waits_text(),
        )

    def _waits_text(self) -> str:
        """Gaps and first tokens of the last minute, as many words as there is room for."""
        history, now_s = self.feed.history, self.feed.now()
        for is_short in (False, True):
            parts = [_gap_text(history.gaps(now_s), is_short=is_short)]
            for cache, name in CACHE_WORDS.items():
                parts.append(_ttft_text(name, history.ttft(now_s, cache), is_short=is_short))
            told = "   ".join(filter(None, parts))
            text = told if is_short or not told else f"last minute   {told}"
            if len(text) <= self.size.width - 8:
                break
        return text

    def _share_text(self) -> str:
        share = self.feed.history.prefill_share(self.feed.now())
        if share is None or self.size.width < NARROW_COLUMNS:
            return ""
        percent = round(100 * share)
        return f"     model time  [$prefill]{percent} %[/] prefill  [$decode]{100 - percent} %[/] decode"

    def _show_requests(self) -> None:
        history, snapshot, facts = self.feed.history, self.feed.latest, self.feed.facts
        assert snapshot is not None
        rows = [Row(view, history.eta_s(view)) for view in snapshot.sequences]
        rows += [Row(view) for view in history.just_done(self.feed.now())]
        empty = "No request is running."
        if facts is not None and any("/slots" in sentence for sentence in facts.unknown):
            empty = "This server does not tell its requests."
        panel = self.query_one(RequestList)
        panel.show(rows, empty)
        running = f"{len(snapshot.running)} of {snapshot.num_slots} running"
        waiting = f", {snapshot.num_waiting:,} waiting" if snapshot.num_waiting else ""
        panel.entitle(f"requests  {running}{waiting}")

    def _show_memory(self) -> None:
        feed = self.feed
        note = ""
        if feed.facts is not None and feed.facts.kind is not ServerKind.EDGESERVE:
            note = "this server tells no cells"
        cells = feed.latest.cells if feed.latest else None
        self.query_one(MemoryPanel).show(cells, feed.planned, feed.real, note)

    def _show_finding(self) -> None:
        self.findings = findings(self.feed.facts, self.feed.history, self.feed.now())
        line, remedy = self.query_one("#finding", TwoEndedLine), self.query_one("#remedy", TwoEndedLine)
        if not self.findings:
            remedy.show([])
            unknown = self.feed.facts.unknown if self.feed.facts else ()
            text = f"{len(unknown)} things this server does not tell" if unknown else "nothing stands out"
            line.show([(text, "quiet")], [("[e] which", "quiet")] if unknown else [])
            return
        first, *others = self.findings
        label = ("finding", "stalled") if first.level == "problem" else ("note", "quiet")
        more = f"+{len(others)} more  [e] evidence" if others else "[e] evidence"
        if self.size.width < NARROW_COLUMNS:
            more = f"+{len(others)} [e]" if others else "[e]"
        line.show([label, (f"  {first.sentence}", "plain")], [(more, "quiet")])
        remedy.show([(f"{'':{len(label[0])}}  {first.remedy}", "quiet")])

    # --- acting

    def action_window(self) -> None:
        """The next length of time that a column stands for."""
        index = COLUMN_CHOICES_S.index(self.column_s)
        self.column_s = COLUMN_CHOICES_S[(index + 1) % len(COLUMN_CHOICES_S)]
        assert self.column_s >= BUCKET_S
        self.notify(f"A column is {self.column_s:g} s.", timeout=2)
        self.show()

    def action_start_server(self) -> None:
        """Where no server answers: one with the default model, after a question."""
        if self.feed.latest is not None or self.feed.link.state is not LinkState.LOST:
            return
        name = read_models_list()[0].name

        def answered(yes: bool | None) -> None:
            if yes:
                self.post_message(StartServer([name]))

        question = f"Start a server with {name}?  It is fetched if it is not here, and ends with this screen."
        self.app.push_screen(Question(question, "start it"), answered)

    def action_evidence(self) -> None:
        sections: list[Figures.Section] = [
            (found.sentence, f"{found.remedy} {found.expect}", list(found.figures.items()))
            for found in self.findings
        ]
        unknown = self.feed.facts.unknown if self.feed.facts else ()
        if unknown:
            sections.append(
                ("What this server does not tell", "", [(str(i), s) for i, s in enumerate(unknown, 1)])
            )
        if sections:
            self.app.push_screen(Figures("findings", sections))
        else:
            self.notify("Nothing stands out.", timeout=2)

    def on_request_list_chosen(self, message: RequestList.Chosen) -> None:
        self.app.push_screen(Figures("request", [request_figures(message.view)]))

    def action_cancel_request(self) -> None:
        view = self.query_one(RequestList).chosen
        facts = self.feed.facts
        if view is None or view.status is Status.DONE:
            self.notify("No running request is chosen.", timeout=2)
        elif facts is None or not facts.can_cancel:
            self.notify("This server cannot be asked to cancel a request.", timeout=4)
        else:
            self._ask_to_cancel(view)

    def _ask_to_cancel(self, view: SequenceView) -> None:
        async def answered(yes: bool | None) -> None:
            if yes:
                self.notify(await self.feed.cancel(view.request_id), timeout=3)

        state = f"It is in {view.status.value}, {view.num_output:,} tokens out."
        if view.status is Status.WAITING:
            state = "It waits; nothing of it has run."
        self.app.push_screen(
            Question(f"Cancel {words.short_id(view.request_id)}?  {state}", "cancel it"), answered
        )


def _gap_text(gaps: Summary, *, is_short: bool) -> str:
    """Percentiles with their count; the short form keeps the middle and the end."""
    if gaps.p50 is None or gaps.max is None:
        return ""
    parts = [("p50", gaps.p50), ("p90", gaps.p90), ("p99", gaps.p99), ("longest", gaps.max)]
    if is_short:
        parts = [("p50", gaps.p50), ("p99", gaps.p99) if gaps.p99 is not None else ("longest", gaps.max)]
    shown = "  ".join(f"{name} {words.duration(value)}" for name, value in parts if value is not None)
    return f"gap {shown} (n {gaps.n:,})"


def _ttft_text(what: str, ttft: Summary, *, is_short: bool) -> str:
    if ttft.p50 is None:
        return ""
    return f"ttft {what} {'' if is_short else 'p50 '}{words.duration(ttft.p50)} (n {ttft.n})"
