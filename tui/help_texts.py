"""The keys and signs of each screen, for the help window."""

from __future__ import annotations

from tui.dialogs import Figures

_EVERYWHERE = [
    ("F1 F2 F3 F4", "monitor, plan, chat, bench"),
    ("F5, ?", "this help; ? where no text is typed"),
    ("Ctrl+P", "commands by name"),
    ("Ctrl+T", "theme: dark, light, high contrast"),
    ("F8", "mouse off or on (--no-mouse); off, the terminal selects"),
    ("F9", "this screen as a picture (SVG) in this folder"),
    ("q, Ctrl+Q", "quit"),
]
_KEYS = {
    "monitor": [
        ("Up Down", "choose a request"),
        ("Enter", "all figures of the chosen request"),
        ("c", "cancel the chosen request"),
        ("e", "the figures behind the finding"),
        ("w", "length of time that a column stands for"),
        ("s", "start a server, when none answers"),
    ],
    "plan": [
        ("Up Down", "in a field: twice or half the context, one more or less, the next choice"),
        ("Ctrl+O", "models by name and on this machine"),
        ("Ctrl+D", "devices"),
        ("Ctrl+Y", "copy the command"),
        ("Ctrl+R", "start a server with this plan"),
        ("Ctrl+S", "save it as a file for edgeserve serve --config"),
    ],
    "chat": [
        ("Enter", "send"),
        ("Ctrl+J, Shift+Enter, Alt+Enter", "a new line"),
        ("Esc", "stop the answer"),
        ("Ctrl+R", "the last message again"),
        ("Ctrl+Y", "copy the last answer"),
        ("Ctrl+S", "system prompt and sampling settings"),
        ("Ctrl+L, Ctrl+N", "kept chats, a new chat"),
        ("F6", "export as Markdown"),
        ("Page Up, Page Down", "move through the chat"),
    ],
    "bench": [
        ("Ctrl+R", "run"),
        ("Esc", "stop; what was measured is kept"),
        ("Enter, x", "show an earlier run, compare the shown one with it"),
        ("y", "copy the command"),
    ],
}
_SIGNS = {
    "monitor": [
        ("▮ ▯ ◧", "a step, or a request, in decode, in prefill, with both"),
        ("· ✓", "a request that waits, one that has just ended"),
        ("█ ▒ ░", "KV cells in use, reusable (idle prefixes), free"),
        ("╌", "the server's target for the gap between two tokens"),
        ("~", "an estimate"),
        ("from files", "memory mapped from the model's file, which the system can drop"),
        ("own/token", "decode time without the time that others' prompts took"),
    ],
}


def help_sections(mode: str) -> list[Figures.Section]:
    """Keys of the screen, of everything, and what the signs mean."""
    sections: list[Figures.Section] = []
    if mode in _KEYS:
        sections.append((mode, "", _KEYS[mode]))
    sections.append(("everywhere", "", _EVERYWHERE))
    if mode in _SIGNS:
        sections.append(("signs", "", _SIGNS[mode]))
    return sections
