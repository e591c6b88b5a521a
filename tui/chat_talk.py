"""One answer at a time from a running server: asks, collects, remembers.

Owns the request's extra fields (and doing without them where a server refuses them) and what becomes of a
stopped or failed answer. Knows nothing of widgets: whoever shows the answer is told of each event.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import aclosing

from edgeserve.chat.answer import Answer
from edgeserve.chat.session import Conversation, Turn
from edgeserve.client import Client
from edgeserve.stream_events import EventKind, RemoteError

_EXTRAS: Mapping[str, object] = {"return_progress": True, "timings_per_token": True}


class Talk:
    """A conversation with the server at `url`. One answer runs at a time."""

    def __init__(self, url: str, api_key: str | None, conversation: Conversation) -> None:
        self._url, self._api_key = url, api_key
        self.conversation = conversation
        self.answer: Answer | None = None
        self._extras = dict(_EXTRAS)

    async def ask(self, message: str, on_change: Callable[[], None]) -> Answer:
        """Ask and collect; `on_change` is called after each event. Cancelling the task stops the answer; what
        came until then is remembered. Raises what the client raises; the message is then unanswered."""
        self.conversation.unanswered = message
        answer = self.answer = Answer(sent_s=time.perf_counter())
        try:
            await self._receive(answer, message, on_change)
        finally:
            answer.finish()
            self._remember(answer, message)
            on_change()
        return answer

    def _remember(self, answer: Answer, message: str) -> None:
        if answer.text or answer.finish_reason:
            self.conversation.add(Turn(message, answer.text, answer.reasoning))

    async def _receive(self, answer: Answer, message: str, on_change: Callable[[], None]) -> None:
        try:
            await self._stream(answer, message, on_change)
        except RemoteError as error:
            # A server that knows a field not: 400 or 422, and its name in the message.
            refused = error.status in (400, 422) and any(name in error.message for name in self._extras)
            if not refused:
                raise
            self._extras.clear()
            await self._stream(answer, message, on_change)

    async def _stream(self, answer: Answer, message: str, on_change: Callable[[], None]) -> None:
        params = {**self.conversation.request_params(), **self._extras}
        async with Client(self._url, self._api_key) as client:
            stream = client.chat_stream(self.conversation.messages(message), **params)
            async with aclosing(stream) as events:
                async for event in events:
                    if event.kind is EventKind.ERROR and event.error is not None:
                        raise event.error
                    answer.take(event)
                    on_change()
