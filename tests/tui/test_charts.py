"""Bars, scales and meters: what is drawn says what was handed in."""

from __future__ import annotations

import pytest
from rich.style import Style
from screen_text import screen_lines
from textual.app import App

from tui.charts import StepTimeline, TimeChart
from tui.snapshot import Step
from tui.strips import axis_text, bar_character, meter, nice_top
from tui.themes import variable_defaults


@pytest.mark.parametrize(
    ("value", "top"), [(0, 1), (float("nan"), 1), (0.7, 0.8), (1, 1), (61, 80), (132, 150), (5701, 6000)]
)
def test_an_axis_ends_at_a_round_number_that_holds_the_value(value, top):
    assert nice_top(value) == pytest.approx(top)


def test_axis_texts_are_short():
    assert [axis_text(value) for value in (0.5, 7.5, 40, 1500, 12000)] == ["0.5", "7.5", "40", "1,500", "12k"]


def test_a_bar_fills_its_rows_from_below():
    rows = [bar_character(50, 100, row, 3) for row in range(3)]
    assert rows == ["█", "▄", " "]


def test_what_is_not_nothing_is_seen_and_nothing_is_not():
    assert bar_character(0.001, 1000, 0, 4) == "▁"
    assert bar_character(0, 1000, 0, 4) == " "
    assert bar_character(5000, 1000, 3, 4) == "█", "what is beyond the axis ends at it"


def test_parts_of_a_meter_never_exceed_the_whole():
    style = Style()
    for shares in ((0.333, 0.333, 0.334), (0.01, 0.01, 0.98), (0.5, 0.6, 0.1)):
        cells = meter([(share, "#", style) for share in shares], 10, (".", style))
        assert len(cells) == 10
    assert [text for text, _ in meter([(0.001, "#", style)], 5, (".", style))] == list("#....")


class OneWidget(App[None]):
    def __init__(self, widget):
        super().__init__()
        self.widget = widget

    def get_theme_variable_defaults(self):
        return variable_defaults(is_dark=True)

    def compose(self):
        yield self.widget


async def test_a_time_chart_has_axes_units_of_time_and_the_target():
    chart = TimeChart("decode")
    async with OneWidget(chart).run_test(size=(46, 8)) as pilot:
        chart.show([None] * 38 + [20.0, 40.0], 1.0, target=30.0)
        await pilot.pause()
        lines = screen_lines(pilot.app)
    assert lines[0].startswith("   40┤")
    assert lines[3].startswith("   20┤")
    assert lines[6].startswith("    0┼") and "┬" in lines[6]
    assert "-20 s" in lines[7] and lines[7].endswith("now")
    assert lines[1][6:44] == "╌" * 38, "the target crosses the empty columns"
    assert lines[0][-1] == "█" and lines[3][-2] == "█" and lines[0][-2:-1] == " "


async def test_steps_say_their_kind_by_shape():
    timeline = StepTimeline()
    steps = [Step(1, 0.02, 1, 0, 1.0), Step(2, 0.08, 0, 64, 2.0), Step(3, 0.1, 2, 64, 3.0)]
    async with OneWidget(timeline).run_test(size=(30, 6)) as pilot:
        timeline.show(steps, 90.0)
        await pilot.pause()
        lines = screen_lines(pilot.app)
    assert lines[-1].endswith("▮▯◧")
    assert lines[0].startswith("  100┤")
    assert lines[4][-3:] == "██▁", "two decodes among 66 tokens are an eighth of a row below the prefill"
    assert "╌" in lines[0], "the target lies in the topmost row"
