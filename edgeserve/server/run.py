"""Running the server: listen, load while answering 503, serve, drain on a signal.

Owns the process's signals while it runs, and the order of the end: no new work, wait for the running, end the
engine, close. Does not know how an engine is made: it is given a function that makes one.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from edgeserve.config import ServerConfig
from edgeserve.errors import EdgeserveError
from edgeserve.server.app import build_app
from edgeserve.server.http_protocol import HttpConfig
from edgeserve.server.limits import Limits
from edgeserve.server.ports import listen
from edgeserve.server.security import check_exposure
from edgeserve.server.sleep import Sleeper
from edgeserve.server.state import ServerState

if TYPE_CHECKING:
    from edgeserve.engine.async_engine import AsyncEngine

logger = logging.getLogger(__name__)

_CUT_SHORT_S = 1.0

Load = Callable[[Callable[[float], None]], "AsyncEngine"]
"""Makes an engine (not yet started), reporting progress as a fraction of 1."""


class DrainingServer(uvicorn.Server):
    """The first signal stops admission and waits for what runs; a second one does not wait."""

    def __init__(self, state: ServerState, on_interrupt: Callable[[], bool] = lambda: False) -> None:
        """`on_interrupt` gets a Ctrl-C first, and says whether it was meant for it."""
        super().__init__(HttpConfig(build_app(state), state.limits.header_s))
        self.state = state
        self._on_interrupt = on_interrupt
        self.sleeper: Sleeper | None = None
        self.received_signal: int | None = None
        self._drain_deadline_s = 0.0
        self._is_cut_short = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Only takes notes: it may interrupt anything. The next tick acts on them."""
        if sig == signal.SIGINT and self._on_interrupt():
            return
        self.received_signal = sig
        self._is_cut_short = self.state.is_draining
        self.drain()

    def drain(self) -> None:
        """Refuse new generations from now on, and end when the running ones have ended or time is up."""
        if not self.state.is_draining:
            self._drain_deadline_s = time.monotonic() + self.state.config.drain_timeout_s
            self.state.is_draining = True

    async def on_tick(self, counter: int) -> bool:
        if self._is_cut_short and not self.force_exit:
            await self._cut_short()
        elif self.sleeper is not None and not self.state.is_draining:
            await self.sleeper.sleep_if_idle()
        elif self.state.is_draining and not self.should_exit and self._is_drained:
            # Whoever still runs gets an error event from the stopping engine before its connection closes.
            await asyncio.to_thread(self.state.close)
            self.should_exit = True
        return await super().on_tick(counter)

    @property
    def _is_drained(self) -> bool:
        return self.state.num_open == 0 or time.monotonic() > self._drain_deadline_s

    async def _cut_short(self) -> None:
        """Tell the running that they are cancelled, and give that one second to reach them."""
        self.state.cancel_all()
        give_up_s = time.monotonic() + _CUT_SHORT_S
        while self.state.num_active and time.monotonic() < give_up_s:
            await asyncio.sleep(0.01)
        self.force_exit = self.should_exit = True


def run_server(
    config: ServerConfig,
    load: Load,
    *,
    on_listening: Callable[[str], None] = lambda url: None,
    on_ready: Callable[[str], None] = lambda url: None,
    on_interrupt: Callable[[], bool] = lambda: False,
    limits: Limits | None = None,
    is_insecure: bool = False,
) -> int | None:
    """Serve until a signal ends it; returns that signal.

    `on_listening` is called with the address before the model is loaded, `on_ready` (on the loading thread)
    when requests are served, `on_interrupt` at a Ctrl-C: True keeps it from ending the server. Raises
    UsageError (port taken, bad defaults, reachable by anybody without a key unless `is_insecure`) and
    whatever `load` raises.
    """
    for warning in check_exposure(config, is_insecure=is_insecure):
        logger.warning("%s", warning)
    state = ServerState(config, limits)
    sock = listen(config.host, config.port)
    url = address_of(config.host, sock)
    on_listening(url)
    log_requests()
    server = DrainingServer(state, on_interrupt)
    if config.sleep_idle_s > 0:
        server.sleeper = Sleeper(state, lambda: _start(state, load))
    failure: list[BaseException] = []
    loader = threading.Thread(
        target=_load, args=(server, load, lambda: on_ready(url), failure), name="edgeserve-load", daemon=True
    )
    loader.start()
    try:
        server.run(sockets=[sock])
    finally:
        sock.close()
        # After a second signal nobody waits for the engine's step; its thread ends with the process.
        state.close(wait=not server.force_exit)
    if failure:
        raise failure[0]
    return server.received_signal


def _load(
    server: DrainingServer, load: Load, on_ready: Callable[[], None], failure: list[BaseException]
) -> None:
    state = server.state
    try:
        _start(state, load)
        on_ready()
    except BaseException as error:
        failure.append(error)
        state.fail(error if isinstance(error, EdgeserveError) else EdgeserveError(str(error)))
        server.should_exit = True


def _start(state: ServerState, load: Load) -> None:
    engine = load(state.report_progress)
    engine.start()
    state.attach(engine)


def address_of(host: str, sock: socket.socket) -> str:
    """The URL to open: a wildcard bind is reachable on localhost too."""
    name = "127.0.0.1" if host in ("", "0.0.0.0") else "[::1]" if host.strip("[]") == "::" else host
    if ":" in name and not name.startswith("["):
        name = f"[{name}]"
    return f"http://{name}:{sock.getsockname()[1]}"


def log_requests() -> None:
    """One JSON line a finished request, on stderr as it is: stdout belongs to results."""
    logger = logging.getLogger("edgeserve.requests")
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
