"""Colours: a dark, a light and a high-contrast theme, with the four colours that carry the product.

Prefill is amber, decode teal, a stall red, cached a dim amber, waiting grey. Owns the values only; every
coloured thing also has a label or a shape of its own.
"""

from __future__ import annotations

from textual.theme import Theme

THEME_NAMES = ("dark", "light", "contrast")


def full_name(name: str) -> str:
    """What Textual calls one of `THEME_NAMES`."""
    return f"edgeserve-{name}"


_DARK = {
    "prefill": "#e3a947",
    "decode": "#45bdb0",
    "cached": "#94733a",
    "stalled": "#ee6f71",
    "queue": "#8b95a1",
    "quiet": "#8b95a1",
    "frame": "#2b333d",
    "frame-focus": "#5d7185",
}
_LIGHT = {
    "prefill": "#95620a",
    "decode": "#04716a",
    "cached": "#b99a62",
    "stalled": "#b3262b",
    "queue": "#5e6872",
    "quiet": "#5e6872",
    "frame": "#cfd4d9",
    "frame-focus": "#7d8a97",
}
_CONTRAST = {
    "prefill": "#ffcf33",
    "decode": "#3cf0e0",
    "cached": "#b8912a",
    "stalled": "#ff6b6b",
    "queue": "#d0d0d0",
    "quiet": "#d0d0d0",
    "frame": "#ffffff",
    "frame-focus": "#ffcf33",
}


def themes() -> tuple[Theme, ...]:
    """All themes of edgeserve, the default first."""
    return (
        Theme(
            name=full_name("dark"),
            primary="#45bdb0",
            secondary="#5d7185",
            accent="#e3a947",
            warning="#e3a947",
            error="#ee6f71",
            success="#45bdb0",
            foreground="#d6dbe0",
            background="#11151a",
            surface="#161b21",
            panel="#1d242c",
            variables={**_DARK, "border": _DARK["frame-focus"], "footer-key-foreground": _DARK["prefill"]},
        ),
        Theme(
            name=full_name("light"),
            primary="#04716a",
            secondary="#5e6872",
            accent="#95620a",
            warning="#95620a",
            error="#b3262b",
            success="#04716a",
            foreground="#1f262d",
            background="#fbfbf9",
            surface="#f3f4f3",
            panel="#e8eaeb",
            dark=False,
            variables={**_LIGHT, "border": _LIGHT["frame-focus"], "footer-key-foreground": _LIGHT["prefill"]},
        ),
        Theme(
            name=full_name("contrast"),
            primary="#3cf0e0",
            secondary="#ffffff",
            accent="#ffcf33",
            warning="#ffcf33",
            error="#ff6b6b",
            success="#3cf0e0",
            foreground="#ffffff",
            background="#000000",
            surface="#000000",
            panel="#1a1a1a",
            text_alpha=1.0,
            variables={**_CONTRAST, "border": "#ffffff", "footer-key-foreground": _CONTRAST["prefill"]},
        ),
    )


def variable_defaults(*, is_dark: bool) -> dict[str, str]:
    """The same variables for a theme that is not edgeserve's own."""
    return dict(_DARK if is_dark else _LIGHT)
