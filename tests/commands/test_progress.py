"""The line that shows a download: redrawn and taken away on a terminal, a few plain lines elsewhere."""

from __future__ import annotations

import io
from itertools import count

from edgeserve.commands.progress import ERASE_LINE, ProgressLine
from edgeserve.download import Progress

REPORTS = [Progress("model.gguf", "connect")] + [
    Progress("model.gguf", "download", done, 1000, 100.0, 5.0) for done in range(0, 1001, 50)
]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(stream: io.StringIO, term: str, seconds_apart: float = 1.0) -> str:
    times = (seconds_apart * number for number in count())
    line = ProgressLine(stream, {"TERM": term, "NO_COLOR": "1"}, clock=lambda: next(times))
    for report in REPORTS:
        line(report)
    line.close()
    return stream.getvalue()


def test_on_a_terminal_one_line_is_redrawn_and_disappears() -> None:
    text = shown(Terminal(), "xterm")
    assert "\n" not in text
    assert text.count(ERASE_LINE) == len(REPORTS) + 1
    assert "50 %" in text
    assert text.endswith(ERASE_LINE)


def test_elsewhere_the_first_line_comes_at_once_and_the_others_seldom() -> None:
    for stream, term in ((io.StringIO(), "xterm"), (Terminal(), "dumb")):
        lines = shown(stream, term).splitlines()
        assert lines[0].startswith("model.gguf")
        assert 1 < len(lines) < len(REPORTS) / 2
        assert not any("\r" in line for line in lines)


def test_a_short_download_elsewhere_takes_one_line() -> None:
    assert len(shown(io.StringIO(), "xterm", seconds_apart=0.01).splitlines()) == 1


def test_a_name_cannot_move_the_cursor() -> None:
    stream = io.StringIO()
    ProgressLine(stream, {})(Progress("bad\x1b[2Jname", "download"))
    assert "\x1b" not in stream.getvalue()
