"""Copying to the clipboard of whoever sits at the terminal, and saying so where that cannot be.

Owns what is known of terminals. The text travels as an escape sequence (OSC 52), so that it arrives over SSH
too; no terminal says whether it has taken it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from textual.app import App


def copy(app: App[Any], text: str, what: str) -> None:
    """Copy `text`; `what` it is begins the sentence that says so, "The command"."""
    obstacle = obstacle_in(os.environ)
    app.copy_to_clipboard(text)
    if obstacle:
        remedy = "F8 gives the mouse back to the terminal, which then selects text itself."
        app.notify(f"{what} may not be in the clipboard: {obstacle} {remedy}", severity="warning", timeout=8)
    else:
        app.notify(f"{what} is in the clipboard, if the terminal allows it.", timeout=3)


def obstacle_in(environ: Mapping[str, str]) -> str:
    """Why a terminal that calls itself so does not take a clipboard from a program; "" where nothing is known
    against it."""
    if "TMUX" in environ:
        return "tmux passes it on only after `tmux set -s set-clipboard on`."
    if "STY" in environ:
        return "GNU screen does not pass it on."
    if environ.get("TERM_PROGRAM") == "Apple_Terminal":
        return "macOS's Terminal does not take it from programs."
    if environ.get("TERM") in ("linux", "dumb"):
        return "this terminal has none."
    return ""
