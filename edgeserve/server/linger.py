"""Reads what a client is still sending before it is told that it was sent in vain.

Owns this one courtesy. Closing a connection while bytes of the body are under way resets it, and many clients
then see a broken connection in place of the status that was waiting for them.
"""

from __future__ import annotations

import asyncio
import contextlib

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_S = 2.0


class Linger:
    """ASGI middleware. Discards at most `max_bytes`, for at most MAX_S seconds."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._is_worth_it(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        is_complete = False

        async def watched() -> Message:
            nonlocal is_complete
            message = await receive()
            is_complete = message["type"] != "http.request" or not message.get("more_body", False)
            return message

        async def after_body(message: Message) -> None:
            is_refusal = message["type"] == "http.response.start" and not is_complete
            # A client that was already waited for in vain has had its time.
            if is_refusal and message["status"] != 408:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(MAX_S):
                        await self._discard(receive)
            await send(message)

        await self._app(scope, watched, after_body)

    def _is_worth_it(self, headers: Headers) -> bool:
        """Whether a body comes by itself, and will have an end: with `Expect` a client waits to be asked."""
        if "expect" in headers:
            return False
        length = headers.get("content-length", "")
        return "transfer-encoding" in headers or (length.isdigit() and 0 < int(length) <= self._max_bytes)

    async def _discard(self, receive: Receive) -> None:
        num_bytes = 0
        while num_bytes <= self._max_bytes:
            message = await receive()
            if message["type"] != "http.request" or not message.get("more_body", False):
                return
            num_bytes += len(message.get("body", b""))
