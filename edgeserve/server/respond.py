"""One generation as one HTTP answer, streamed or whole.

Owns what both ways share: the generation counts as running until its last event or until its client leaves,
and it is recorded once. Knows the transport, not the protocols.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from edgeserve.errors import ContextLengthError
from edgeserve.server.answer import Answer
from edgeserve.server.events import Event, Generation, run
from edgeserve.server.recorder import Recorder
from edgeserve.server.security import REQUEST_ID_KEY
from edgeserve.server.sse import DONE, ClientGoneError, EventStreamResponse, frame, unless_gone
from edgeserve.server.state import ServerState, Serving

_CLIENT_CLOSED = 499


async def respond(
    request: Request,
    state: ServerState,
    serving: Serving,
    generation: Generation,
    answer: Answer,
    *,
    stream: bool,
) -> Response:
    """Raises RequestError for what fails before anything was sent."""
    events = _recorded(state, serving, generation, request.scope[REQUEST_ID_KEY])
    if stream:
        return EventStreamResponse(_frames(events, answer), state.config.sse_ping_s)
    try:
        return await unless_gone(request.receive, _whole(events, answer))
    except ClientGoneError:
        return Response(status_code=_CLIENT_CLOSED)


async def _recorded(
    state: ServerState, serving: Serving, generation: Generation, client_request_id: str
) -> AsyncGenerator[Event, None]:
    recorder = Recorder(generation, state.metrics, client_request_id)
    error: BaseException | None = None
    with state.running(generation):
        try:
            async with contextlib.aclosing(run(serving.engine, generation)) as events:
                async for event in events:
                    recorder.observe(event)
                    yield event
        except BaseException as raised:
            error = raised
            if isinstance(raised, ContextLengthError) and generation.endpoint != "chat":
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
