"""A server for one chat: in this process, on a free port of the loopback, with a key nobody else has.

Owns its threads and its end. It takes no signals and writes nothing to the terminal. Knows nothing of the
chat, which is a client like any other.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Self

from edgeserve.config import ServerConfig
from edgeserve.server.ports import listen
from edgeserve.server.run import DrainingServer, Load, address_of
from edgeserve.server.state import ServerState

_HOST = "127.0.0.1"
_MOMENT_S = 0.3


class LocalServer:
    """`with LocalServer(config, load) as server:`, then ask at `server.url` with `server.key`.

    `load` makes the engine, on a thread of its own, so that the rest gets ready meanwhile.
    """

    def __init__(self, config: ServerConfig, load: Load) -> None:
        self.key = secrets.token_urlsafe(32)
        self.state = ServerState(replace(config, host=_HOST, port=0, api_keys=(self.key,)))
        self._load = load
        self._loaded = threading.Event()
        self._failure: BaseException | None = None
        self._server = DrainingServer(self.state)
        self._socket = listen(_HOST, 0)
        self.url = address_of(_HOST, self._socket)

    def __enter__(self) -> Self:
        # A cancelled stream at the end of a chat is no news for the person who ended it.
        logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
        threading.Thread(target=self._attach, name="edgeserve-load", daemon=True).start()
        threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, name="edgeserve-http", daemon=True
        ).start()
        return self

    def wait(self, on_progress: Callable[[float], None]) -> None:
        """Return when requests are served; raises what loading raised. Ctrl-C ends the wait.

        `on_progress` gets the part that is loaded, now and then, once it has taken a moment.
        """
        while not self._loaded.wait(_MOMENT_S):
            on_progress(self.state.load_progress)
        if self._failure is not None:
            raise self._failure

    def _attach(self) -> None:
        try:
            engine = self._load(self.state.report_progress)
            engine.start()
            self.state.attach(engine)
        except BaseException as error:
            self._failure = error
        finally:
            self._loaded.set()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The HTTP thread ends by itself within a tick; nobody who leaves a chat should wait for it.
        self._server.should_exit = self._server.force_exit = True
        self.state.close(wait=error is None)
