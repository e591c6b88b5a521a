"""Server-sent events: framing, keep-alive comments, and noticing that nobody reads any more.

Owns the transport of a stream of ready-made frames. Does not know what they say.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from edgeserve.errors import RequestError
from edgeserve.server.http_errors import ClientLeftError, bug, error_document

logger = logging.getLogger(__name__)

T = TypeVar("T")

PING = b":\n\n"
DONE = b"data: [DONE]\n\n"
HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


def frame(document: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def with_pings(frames: AsyncGenerator[bytes, None], ping_s: float) -> AsyncGenerator[bytes, None]:
    """`frames`, with a comment whenever `ping_s` pass in silence; 0 sends none."""
    async with contextlib.aclosing(frames):
        while True:
            upcoming = asyncio.ensure_future(anext(frames, None))
            try:
                while not (await asyncio.wait({upcoming}, timeout=ping_s or None))[0]:
                    yield PING
                item = upcoming.result()
            finally:
                if not upcoming.done():
                    upcoming.cancel()
                    # The generator cannot be closed while one of its steps still unwinds.
                    await asyncio.gather(upcoming, return_exceptions=True)
            if item is None:
                return
            yield item


class EventStreamResponse(Response):
    """Sends frames as they come. What fails before the first frame or ping is still an ordinary error answer;
    what fails later becomes a frame of its own, and the stream ends without its usual close."""

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        ping_s: float,
        on_left: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        """`on_left` is told when the client left; possibly before the first frame was asked for."""
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._frames = with_pings(frames, ping_s)
        self._on_left = on_left

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send_all(send))
        except ClientLeftError as error:
            self._on_left(error)

    async def _send_all(self, send: Send) -> None:
        started = False
        try:
            async with contextlib.aclosing(self._frames) as frames:
                async for item in frames:
                    if not started:
                        started = True
                        await self._start(send)
                    await send(_body(item))
        except Exception as error:
            if not started:
                raise
            await send(_body(_error_frame(error)))
        if not started:
            await self._start(send)
        await send(_body(b"", more=False))

    async def _start(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})


def _body(data: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}


def _error_frame(error: Exception) -> bytes:
    if isinstance(error, RequestError):
        return frame(error_document(error))
    logger.exception("A stream failed", exc_info=error)
    return frame(error_document(bug(error)))


async def unless_gone(receive: Callable[[], Awaitable[Message]], work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, cancelled with ClientLeftError when the connection closes first."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientLeftError("The connection closed before the answer was there.")
        return working.result()
    finally:
        leaving.cancel()
        working.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnect(receive: Callable[[], Awaitable[Message]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
