"""The engine on its own thread, with a stream of outputs for each request on asyncio's side.

Owns the thread, the commands that cross to it and the outputs that cross back: one wake-up of the event loop
per step, however many sequences took part. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial

from edgeserve.config import EngineConfig
from edgeserve.engine.engine import Engine
from edgeserve.engine.request import EngineStats, Request, RequestOutput
from edgeserve.engine.resolve import resolve, with_context_sizes
from edgeserve.errors import EngineError, ModelError, RequestError, UnavailableError
from edgeserve.llama import Model
from edgeserve.llama_context import Context

_IDLE_WAIT_S = 5.0
"""How long an idle engine sleeps before it gives a sign of life; commands wake it at once."""


@dataclass(frozen=True, slots=True)
class _Stream:
    """Where one request's outputs go."""

    loop: asyncio.AbstractEventLoop
    queue: asyncio.Queue[RequestOutput | RequestError]


class AsyncEngine:
    """One model served to many callers. Start it, `generate`, stop it."""

    def __init__(self, model: Model, config: EngineConfig) -> None:
        """Makes the context at once. Raises OutOfMemoryError, ModelError or UsageError."""
        if model.has_encoder:
            raise ModelError(
                "Encoder-decoder models cannot be served yet.", "Use a decoder-only (chat) model."
            )
        self.model = model
        config = resolve(config, model)
        context = Context(model, config)
        self.config = with_context_sizes(config, context.n_ctx, context.n_ctx_seq)
        self.can_cut_prefixes = context.can_cut_back
        """Whether any prefix of what is resident can be reused without checkpoints of state."""
        self._engine = Engine(model, context, self.config)
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._engine.tiers.wake = self._nudge
        self._streams: dict[str, _Stream] = {}
        self._watchers: set[_Watcher] = set()
        self._stopping = self._ended = False
        self._stats = self._engine.stats()
        self._thread = threading.Thread(target=self._run, name="edgeserve-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def stats(self) -> EngineStats:
        """The engine after its latest step; immutable."""
        return self._stats

    async def generate(self, request: Request) -> AsyncIterator[RequestOutput]:
        """The outputs of one request, the last with a finish reason; closing the iterator aborts the request.

        Raises ContextLengthError, QueueFullError or UnavailableError before the first output.
        """
        self._engine.check(request)
        stream = _Stream(asyncio.get_running_loop(), asyncio.Queue())
        self._send(lambda: self._add(request, stream))
        finished = False
        try:
            while not finished:
                item = await stream.queue.get()
                if isinstance(item, RequestError):
                    finished = True
                    raise item
                finished = item.is_finished
                yield item
        finally:
            if not finished:
                self.abort(request.request_id)

    def abort(self, request_id: str) -> bool:
        """End a request within one step; False when it is not known (any more)."""
        known = request_id in self._streams
        with contextlib.suppress(UnavailableError):  # a stopping engine ends everything anyway
            self._send(lambda: self._abort(request_id))
        return known

    async def subscribe(self) -> AsyncIterator[EngineStats]:
        """The statistics after each step, until the engine ends; a slow reader sees the latest and misses
        some."""
        watcher = _Watcher(asyncio.get_running_loop(), asyncio.Event())
        self._watchers.add(watcher)
        try:
            while True:
                await watcher.event.wait()
                watcher.event.clear()
                yield self._stats
                if self._ended:
                    return
        finally:
            self._watchers.discard(watcher)

    def stop(self) -> None:
        """End the thread after the current step; requests still there end with UnavailableError.
        Idempotent."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()

    # -- from here on: the engine's thread ----------------------------------------------------

    def _run(self) -> None:
        try:
            self._engine.runner.warm_up()
            while not self._stopping:
                for command in self._take_commands():
                    command()
                outputs = self._step() if self._engine.has_work else []
                # Statistics first: whoever has seen an output finds it counted.
                self._publish()
                self._deliver(outputs)
        finally:
            with self._wake:
                self._stopping = True
            # A request that crossed over just before the end is still owed an answer.
            for command in self._take_commands():
                command()
            outputs = self._engine.abort_all(UnavailableError("The server is stopping."))
            self._ended = True
            self._publish()
            self._deliver(outputs)
            self._engine.close()

    def _step(self) -> list[RequestOutput]:
        try:
            return self._engine.step()
        except Exception as error:  # a bug of ours must end the requests it met, not the server
            return self._engine.abort_all(EngineError(f"The engine failed: {type(error).__name__}: {error}."))

    def _take_commands(self) -> list[Callable[[], None]]:
        with self._wake:
            idle = not self._commands and not self._engine.has_work and not self._stopping
            if idle and not self._wake.wait(_IDLE_WAIT_S):
                self._engine.idle()
            commands = list(self._commands)
            self._commands.clear()
            return commands

    def _add(self, request: Request, stream: _Stream) -> None:
        self._streams[request.request_id] = stream
        try:
            self._engine.add(request)
        except RequestError as error:
            del self._streams[request.request_id]
            _call(stream.loop, partial(stream.queue.put_nowait, error))

    def _abort(self, request_id: str) -> None:
        if output := self._engine.abort(request_id):
            self._deliver([output])

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        """Hand a step's outputs over, with one wake-up for each event loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, RequestOutput]]] = defaultdict(list)
        for output in outputs:
            if stream := self._streams.get(output.request_id):
                by_loop[stream.loop].append((stream, output))
            if output.is_finished:
                self._streams.pop(output.request_id, None)
        for loop, items in by_loop.items():
            _call(loop, partial(_put_all, items))

    def _publish(self) -> None:
        self._stats = self._engine.stats()
        for watcher in tuple(self._watchers):
            _call(watcher.loop, watcher.event.set)

    # -- from any thread ------------------------------------------------------------------

    def _nudge(self) -> None:
        with self._wake:
            self._wake.notify()

    def _send(self, command: Callable[[], None]) -> None:
        with self._wake:
            if self._stopping or not self._thread.is_alive():
                raise UnavailableError("The server is stopping.")
            self._commands.append(command)
            self._wake.notify()


@dataclass(frozen=True, slots=True, eq=False)
class _Watcher:
    loop: asyncio.AbstractEventLoop
    event: asyncio.Event


def _put_all(items: list[tuple[_Stream, RequestOutput]]) -> None:
    for stream, output in items:
        stream.queue.put_nowait(output)


def _call(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    """Run a function on an event loop; one that has closed has nobody left to tell."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(function)
