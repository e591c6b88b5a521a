from __future__ import annotations

import io

import pytest

from edgeserve.ink import Ink, can_redraw, format_ms, ink_for, printable, significant, without_colour


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("environ", "on_terminal", "on_pipe"),
    [
        ({}, True, False),
        ({"NO_COLOR": "1"}, False, False),
        ({"NO_COLOR": ""}, True, False),
        ({"FORCE_COLOR": "1"}, True, True),
        ({"FORCE_COLOR": "0"}, True, False),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, False, False),
        ({"TERM": "dumb"}, False, False),
    ],
)
def test_when_there_is_colour(environ: dict[str, str], on_terminal: bool, on_pipe: bool) -> None:
    assert ink_for(Screen(), environ).enabled is on_terminal
    assert ink_for(io.StringIO(), environ).enabled is on_pipe


def test_a_dumb_terminal_cannot_take_a_line_back() -> None:
    assert can_redraw(Screen(), {})
    assert not can_redraw(Screen(), {"TERM": "dumb"})
    assert not can_redraw(io.StringIO(), {"FORCE_COLOR": "1"})


def test_colour_wraps_and_unwraps() -> None:
    assert without_colour(Ink(True)("x", "prefill")) == "x" != Ink(True)("x", "prefill")
    assert Ink(False)("x", "prefill") == "x"


def test_control_characters_become_visible() -> None:
    assert printable("a\x1b[2Jb\x07\x7f\x9b\r\n\tc") == "a␛[2Jb␇␡\ufffd\n\tc"


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.2124, "212 ms"), (0.0134, "13.4 ms"), (9.9, "9,900 ms"), (12.44, "12.4 s"), (140, "140 s")],
)
def test_times(seconds: float, shown: str) -> None:
    assert format_ms(seconds) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [(7.456, "7.46"), (9.996, "10.0"), (74.62, "74.6"), (99.96, "100"), (412.4, "412"), (1240, "1,240")],
)
def test_three_digits(value: float, shown: str) -> None:
    assert significant(value) == shown
