"""The terminal application: which name leads to which screen, and the keys that hold everywhere.

It looks and asks over HTTP and never touches the engine. Owns modes, themes, the rhythm of repainting and the
feed's life. `run` is what the command line calls.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from textual.app import App, SystemCommand
from textual.binding import Binding, BindingType
from textual.screen import Screen

from tui.dialogs import Figures
from tui.feed import Feed
from tui.help_texts import help_sections
from tui.launcher import Launcher, free_port
from tui.messages import FeedChanged, StartServer
from tui.monitor_screen import MonitorScreen
from tui.themes import full_name, themes, variable_defaults

DEFAULT_URL = "http://127.0.0.1:8080"
TICK_S = 0.5
STILL_TICKS = 2
"""With nothing new, only time moves on: once in so many ticks is enough."""

_MOUSE_ON = "\x1b[?1000h\x1b[?1003h\x1b[?1015h\x1b[?1006h"
_MOUSE_OFF = "\x1b[?1000l\x1b[?1003l\x1b[?1015l\x1b[?1006l"


def _monitor() -> Screen[None]:
    return MonitorScreen()


def _chat() -> Screen[None]:
    from tui.chat_screen import ChatScreen

    return ChatScreen()


def _plan() -> Screen[None]:
    from tui.plan_screen import PlanScreen

    return PlanScreen()


def _bench() -> Screen[None]:
    from tui.bench_screen import BenchScreen

    return BenchScreen()


class EdgeserveApp(App[None]):
    """One feed, four screens."""

    TITLE = "edgeserve"
    # Functions, so that a screen's imports wait until somebody wants it.
    MODES: ClassVar[dict[str, str | Callable[[], Screen[None]]]] = {
        "monitor": _monitor,
        "plan": _plan,
        "chat": _chat,
        "bench": _bench,
    }
    DEFAULT_MODE = "monitor"
    ENABLE_COMMAND_PALETTE = True
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("f1", "switch_mode('monitor')", "monitor", priority=True),
        Binding("f2", "switch_mode('plan')", "plan", priority=True),
        Binding("f3", "switch_mode('chat')", "chat", priority=True),
        Binding("f4", "switch_mode('bench')", "bench", priority=True),
        # The sign wherever it is not typed into a field; the key everywhere.
        Binding("f5", "help", "help", priority=True),
        Binding("question_mark", "help", "help", show=False),
        Binding("ctrl+t", "next_theme", "Theme", show=False),
        Binding("f8", "toggle_mouse", "Mouse", show=False, priority=True),
        Binding("f9", "take_picture", "Picture", show=False, priority=True),
        Binding("q", "quit", "quit"),
    ]

    def __init__(
        self, feed: Feed, *, has_mouse: bool = True, mode: str = "monitor", theme: str = "dark"
    ) -> None:
        super().__init__()
        self.feed = feed
        self.first_mode = mode
        self.has_mouse = has_mouse
        self.launcher = Launcher()
        feed.launcher = self.launcher
        self._shown_version = -1
        self._still_ticks = 0
        for known in themes():
            self.register_theme(known)
        self.theme = full_name(theme)

    def get_theme_variable_defaults(self) -> dict[str, str]:
        return variable_defaults(is_dark=self.current_theme.dark)

    async def on_mount(self) -> None:
        self._end_with_terminal()
        self._follow()
        self.set_interval(TICK_S, self._tick)
        if self.first_mode != self.current_mode:
            await self.switch_mode(self.first_mode)

    def _end_with_terminal(self) -> None:
        """A terminal that is closed, or a plain kill, ends the server that was started from here too."""
        if self.is_headless:
            return
        # Windows, and threads other than the main one, have no such handlers.
        with suppress(AttributeError, NotImplementedError, RuntimeError, ValueError):
            loop = asyncio.get_running_loop()
            for name in (signal.SIGHUP, signal.SIGTERM):
                loop.add_signal_handler(name, self.exit)

    def _follow(self) -> None:
        self.workers.cancel_group(self, "feed")
        self.run_worker(self.feed.follow(), group="feed")
        self.run_worker(self.feed.follow_memory(), group="feed")

    async def on_unmount(self) -> None:
        await self.launcher.stop()

    async def on_start_server(self, message: StartServer) -> None:
        """Start it, and watch it from now on. It ends with this application."""
        port = free_port(DEFAULT_URL if self.launcher.is_alive else self.feed.url)
        url = await self.launcher.start(message.arguments, port)
        self.feed.turn_to(url)
        self._follow()
        await self.switch_mode("monitor")
        self.notify(f"A server starts at {url}; it ends with this application.", timeout=5)

    def _tick(self) -> None:
        """Tell the visible screen that it is time to look, as often as the eye can use."""
        is_still = self.feed.version == self._shown_version
        self._still_ticks = self._still_ticks + 1 if is_still else 0
        if is_still and self._still_ticks % STILL_TICKS:
            return
        self._shown_version = self.feed.version
        # Between two modes, and at the end, there is none.
        for screen in self.screen_stack[:1]:
            screen.post_message(FeedChanged(is_still))

    # --- keys

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """The footer has no room for the key of the screen that one is on."""
        return not (action == "switch_mode" and parameters == (self.current_mode,))

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        """What the command palette offers beside Textual's own."""
        yield from super().get_system_commands(screen)
        for mode in self.MODES:
            yield SystemCommand(f"Go to {mode}", "Another screen", partial(self.switch_mode, mode))
        yield SystemCommand("Mouse on or off", "Off, the terminal selects text", self.action_toggle_mouse)
        yield SystemCommand("Picture of this screen", "As SVG, in this folder", self.action_take_picture)
        yield SystemCommand("Help for this screen", "Keys and signs", self.action_help)

    def action_help(self) -> None:
        self.push_screen(Figures("keys", help_sections(self.current_mode)))

    def action_next_theme(self) -> None:
        names = [theme.name for theme in themes()]
        index = names.index(self.theme) if self.theme in names else -1
        self.theme = names[(index + 1) % len(names)]

    def action_take_picture(self) -> None:
        """This screen as SVG in the folder that the application was started in."""
        name = f"edgeserve-{self.current_mode}-{datetime.now():%Y%m%d-%H%M%S}.svg"
        try:
            written = self.save_screenshot(name, path=str(Path.cwd()))
        except OSError as error:
            self.notify(f"{name} could not be written: {error.strerror}.", severity="warning")
            return
        self.notify(f"Written to {written}", timeout=5)

    def action_toggle_mouse(self) -> None:
        """Give the mouse back to the terminal, whose own selection works again then; or take it."""
        self.has_mouse = not self.has_mouse
        if self._driver is not None:
            self._driver.write(_MOUSE_ON if self.has_mouse else _MOUSE_OFF)
            self._driver.flush()
        self.notify("Mouse on." if self.has_mouse else "Mouse off: the terminal selects text.", timeout=3)


