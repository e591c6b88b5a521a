"""What stands on a made-up terminal, as lines of text; and waiting for it."""

from __future__ import annotations

import html
import re
import time
from collections import defaultdict
from collections.abc import Callable

from textual.app import App
from textual.pilot import Pilot

_TEXT = re.compile(r'<text class="[^"]*-r\d+" x="([\d.]+)" y="([\d.]+)"[^>]*>([^<]*)</text>')
_COLUMN_PIXELS = 12.2


def screen_lines(app: App[None]) -> list[str]:
    """The rows of the screen as they would be seen, without colours."""
    rows: dict[float, dict[int, str]] = defaultdict(dict)
    for x, y, text in _TEXT.findall(app.export_screenshot()):
        rows[float(y)][round(float(x) / _COLUMN_PIXELS)] = html.unescape(text).replace("\xa0", " ")
    lines = []
    for y in sorted(rows):
        line = ""
        for column, text in sorted(rows[y].items()):
            line = line.ljust(column) + text
        lines.append(line.rstrip())
    return lines


def screen_text(app: App[None]) -> str:
    return "\n".join(screen_lines(app))


async def until(pilot: Pilot[None], holds: Callable[[], bool], what: str, at_most_s: float = 30.0) -> None:
    """Let the application go on until something holds."""
    deadline = time.monotonic() + at_most_s
    while not holds():
        assert time.monotonic() < deadline, f"still waiting: {what}\n{screen_text(pilot.app)}"
        await pilot.pause(0.05)


async def until_shown(pilot: Pilot[None], text: str) -> None:
    """Until a text can be read on the screen."""
    await until(pilot, lambda: text in screen_text(pilot.app), f"for {text!r} on the screen")
