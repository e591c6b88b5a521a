"""Colour and numbers on a terminal: when to colour, which colour means what, how a figure is written.

Owns the palette (prefill amber, decode teal, cached a dim amber, stalled red) and the rules of NO_COLOR,
FORCE_COLOR and TERM=dumb. Knows nothing of what is printed. Every coloured thing also has a label: with
colour switched off the text is the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TextIO

# 256-colour numbers that keep a contrast of 3:1 or more on black and on white.
_CODES = {
    "prefill": "38;5;136",
    "cached": "2;38;5;136",
    "decode": "38;5;30",
    "stalled": "31",
    "code": "38;5;67",
    "bold": "1",
    "dim": "2",
    "italic": "3",
    "underline": "4",
}
RESET = "\x1b[0m"
_SGR = re.compile(r"\x1b\[[0-9;]*m")
# C0 without tab and newline, DEL, and C1: what an answer could move the cursor or set a title with.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(frozen=True, slots=True)
class Ink:
    """Wraps text in colour, or leaves it alone when `enabled` is false."""

    enabled: bool

    def __call__(self, text: str, *names: str) -> str:
        """`text` in the named styles: "prefill", "dim", ..."""
        return f"{self.start(*names)}{text}{RESET}" if self.enabled and names and text else text

    def start(self, *names: str) -> str:
        """The code that switches the styles on; the caller ends them with `RESET`."""
        return f"\x1b[{';'.join(_CODES[name] for name in names)}m" if self.enabled and names else ""


def ink_for(stream: TextIO, environ: Mapping[str, str]) -> Ink:
    """NO_COLOR (https://no-color.org) wins, then FORCE_COLOR; otherwise any terminal but a dumb one."""
    if environ.get("NO_COLOR"):
        return Ink(False)
    if environ.get("FORCE_COLOR", "0") not in ("", "0"):
        return Ink(True)
    return Ink(can_redraw(stream, environ))


def can_redraw(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Whether a line can be overwritten there: a terminal that understands escape codes."""
    return stream.isatty() and environ.get("TERM") != "dumb"


def without_colour(text: str) -> str:
    """`text` without colour codes."""
    return _SGR.sub("", text)


def printable(text: str) -> str:
    """Text from elsewhere made safe for a terminal: control characters become their visible pictures.

    Carriage returns go, since at a line's end they mean nothing and elsewhere they hide what came before.
    """
    return _CONTROL.sub(_picture, text.replace("\r", ""))


def _picture(match: re.Match[str]) -> str:
    code = ord(match[0])
    return chr(0x2400 + code) if code < 0x20 else "\u2421" if code == 0x7F else "\ufffd"


def format_ms(seconds: float) -> str:
    """A time as people read it: `212 ms`, from 10 s on `12.4 s`, from 100 s on `140 s`."""
    if seconds < 10:
        return f"{significant(seconds * 1000)} ms"
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds:,.0f} s"


def significant(value: float) -> str:
    """Three digits and no false ones: `7.46`, `74.6`, `412`, `1,240`."""
    decimals = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:,.{decimals}f}"