@dataclass(frozen=True, slots=True)
class Picture:
    """An SVG of one screen, `size` in columns and rows, taken after `wait_s` of watching."""

    path: Path
    size: tuple[int, int] = (100, 30)
    wait_s: float = 3.0


class _Photographer(EdgeserveApp):
    """Draws one screen without a terminal and writes it down."""

    def __init__(self, feed: Feed, picture: Picture, mode: str, theme: str) -> None:
        super().__init__(feed, mode=mode, theme=theme)
        self._picture = picture

    async def on_mount(self) -> None:
        self.run_worker(self._take())

    async def _take(self) -> None:
        await asyncio.sleep(self._picture.wait_s)
        path = self._picture.path
        self.save_screenshot(filename=path.name, path=str(path.parent))
        self.exit()


def run(
    url: str | None = None,
    api_key: str | None = None,
    *,
    no_mouse: bool = False,
    picture: Picture | None = None,
    mode: str = "monitor",
    theme: str = "dark",
) -> None:
    """Show the application until somebody leaves it.

    `url` None looks at 127.0.0.1:8080; `mode` is the first screen, `theme` one of `THEME_NAMES`. With
    `picture` nothing is shown and that screen is written. Raises UsageError for an address that is none.
    """
    feed = Feed(url or DEFAULT_URL, api_key)
    if picture is not None:
        _Photographer(feed, picture, mode, theme).run(headless=True, size=picture.size)
        return
    EdgeserveApp(feed, has_mouse=not no_mouse, mode=mode, theme=theme).run(mouse=not no_mouse)
