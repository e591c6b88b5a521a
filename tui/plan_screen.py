"""Will it fit, how fast, and how should it run: a form, bars that move with it, reasons and alternatives.

Owns the layout, the keys and the rhythm: an estimate at every change, llama.cpp's own figures (a dry run in a
child process) once the form rests. Every number is the planner's.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import ClassVar

from rich.text import Text
from textual import events, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.timer import Timer
from textual.widgets import Footer, Input, Label, Static

from edgeserve.errors import EdgeserveError
from edgeserve.folders import config_dir
from edgeserve.ink import printable
from edgeserve.model_list import read_models_list
from edgeserve.planner.plan import Option, Plan
from tui.clipboard import copy
from tui.dialogs import Question
from tui.feed_screen import FeedScreen
from tui.lines import TwoEndedLine
from tui.messages import FeedChanged, StartServer
from tui.pick_list import PickList, known_models
from tui.plan_fields import PlanField
from tui.plan_query import THIS_MACHINE, PlanDesk, PlanForm, device_names, name_of
from tui.plan_texts import (
    by_context,
    command_of,
    flags_of,
    labelled_text,
    paragraphs,
    pool_parts,
    profile_text,
    side_by_side,
    startable,
    titled_table,
)
from tui.pool_bars import PoolBar, PoolBars

ESTIMATE_AFTER_S, PROVE_AFTER_S = 0.1, 1.2
NARROW_COLUMNS = 100
# From there on the tables stand beside the text, and every part of the memory has a row.
WIDE_COLUMNS, TALL_ROWS = 170, 44
_FIELDS = (
    ("model", "model"),
    ("device", "device"),
    ("n_ctx", "context -c"),
    ("n_seq_max", "sequences -np"),
    ("n_gpu_layers", "layers -ngl"),
    ("kv_type", "kv type"),
    ("min_ctx", "each at least"),
    ("prefer", "prefer"),
)


class PlanScreen(FeedScreen):
    """One form, one plan."""

    AUTO_FOCUS = "#n_ctx"
    CSS = """
    PlanScreen {
        background: $background;
        & .panel { border: round $frame; border-title-color: $foreground; border-subtitle-color: $quiet; }
        & .panel:focus-within { border: round $frame-focus; }
        & #columns { height: 1fr; }
        & #form { width: 40; padding: 0 1; }
        &.-narrow #form { width: 34; }
        & .row { height: 1; margin: 0 0 1 0; & Label { width: 15; color: $quiet; } }
        & .row Input { width: 1fr; height: 1; border: none; padding: 0 1; background: $panel; }
        & #memory { height: auto; padding: 0 1; }
        & #plan { height: 1fr; padding: 0 1; scrollbar-size-vertical: 1; scrollbar-gutter: stable; }
        & #plan Static { width: 100%; margin: 0 0 1 0; }
        & #tables { width: 100%; height: auto; }
        &.-wide #plan { layout: horizontal; }
        &.-wide #plan #text { width: 1fr; margin: 0 3 0 0; }
        &.-wide #plan #tables { width: 72; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+o", "pick_model", "model", priority=True),
        Binding("ctrl+d", "pick_device", "device", priority=True),
        Binding("ctrl+r", "start", "start", priority=True),
        Binding("ctrl+y", "copy_command", "copy", priority=True),
        Binding("ctrl+s", "save_profile", "save", priority=True),
    ]

    def __init__(self, desk: PlanDesk | None = None, profiles: Path | None = None) -> None:
        super().__init__()
        self.desk = desk or PlanDesk()
        self.plan: Plan | None = None
        self.error = ""
        self._profiles = profiles or config_dir() / "plans"
        self._planned_for: PlanForm | None = None
        self._contexts: list[Option] = []
        self._pending_asks: list[Timer] = []
        self._guessed_model = ""

    def compose(self) -> ComposeResult:
        yield TwoEndedLine(id="top")
        with Horizontal(id="columns"):
            with VerticalScroll(id="form", classes="panel", can_focus=False):
                for name, label in _FIELDS:
                    with Horizontal(classes="row"):
                        yield Label(label)
                        yield PlanField(name, self._initial(name))
            with Vertical():
                yield PoolBars(id="memory", classes="panel")
                with VerticalScroll(id="plan", classes="panel"):
                    yield Static(id="text")
                    with Vertical(id="tables"):
                        yield Static(id="table")
                        yield Static(id="contexts")
        yield Footer(show_command_palette=False, compact=True)

    def _initial(self, name: str) -> str:
        """The watched server's model on this machine; without one, the list's first."""
        if name == "device":
            return THIS_MACHINE
        if name != "model":
            return ""
        path = self.feed.facts.model_path if self.feed.facts else ""
        if path and Path(path).is_file():
            return name_of(path)
        name = read_models_list()[0].name
        self._guessed_model = "" if self.feed.facts else name
        return name

    def on_mount(self) -> None:
        self.query_one("#form").border_title = "what for"
        self.query_one("#form").border_subtitle = "empty: the plan chooses · ↑↓ step"
        self.query_one("#memory").border_title = "memory"
        self.query_one("#plan").border_title = "plan"
        self.show()
        self._restart()

    def on_resize(self, event: events.Resize) -> None:
        self.set_class(event.size.width < NARROW_COLUMNS, "-narrow")
        self.set_class(event.size.width >= WIDE_COLUMNS, "-wide")
        self.query_one(PoolBars).has_room = event.size.height >= TALL_ROWS
        if self.plan is not None:
            self.call_after_refresh(self._show_plan, self.plan)

    def on_feed_changed(self, message: FeedChanged) -> None:
        self.show()
        if self._guessed_model and self.feed.facts is not None and self.is_drawn:
            # The server was not known yet when the form was made.
            field = self.query_one("#model", Input)
            if field.value == self._guessed_model:
                field.value = self._initial("model")
            self._guessed_model = ""

    def show(self) -> None:
        """The line above; the plan does not depend on the feed."""
        if not self.is_drawn:
            return
        self.show_top()

    @property
    def form(self) -> PlanForm:
        """As typed now."""
        return PlanForm(**{name: self.query_one(f"#{name}", Input).value for name, _ in _FIELDS})

    # --- planning

    def on_input_changed(self) -> None:
        self._restart()

    def _restart(self) -> None:
        """The form has changed: estimate at once, prove when it rests."""
        for timer in self._pending_asks:
            timer.stop()
        self._pending_asks = [
            self.set_timer(ESTIMATE_AFTER_S, lambda: self._ask(dry_run=False)),
            self.set_timer(PROVE_AFTER_S, lambda: self._ask(dry_run=True)),
        ]

    def _ask(self, *, dry_run: bool) -> None:
        self._answer(self.form, dry_run)

    @work(thread=True, group="plan")
    def _answer(self, form: PlanForm, dry_run: bool) -> None:
        """On a thread: reading a header, and above all a dry run, take their time."""
        try:
            answer = self.desk.answer(form, dry_run=dry_run)
            plan: Plan | EdgeserveError = answer
            contexts = self.desk.other_contexts(form, answer)
        except EdgeserveError as error:
            plan, contexts = error, []
        self.app.call_from_thread(self._take, form, plan, contexts)

    def _take(self, form: PlanForm, plan: Plan | EdgeserveError, contexts: list[Option]) -> None:
        if form != self.form:
            return  # typed on meanwhile
        if isinstance(plan, EdgeserveError):
            self.plan, self.error = None, str(plan)
            self.query_one("#text", Static).update(Text(printable(self.error)))
            self.query_one("#table", Static).update("")
            self.query_one("#contexts", Static).update("")
            self.query_one(PoolBars).show([])
            return
        is_proven_already = self._planned_for == form and self.plan is not None and self.plan.proof.is_dry_run
        if is_proven_already and not plan.proof.is_dry_run:
            return
        self.plan, self.error, self._planned_for = plan, "", form
        self._contexts = contexts
        self._show_plan(plan)

    # --- showing

    def _show_plan(self, plan: Plan) -> None:
        if not self.is_mounted:
            return
        self._show_bars(plan)
        self._show_placeholders(plan)
        text = labelled_text(paragraphs(plan, self.form.model), self._width_of("#text"))
        self.query_one("#text", Static).update(text)
        width = self._width_of("#tables")
        table = titled_table("instead", side_by_side(plan), width) if plan.alternatives else Text()
        self.query_one("#table", Static).update(table)
        self.query_one("#table").display = bool(plan.alternatives)
        rows = by_context(plan, self._contexts, width)
        contexts = titled_table("more or less context", rows, width) if self._contexts else Text()
        self.query_one("#contexts", Static).update(contexts)
        facts = plan.model
        panel = self.query_one("#plan")
        panel.border_title = "plan" if plan.fits else "plan  [b $stalled]it does not fit[/]"
        about = (
            f"{facts.name} {facts.quant} · {facts.n_layer} layers · trained for {facts.n_ctx_train:,} tokens"
        )
        panel.border_subtitle = printable(about).replace("[", "\\[")

    def _width_of(self, name: str) -> int:
        return max(20, self.query_one(name).size.width)

    def _show_bars(self, plan: Plan) -> None:
        report = plan.best.report
        bars = [
            PoolBar(
                use.pool.name,
                pool_parts(report, use.pool.devices),
                use.high_bytes,
                use.pool.usable_bytes,
                use.pool.total_bytes,
            )
            for use in plan.best.uses
            if report.devices
        ]
        self.query_one(PoolBars).show(bars)
        self.query_one("#memory").border_subtitle = printable(plan.target.name).replace("[", "\\[")

    def _show_placeholders(self, plan: Plan) -> None:
        """What the plan chose, where nothing was typed."""
        settings = plan.settings
        # llama.cpp counts the output as a layer.
        layers = f"all {plan.model.n_layer + 1}"
        if settings.n_gpu_layers >= 0:
            layers = f"{settings.n_gpu_layers}"
        chosen = {
            "n_ctx": f"{settings.n_ctx:,}",
            "n_seq_max": f"{settings.n_seq_max}",
            "n_gpu_layers": layers if plan.target.accelerators else "no GPU",
            "kv_type": settings.type_k,
            "min_ctx": f"{plan.best.choice.n_ctx_seq:,}",
            "prefer": plan.goals.prefer,
        }
        for name, text in chosen.items():
            self.query_one(f"#{name}", Input).placeholder = text

    # --- keys

    def action_pick_model(self) -> None:
        self._pick("models", known_models(), "#model")

    def action_pick_device(self) -> None:
        self._pick("devices", [(name, name) for name in device_names()], "#device")

    def _pick(self, title: str, choices: list[tuple[str, str]], field: str) -> None:
        def chosen(value: str | None) -> None:
            if value is not None:
                self.query_one(field, Input).value = value

        self.app.push_screen(PickList(title, choices), chosen)

    def action_copy_command(self) -> None:
        command = command_of(self.plan, self.form.model) if self.plan is not None else ""
        if not command:
            self.notify("There is no plan to copy.", timeout=2)
            return
        copy(self.app, command, "The command")

    def action_save_profile(self) -> None:
        if self.plan is None or startable(self.plan) is None:
            self.notify("There is no plan to save.", timeout=2)
            return
        stem = "".join(letter if letter.isalnum() else "-" for letter in self.plan.model.name.lower())
        path = self._profiles / f"{stem.strip('-') or 'plan'}.toml"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(profile_text(self.plan, self.form.model), encoding="utf-8")
        except OSError as error:
            self.notify(f"{path} could not be written: {error.strerror}.", severity="warning")
            return
        self.notify(f"edgeserve serve --config {shlex.quote(str(path))}", title="Saved", timeout=8)

    def action_start(self) -> None:
        """Run the suggestion as a server that ends with this application; what fits instead of one that does
        not, after a question."""
        settings = startable(self.plan) if self.plan is not None else None
        if self.plan is None or settings is None:
            self.notify("Only a plan that fits can be started.", timeout=3)
            return
        if self.form.device.strip() not in ("", THIS_MACHINE):
            self.notify("This plan is for another device; copy its command there.", timeout=4)
            return
        start = StartServer([self.form.model, *flags_of(self.plan, settings)])
        if self.plan.fits:
            self.post_message(start)
            return

        def answered(yes: bool | None) -> None:
            if yes:
                self.post_message(start)

        flags = " ".join(start.arguments[1:])
        question = f"What was asked for does not fit.  Start what does?\n\n{flags}"
        self.app.push_screen(Question(question, "start it"), answered)
