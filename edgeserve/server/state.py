"""What the routes share: the loaded model with its template, or how far loading has come; who is running.

Owns the server's life from loading to draining. Touched by the event loop only, except `attach`, `fail` and
`report_progress`, which the loading thread calls. Knows nothing of wire formats.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from starlette.requests import HTTPConnection

from edgeserve.config import ServerConfig
from edgeserve.engine.request import EngineStats
from edgeserve.errors import EdgeserveError, UnavailableError
from edgeserve.server.events import Generation
from edgeserve.server.limits import Limits
from edgeserve.server.metrics_export import Metrics
from edgeserve.server.protocol import check_defaults
from edgeserve.server.serving import ModelFacts, Serving

if TYPE_CHECKING:
    from edgeserve.engine.async_engine import AsyncEngine


class ServerState:
    """Loading -> ready (<-> asleep) -> draining -> closing."""

    def __init__(self, config: ServerConfig, limits: Limits | None = None) -> None:
        """Raises UsageError when the configured sampling defaults are not possible."""
        check_defaults(config.request_defaults)
        self.config = config
        self.limits = limits or Limits()
        self.metrics = Metrics(self.engine_stats)
        self.serving: Serving | None = None
        self.load_progress = 0.0
        self.load_error: EdgeserveError | None = None
        self.is_draining = False
        self.is_closing = False
        self.wake: Callable[[], Awaitable[None]] | None = None
        """Loads a sleeping model (sleep.py); None where it never sleeps."""
        self.num_open = 0
        """Requests that may use the model, from their headers to the end of their answer."""
        self.last_used_s = time.monotonic()
        self._facts: ModelFacts | None = None
        self._active: dict[str, Generation] = {}
        self._started_s = time.perf_counter()

    # -- the model ------------------------------------------------------------------------------------------

    def report_progress(self, fraction: float) -> None:
        self.load_progress = fraction

    def attach(self, engine: AsyncEngine) -> None:
        """The model is there: requests are served from now on."""
        serving = Serving(engine, self.config, self.limits)
        if self._facts is None:
            self.metrics.describe(serving.info(time.perf_counter() - self._started_s))
        self.load_error = None
        self.last_used_s = time.monotonic()
        self._facts = serving.facts
        self.serving = serving

    def detach(self) -> Serving:
        """The model goes to sleep: whoever gets this frees it. What is known about it stays."""
        assert self.serving is not None and not self.num_open, "only an idle model may sleep"
        serving, self.serving = self.serving, None
        self.load_progress = 0.0
        return serving

    def fail(self, error: EdgeserveError) -> None:
        """Loading came to nothing."""
        self.load_error = error

    @property
    def is_asleep(self) -> bool:
        return self.serving is None and self._facts is not None

    def facts(self) -> ModelFacts:
        """What is known about the model, asleep or not. Raises UnavailableError before it was ever there."""
        return self._facts or self.ready().facts

    def engine_stats(self) -> EngineStats | None:
        return None if self.serving is None else self.serving.engine.stats

    def ready(self) -> Serving:
        """The model in memory. Raises UnavailableError where there is none at the moment."""
        if self.serving is not None:
            return self.serving
        if self.load_error is not None:
            raise UnavailableError("The model could not be loaded.", str(self.load_error), code="load_failed")
        if self.is_asleep and not self.load_progress:
            raise UnavailableError("The model is asleep.", "A request for an answer wakes it.", code="asleep")
        raise UnavailableError(
            "Loading the model.", code="loading", extra={"progress": round(self.load_progress, 3)}
        )

    async def awake(self) -> Serving:
        """The model in memory; one that sleeps is loaded first. Raises UnavailableError."""
        if self.is_asleep and self.wake is not None:
            await self.wake()
        return self.ready()

    async def accepting(self) -> Serving:
        """What runs new generations. Raises UnavailableError also while the server drains."""
        self.check_accepting()
        serving = await self.awake()
        self.check_accepting()
        return serving

    def check_accepting(self) -> None:
        if self.is_draining:
            raise UnavailableError("The server is shutting down.", code="draining")

    # -- requests -------------------------------------------------------------------------------------------

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """While a request is open that may use the model."""
        self.num_open += 1
        try:
            yield
        finally:
            self.num_open -= 1
            self.last_used_s = time.monotonic()

    @contextmanager
    def running(self, generation: Generation) -> Iterator[None]:
        self._active[generation.id] = generation
        try:
            yield
        finally:
            del self._active[generation.id]

    @property
    def num_active(self) -> int:
        return len(self._active)

    def cancel(self, request_id: str) -> bool:
        """End a generation by the id of its answer, or one choice of it by the engine's id."""
        if self.serving is None:
            return False
        generation = self._active.get(request_id)
        ids = [request_id] if generation is None else [request.request_id for request in generation.requests]
        known = [self.serving.engine.abort(engine_id) for engine_id in ids]
        return any(known)

    def cancel_all(self) -> None:
        for request_id in list(self._active):
            self.cancel(request_id)

    def stuck_for_s(self) -> float | None:
        """How long the engine has had work and given no sign of life, when that is longer than any step."""
        stats = self.engine_stats()
        if stats is None or not (stats.running or stats.waiting):
            return None
        silent_s = time.perf_counter() - stats.heartbeat_s
        longest_s = max((step.duration_s for step in stats.recent_steps), default=0.0)
        # A machine whose ordinary steps are slow is busy, not stuck.
        return silent_s if silent_s > max(self.limits.engine_stuck_s, 20 * longest_s) else None

    def close(self, *, wait: bool = True) -> None:
        """End the template's process and, unless its step is not to be waited for, the engine's thread."""
        self.is_draining = self.is_closing = True
        if self.serving is not None:
            self.serving.close(wait=wait)


def state_of(request: HTTPConnection) -> ServerState:
    """The state that the application was built around."""
    state = request.app.state.server
    assert isinstance(state, ServerState)
    return state
