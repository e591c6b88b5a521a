"""Server-sent events: framing, keep-alive comments, and noticing that nobody reads any more.

Owns the transport of a stream of ready-made frames. Does not know what they say.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
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


# Kept: json.dumps with options of its own would make an encoder for every token.
_to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def frame(document: Mapping[str, Any]) -> bytes:
    return b"data: " + _to_json(document).encode() + b"\n\n"


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
        self._frames = frames
        self._ping_s = ping_s
        self._on_left = on_left

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send_all(send))
        except ClientLeftError as error:
            self._on_left(error)

    async def _send_all(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        stream = _Stream(send, start)
        pinging = asyncio.ensure_future(stream.keep_alive(self._ping_s))
        try:
            async with contextlib.aclosing(self._frames) as frames:
                async for item in frames:
                    await stream.write(item)
        except Exception as error:
            if not stream.has_started:
                raise
            await stream.write(_error_frame(error))
        finally:
            pinging.cancel()
            await asyncio.gather(pinging, return_exceptions=True)
        await stream.close()


class _Stream:
    """The body of one answer on its way out. Headers go with the first bytes."""

    def __init__(self, send: Send, start: Message) -> None:
        self._send = send
        self._start = start
        self._last_write_s = time.monotonic()
        self.has_started = False

    async def write(self, data: bytes, *, more: bool = True) -> None:
        self._last_write_s = time.monotonic()
        if not self.has_started:
            self.has_started = True
            await self._send(self._start)
        await self._send(_body(data, more=more))

    async def close(self) -> None:
        await self.write(b"", more=False)

    async def keep_alive(self, ping_s: float) -> None:
        """A comment whenever `ping_s` pass in silence; 0 sends none. One timer for a whole stream: a timer
        for each frame would cost more than the frame."""
        while ping_s:
            silent_s = time.monotonic() - self._last_write_s
            if silent_s >= ping_s:
                await self.write(PING)
            await asyncio.sleep(max(ping_s - silent_s, 0) or ping_s)


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
