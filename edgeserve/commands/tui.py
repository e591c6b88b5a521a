"""`edgeserve tui`: the application that looks at a server over HTTP."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from edgeserve.errors import UsageError
from tui.app import EdgeserveApp
from tui.app import run as run_app


def run(
    url: str | None,
    api_key: str | None,
    *,
    no_mouse: bool,
    screen: str,
    screenshot: Path | None,
    size: str,
) -> int:
    """Show it until somebody leaves. Raises UsageError for a screen or a size that is none."""
    if screen not in EdgeserveApp.MODES:
        raise UsageError(f"There is no screen {screen}.", f"One of: {', '.join(EdgeserveApp.MODES)}.")
    if screenshot is None and not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("The TUI needs a terminal.", "--screenshot FILE writes one screen without.")
    run_app(
        url or os.environ.get("EDGESERVE_URL") or None,
        api_key or os.environ.get("EDGESERVE_API_KEY") or os.environ.get("LLAMA_API_KEY"),
        no_mouse=no_mouse or os.environ.get("EDGESERVE_NO_MOUSE", "") not in ("", "0"),
        screenshot=screenshot,
        mode=screen,
        size=_size(size),
    )
    return 0


def _size(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d{2,3})x(\d{2,3})", text)
    if found is None:
        raise UsageError(f"{text} is no size.", "Columns and rows, such as 100x30.")
    return int(found[1]), int(found[2])
