"""One generation as one HTTP answer, streamed or whole.

Owns what all generating endpoints share: the request has one recorder from its arrival on, and its generation
counts as running until its last event or until its client leaves. Knows the transport, not the protocols.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from edgeserve.errors import ContextLengthError
from edgeserve.server.answer import Answer
from edgeserve.server.events import Event, Generation, run
from edgeserve.server.http_errors import ClientLeftError
from edgeserve.server.recorder import Recorder
from edgeserve.server.security import REQUEST_ID_KEY
from edgeserve.server.serving import Serving
from edgeserve.server.sse import DONE, EventStreamResponse, frame, unless_gone
from edgeserve.server.state import ServerState, state_of

_CLIENT_CLOSED = 499


@dataclass(frozen=True, slots=True)
class Job:
    """A request that was understood: what runs, and how its events become an answer."""

    serving: Serving
    generation: Generation
    answer: Answer
    stream: bool


Prepare = Callable[[Request, ServerState], Awaitable[Job]]


async def respond(http: Request, endpoint: str, prepare: Prepare) -> Response:
    """Raises RequestError for what fails before anything was sent."""
    state = state_of(http)
    recorder = Recorder(endpoint, state.metrics, http.scope[REQUEST_ID_KEY])
    try:
        job = await prepare(http, state)
    except BaseException as error:
        recorder.close(error)
        raise
    recorder.begin(job.generation)
    events = _recorded(state, job, recorder)
    if job.stream:
        # A generator that was never started cannot record its end; hence `on_left`.
        return EventStreamResponse(_frames(events, job.answer), state.config.sse_ping_s, recorder.close)
    try:
        return await unless_gone(http.receive, _whole(events, job.answer))
    except ClientLeftError as error:
        recorder.close(error)
        return Response(status_code=_CLIENT_CLOSED)


async def _recorded(state: ServerState, job: Job, recorder: Recorder) -> AsyncGenerator[Event, None]:
    error: BaseException | None = None
    with state.running(job.generation):
        try:
            async with contextlib.aclosing(run(job.serving.engine, job.generation)) as events:
                async for event in events:
                    recorder.observe(event)
                    yield event
        except BaseException as raised:
            error = raised
            if isinstance(raised, ContextLengthError) and job.generation.endpoint != "chat":
                raised.param = "prompt"
            raise
        finally:
            recorder.close(error)


async def _frames(events: AsyncGenerator[Event, None], answer: Answer) -> AsyncGenerator[bytes, None]:
    async with contextlib.aclosing(events):
        async for event in events:
            # One write for what belongs together: the role must not arrive before the first token does.
            if documents := answer.chunks(event):
                yield b"".join(map(frame, documents))
    ending = b"".join(map(frame, answer.closing()))
    if answer.ends_with_done:
        ending += DONE
    if ending:
        yield ending


async def _whole(events: AsyncGenerator[Event, None], answer: Answer) -> Response:
    async with contextlib.aclosing(events):
        async for event in events:
            answer.chunks(event)
    return JSONResponse(answer.whole())
