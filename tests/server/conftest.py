"""One live server for the whole run, and a way to start others on the same engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from live_server import MAX_WAITING, N_CTX_SEQ, NUM_SLOTS, Live, attached

from edgeserve.config import EngineConfig, ServerConfig
from edgeserve.engine.async_engine import AsyncEngine
from edgeserve.llama import Model
from edgeserve.server.limits import Limits


@pytest.fixture(scope="session")
def engine(model: Model) -> Iterator[AsyncEngine]:
    config = EngineConfig(
        model_path=model.path,
        n_ctx=N_CTX_SEQ * NUM_SLOTS,
        n_seq_max=NUM_SLOTS,
        max_waiting=MAX_WAITING,
        # One: two threads that wait for each other by spinning are many times slower on a busy machine.
        n_threads=1,
    )
    engine = AsyncEngine(model, config)
    engine.start()
    yield engine
    engine.stop()


Serve = Callable[..., Live]
ServeApart = Callable[..., Live]


@pytest.fixture(scope="session")
def live(engine: AsyncEngine) -> Iterator[Live]:
    """The server that most tests share, with every default but a quicker ping."""
    with attached(engine, ServerConfig(sse_ping_s=0.2)) as live:
        yield live


@pytest.fixture
def serve(engine: AsyncEngine) -> Iterator[Serve]:
    """Starts further servers on the same engine: serve(limits=..., **ServerConfig fields)."""
    with ExitStack() as stack:

        def start(limits: Limits | None = None, **settings: Any) -> Live:
            return stack.enter_context(attached(engine, ServerConfig(**settings), limits))

        yield start


@pytest.fixture
def serve_apart(model: Model) -> Iterator[ServeApart]:
    """Starts a server with an engine of its own: serve_apart(ServerConfig(...), **EngineConfig fields)."""
    with ExitStack() as stack:

        def start(config: ServerConfig | None = None, **settings: Any) -> Live:
            fields = {"n_ctx": 1024, "n_seq_max": 2, "n_threads": 1, **settings}
            engine = AsyncEngine(model, EngineConfig(model.path, **fields))
            engine.start()
            stack.callback(engine.stop)
            return stack.enter_context(attached(engine, config or ServerConfig()))

        yield start
