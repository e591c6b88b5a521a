"""What stands on a made-up terminal, as lines of text; and waiting for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from textual import events
from textual.app import App
from textual.geometry import Size
from textual.pilot import Pilot

LOOK_S = 0.03
_CHARACTERS = {"question_mark": "?"}
"""What keys of a longer name type; the others type their name, or nothing."""


def screen_lines(app: App[None]) -> list[str]:
    """The rows of the screen as they would be seen, without colours."""
    # An exported picture says the same and takes many times longer, which counts where a test waits for it.
    strips = app.screen._compositor.render_strips()
    return [strip.text.rstrip() for strip in strips]


def screen_text(app: App[None]) -> str:
    return "\n".join(screen_lines(app))


async def until(pilot: Pilot[None], holds: Callable[[], bool], what: str, at_most_s: float = 60.0) -> None:
    """Let the application go on until something holds.

    Counted in looks and not by a clock: while this process is stopped or starved, so is the application.
    """
    for _ in range(round(at_most_s / LOOK_S)):
        if holds():
            return
        # Not the pilot's own pause, which waits for an idle processor: the engine runs in this process.
        await asyncio.sleep(LOOK_S)
    raise AssertionError(f"still waiting: {what}\n{screen_text(pilot.app)}")


async def until_shown(pilot: Pilot[None], text: str) -> None:
    """Until a text can be read on the screen."""
    await until(pilot, lambda: text in screen_text(pilot.app), f"for {text!r} on the screen")


def resize(pilot: Pilot[None], columns: int, rows: int) -> None:
    """Another size. Not the pilot's way, which waits for an idle processor."""
    size = Size(columns, rows)
    pilot.app.post_message(events.Resize(size, size))


async def press(pilot: Pilot[None], *keys: str) -> None:
    """Keys one after the other, without waiting for an idle processor."""
    for key in keys:
        pilot.app.post_message(events.Key(key, _CHARACTERS.get(key)))
        await asyncio.sleep(0.05)
