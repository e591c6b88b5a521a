"""Panels that repaint only what has changed: they always show what a panel that is drawn afresh would."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest
from rich.style import Style
from screen_text import press, resize, screen_lines, screen_text, until, until_shown
from textual.app import App
from textual.containers import Vertical
from tui_server import llama_server, slot

from tui.app import EdgeserveApp
from tui.charts import StepTimeline, TimeChart
from tui.feed import Feed
from tui.memory_panel import MemoryPanel
from tui.request_list import RequestList, Row
from tui.server_memory import PlannedMemory, ProcessMemory
from tui.snapshot import Cells, SequenceView, Status, Step
from tui.strips import strip_of
from tui.themes import THEME_NAMES, full_name, themes, variable_defaults
from tui.titled import Titled, changed

PLANNED = PlannedMemory(90 << 20, 45 << 20, 30 << 20, 1 << 20, True)
REAL = ProcessMemory(1, 200 << 20, 90 << 20)


class Panels(App[None]):
    """The panels below each other, in frames."""

    CSS = "Titled { border: round $frame; height: 1fr; }"

    def __init__(self) -> None:
        super().__init__()
        self.memory, self.requests = MemoryPanel(), RequestList()
        self.chart, self.steps = TimeChart("decode"), StepTimeline()
        for theme in themes():
            self.register_theme(theme)
        self.theme = full_name("dark")

    def get_theme_variable_defaults(self):
        return variable_defaults(is_dark=self.current_theme.dark)

    def compose(self):
        with Vertical():
            yield from (self.memory, self.requests, self.chart, self.steps)

    def fill(self):
        for panel in (self.memory, self.requests, self.chart, self.steps):
            panel.entitle("title  [b $prefill]12[/]", "below")
        self.memory.show(Cells(100, 40, 20), PLANNED, REAL)
        self.requests.show([Row(view(index)) for index in range(3)], "None.")
        self.chart.show([10.0, None, 30.0, 5.0], 1.0, 20.0)
        self.steps.show([Step(1, 0.02, 1, 0, 1.0), Step(2, 0.08, 0, 64, 2.0), Step(3, 0.1, 2, 9, 3.0)], 60.0)


def view(number, **fields):
    return SequenceView(f"request-{number}", Status.DECODE, **{"num_prompt": 10, "num_output": 3, **fields})


def seen(app):
    """Text and style of everything on the screen."""
    app.screen._compositor.render_strips()
    return [[(part.text, part.style) for part in strip] for strip in app.screen._compositor.render_strips()]


async def shown_afresh(pilot):
    """What the same screen looks like once every panel has been drawn anew."""
    for panel in pilot.app.query(Titled):
        panel._styles_cache.clear()
        panel.refresh()
    await pilot.pause()
    return seen(pilot.app)


def colour_of(app, text):
    """The colour of the first stretch of the screen that holds a text."""
    strips = app.screen._compositor.render_strips()
    return next(part.style.color.name for strip in strips for part in strip if text in part.text)


async def test_rows_that_come_change_move_and_go_leave_nothing_behind():
    chance = random.Random(7)
    app = Panels()
    async with app.run_test(size=(100, 40)) as pilot:
        app.requests.focus()
        rows: list[Row] = []
        for turn in range(60):
            act = chance.choice(("add", "add", "drop", "change", "swap", "clear", "back", "move"))
            before = rows
            if act == "add":
                at = chance.randint(0, len(rows))
                rows = [*rows[:at], Row(view(turn)), *rows[at:]]
            elif act == "drop" and rows:
                rows = [row for row in rows if row is not chance.choice(rows)]
            elif act == "change" and rows:
                at = chance.randrange(len(rows))
                changed_view = replace(rows[at].view, num_output=rows[at].view.num_output + 1)
                rows = [*rows[:at], Row(changed_view), *rows[at + 1 :]]
            elif act == "swap":
                rows = rows[::-1]
            elif act == "clear" and turn % 3 == 0:
                rows = []
            elif act == "move":
                app.requests.action_move(chance.choice((1, 1, 1, -1)))
            app.requests.show(rows, "No request is running.")
            if act == "back":
                app.requests.show(before[:1], "No request is running.")
                app.requests.show(before, "No request is running.")
            await pilot.pause()
            assert seen(app) == await shown_afresh(pilot), (turn, act)


async def test_memory_that_comes_changes_and_goes_leaves_nothing_behind():
    app = Panels()
    some, more = Cells(1000, 400, 200), Cells(1000, 500, 0)
    looks = [
        (None, None, None, ""),
        (some, PLANNED, REAL, ""),
        (more, PLANNED, REAL, ""),
        (some, PLANNED, REAL, ""),
        (some, None, None, "a note"),
        (None, None, replace(REAL, file_bytes=None), "a note"),
        (None, None, None, ""),
        (some, PLANNED, REAL, ""),
    ]
    async with app.run_test(size=(60, 50)) as pilot:
        for look in looks:
            app.memory.show(*look)
            await pilot.pause()
            assert seen(app) == await shown_afresh(pilot), look


async def test_speeds_and_steps_that_come_and_go_leave_nothing_behind():
    app = Panels()
    steps = [Step(number, 0.01 * (number % 5 + 1), number % 2, 8, number / 10) for number in range(1, 90)]
    async with app.run_test(size=(60, 40)) as pilot:
        for count in (0, 1, 50, 89, 50, 0, 50):
            values = [step.duration_s * 1e3 for step in steps[:count]]
            app.chart.show(values, 1.0, 30.0 if count % 2 else None)
            app.steps.show(steps[:count][-54:], 30.0 if count % 2 else None)
            await pilot.pause()
            assert app.steps.steps == steps[:count][-54:]
            assert seen(app) == await shown_afresh(pilot), count
        app.steps.show_absent("not told")
        await pilot.pause()
        assert "not told" in screen_text(app)
        app.steps.show([], None)
        await pilot.pause()
        assert "not told" not in screen_text(app)
        assert seen(app) == await shown_afresh(pilot)


async def test_a_theme_reaches_titles_and_lines_that_are_not_told_again():
    app = Panels()
    async with app.run_test(size=(60, 40)) as pilot:
        app.fill()
        for name in ("light", "contrast", "dark"):
            app.theme = full_name(name)
            # As when the feed speaks before the theme has reached the widgets.
            app.memory.show(Cells(100, 41 + THEME_NAMES.index(name), 20), PLANNED, REAL)
            await pilot.pause()
            variables = app.get_css_variables()
            assert colour_of(app, "12") == variables["prefill"]
            assert colour_of(app, " cells ") == variables["quiet"]
            assert colour_of(app, "▒") == variables["cached"]
            assert seen(app) == await shown_afresh(pilot), name


@pytest.mark.parametrize("without_colour", [False, True])
async def test_panels_can_be_dimmed_and_stripped_of_colour(monkeypatch, without_colour):
    if without_colour:
        monkeypatch.setenv("NO_COLOR", "1")
    app = Panels()
    async with app.run_test(size=(60, 60)) as pilot:
        app.fill()
        await pilot.pause()
        assert "title  12" in screen_text(app)
        app.query_one(Vertical).styles.opacity = 0.5
        await pilot.pause()
        assert "▒ 20 reusable" in screen_text(app)
        assert seen(app) == await shown_afresh(pilot)


async def test_another_size_shows_as_much_as_there_is_room_for():
    app = Panels()
    steps = [Step(number, 0.02, 1, 0, number / 10) for number in range(1, 200)]
    async with app.run_test(size=(60, 40)) as pilot:
        app.fill()
        for columns, rows in ((60, 40), (100, 48), (40, 30), (160, 60)):
            resize(pilot, columns, rows)
            await until(pilot, lambda wide=columns: app.steps.size.width == wide - 2, "for the layout")
            app.steps.show(steps[-app.steps.num_columns :], None)
            await pilot.pause()
            line = next(line for line in screen_lines(app) if "step " in line)
            assert line.count("▮") == app.steps.num_columns
            assert seen(app) == await shown_afresh(pilot), columns


def test_a_row_has_its_width_and_every_part_a_style():
    blank, red = Style(), Style(color="red")
    for cells in ([], [("", red)], [("ab", red), ("c", red), ("d", blank)], [("a" * 20, red)]):
        strip = strip_of(cells, 10, blank)
        assert strip.cell_length == 10
        assert all(part.style is not None for part in strip)
    assert [part.text for part in strip_of([("a", red), ("b", red)], 2, blank)] == ["ab"]


def test_what_differs_between_two_sequences_is_told_by_place():
    assert changed("abc", "abc") == []
    assert changed("abc", "axc") == [1]
    assert changed("abc", "b") == [0, 1, 2]
    assert changed("", "ab") == [0, 1]


async def test_a_server_that_goes_dims_what_was_seen_at_any_size():
    with llama_server([slot(0, decoded=10)], None) as stand_in:
        app = EdgeserveApp(Feed(stand_in.url))
        runner = app.run_test(size=(140, 44))
        pilot = await runner.__aenter__()
        await until_shown(pilot, "1 of 1 running")
    try:
        await until(pilot, lambda: app.screen.has_class("-lost"), "for the loss")
        await until_shown(pilot, "server gone, again in")
        assert "1 of 1 running" in screen_text(app), "what was seen stays"
        await runner.__aexit__(None, None, None)
    except BaseException:
        app.exit()
        raise


async def test_a_screen_that_comes_back_shows_what_is_now_in_the_theme_that_is_now():
    with llama_server([slot(0, decoded=10)], {}) as stand_in:
        app = EdgeserveApp(Feed(stand_in.url))
        async with app.run_test(size=(120, 40)) as pilot:
            await until_shown(pilot, "1 of 1 running")
            requests = app.query_one(RequestList)
            await press(pilot, "f4")
            await until(pilot, lambda: app.current_mode == "bench", "for the benchmarks")
            app.theme = full_name("light")
            stand_in.slots.append(slot(1, decoded=10))
            await until(pilot, lambda: len(app.feed.latest.running) == 2, "for another request")
            assert len(requests.rows) == 1, "nobody sees it"
            await press(pilot, "f1")
            await until(pilot, lambda: app.current_mode == "monitor", "for the monitor")
            await until_shown(pilot, "2 of 2 running")
            assert len(requests.rows) == 2
            assert colour_of(app, " cells ") == app.get_css_variables()["quiet"]
            await until(pilot, lambda: colour_of(app, "▮") == app.get_css_variables()["decode"], "for it")


async def test_what_stood_out_at_one_server_is_not_shown_of_the_next():
    with llama_server([slot(0, decoded=10)], {"requests_deferred": 3}) as stand_in:
        app = EdgeserveApp(Feed(stand_in.url))
        async with app.run_test(size=(120, 40), notifications=True) as pilot:
            await until(pilot, lambda: bool(app.screen.findings), "for a finding")
            app.feed.turn_to("127.0.0.1:9")
            app._follow()
            await until_shown(pilot, "No server answers at 127.0.0.1:9")
            await press(pilot, "e")
            await until_shown(pilot, "Nothing stands out.")


async def test_a_list_that_empties_and_fills_behind_a_dialog_is_right_after_it():
    with llama_server([slot(index, decoded=10) for index in range(4)], {}) as stand_in:
        app = EdgeserveApp(Feed(stand_in.url))
        async with app.run_test(size=(120, 40)) as pilot:
            await until_shown(pilot, "4 of 4 running")
            monitor, requests = app.screen, app.query_one(RequestList)
            await press(pilot, "f5")
            await until(pilot, lambda: app.screen is not monitor, "for the keys")
            for entry in stand_in.slots:
                entry["is_processing"] = False
            await until(pilot, lambda: not app.feed.latest.running, "for the end of all")
            stand_in.slots[2] = slot(2, decoded=77)
            await until(pilot, lambda: bool(app.feed.latest.running), "for one")
            await press(pilot, "escape")
            await until(pilot, lambda: app.screen is monitor, "for the monitor")
            await until_shown(pilot, "1 of 4 running")
            await until(pilot, lambda: requests.rows[0].view.num_output == 77, "for its row")
            row = re.compile(r"›72 +▮ decode +500 \(100\) +77 ")
            await until(pilot, lambda: bool(row.search(screen_text(app))), "for it on the screen")
