"""`edgeserve tui`: the application that looks at a server over HTTP."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from edgeserve.errors import UsageError
from tui.app import EdgeserveApp, Picture
from tui.app import run as run_app
from tui.themes import THEME_NAMES


def run(
    url: str | None,
    api_key: str | None,
    *,
    no_mouse: bool,
    screen: str,
    theme: str,
    picture: tuple[Path, str, float] | None,
) -> int:
    """Show it until somebody leaves, or write a picture: its file, its size as text, and the seconds to watch
    before. Raises UsageError for a screen, a theme, a size or a time that is none."""
    if theme not in THEME_NAMES:
        raise UsageError(f"There is no theme {theme}.", f"One of: {', '.join(THEME_NAMES)}.")
    if screen not in EdgeserveApp.MODES:
        raise UsageError(f"There is no screen {screen}.", f"One of: {', '.join(EdgeserveApp.MODES)}.")
    # With a driver of its own, as textual-serve gives to show it in a browser, Textual needs no terminal.
    has_terminal = "TEXTUAL_DRIVER" in os.environ or (sys.stdin.isatty() and sys.stdout.isatty())
    if picture is None and not has_terminal:
        raise UsageError("The TUI needs a terminal.", "--screenshot FILE writes one screen without.")
    run_app(
        url or os.environ.get("EDGESERVE_URL") or None,
        api_key or os.environ.get("EDGESERVE_API_KEY") or os.environ.get("LLAMA_API_KEY"),
        no_mouse=no_mouse or os.environ.get("EDGESERVE_NO_MOUSE", "") not in ("", "0"),
        picture=_picture(*picture) if picture is not None else None,
        mode=screen,
        theme=theme,
    )
    return 0


def _picture(path: Path, size: str, wait_s: float) -> Picture:
    if not 0 < wait_s <= 3600:
        raise UsageError("A screenshot waits for more than 0 and at most 3600 seconds.")
    return Picture(path, _size(size), wait_s)


def _size(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d{2,3})x(\d{2,3})", text)
    if found is None:
        raise UsageError(f"{text} is no size.", "Columns and rows, such as 100x30.")
    return int(found[1]), int(found[2])
