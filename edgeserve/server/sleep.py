"""Frees the model of an idle server, and loads it again when somebody asks for an answer.

Owns when that happens and that the two never overlap. What an idle model costs is memory, so all of it goes:
context, weights and the template's process. Questions that the facts answer (`/v1/models`, `/props`,
`/health`, `/metrics`) neither wake it nor keep it awake.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from edgeserve.errors import EdgeserveError, UnavailableError
from edgeserve.server.state import ServerState

_LOOK_S = 0.2


class Sleeper:
    """One server's sleep. Everything here runs on the event loop; `load` blocks, on a worker thread."""

    def __init__(self, state: ServerState, load: Callable[[], None]) -> None:
        """`load` makes an engine and attaches it to the state."""
        self._state = state
        self._load = load
        self._lock = asyncio.Lock()
        self._waking: asyncio.Task[None] | None = None
        state.wake = self.wake

    async def sleep_if_idle(self) -> None:
        """Called now and then. Free the model when nobody has used it for long enough."""
        state = self._state
        idle_s = time.monotonic() - state.last_used_s
        is_idle = not state.num_open and idle_s >= state.config.sleep_idle_s
        if state.serving is None or not is_idle or self._lock.locked():
            return
        async with self._lock:
            # Nothing may come between looking and taking: from here on requests wait in `wake`.
            serving = state.detach()
            await asyncio.to_thread(serving.free)

    async def wake(self) -> None:
        """Return when the model is there. Raises UnavailableError when it cannot be loaded, and when the
        server is asked to stop meanwhile."""
        if self._waking is None or self._waking.done():
            self._waking = asyncio.create_task(self._wake())
        waking = self._waking
        # A task of its own: whoever waits may leave, and the load goes on.
        while not (await asyncio.wait({waking}, timeout=_LOOK_S))[0]:
            self._state.check_accepting()
        waking.result()

    async def _wake(self) -> None:
        async with self._lock:
            if self._state.serving is not None:
                return
            try:
                await asyncio.to_thread(self._load)
            except EdgeserveError as error:
                self._state.load_progress = 0.0
                raise UnavailableError(
                    "The model could not be loaded again.", str(error), code="load_failed"
                ) from error


class InUse:
    """ASGI middleware that counts the requests which may use the model: everything that is posted."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        with self._state.in_use():
            await self._app(scope, receive, send)
