"""An OpenAI-compatible server with a script instead of a model, on a real socket.

Every answer is a list of `Step`s (wait, then send bytes); the instants of sending are kept for comparison
with what a client saw. Used by the tests of the client, the benchmark and everything that talks HTTP.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route


@dataclass(frozen=True)
class Step:
    """Wait `delay_s`, and for `until` to be true if there is one; then send `data` as one piece."""

    data: bytes
    delay_s: float = 0.0
    until: Callable[[], bool] | None = None


@dataclass
class Sent:
    """One answer: the request's body, when each piece was handed over, and whether the client left early."""

    body: dict[str, Any]
    stamps_s: list[float] = field(default_factory=list)
    is_abandoned: bool = False


Reply = Sequence[Step] | Response
Script = Callable[[dict[str, Any]], Reply]


def sse(payload: dict[str, Any] | str) -> bytes:
    text = payload if isinstance(payload, str) else json.dumps(payload)
    return f"data: {text}\n\n".encode()


def chunk(delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    return sse({"id": "chatcmpl-1", "object": "chat.completion.chunk", "model": "mock", "choices": [choice]})


def usage_chunk(prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0) -> bytes:
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
    return sse({"object": "chat.completion.chunk", "choices": [], "usage": usage})


def answer(
    num_chunks: int = 4,
    *,
    tokens_per_chunk: int = 1,
    ttft_s: float = 0.0,
    gap_s: float = 0.0,
    usage_delay_s: float = 0.0,
    until: Callable[[], bool] | None = None,
    prompt_tokens: int = 10,
    cached_tokens: int = 0,
) -> list[Step]:
    """A chat answer as a server may send it: role chunk and pings first, usage late, then [DONE].

    The first content waits for `until`.
    """
    words = " ".join(["word"] * tokens_per_chunk) + " "
    steps = [Step(chunk({"role": "assistant", "content": ""})), Step(b": ping\n\n")]
    for index in range(num_chunks):
        is_first = index == 0
        delay_s = ttft_s if is_first else gap_s
        steps.append(Step(chunk({"content": words}), delay_s, until if is_first else None))
    steps.append(Step(chunk({}, "length")))
    usage = usage_chunk(prompt_tokens, num_chunks * tokens_per_chunk, cached_tokens)
    steps.append(Step(usage, usage_delay_s))
    steps.append(Step(sse("[DONE]")))
    return steps


def error_response(status: int, message: str, code: str, headers: dict[str, str] | None = None) -> Response:
    error = {"message": message, "type": "invalid_request_error", "code": code, "param": None}
    return JSONResponse({"error": error}, status_code=status, headers=headers)


class MockServer:
    """`script` turns a request's body into its answer; `sent` collects what happened, in order of arrival."""

    def __init__(self, script: Script | None = None, pages: dict[str, Any] | None = None) -> None:
        self.script: Script = script or (lambda body: answer(int(body.get("max_tokens") or 4)))
        self.pages = {
            "/health": {"status": "ok"},
            "/v1/models": {"object": "list", "data": [{"id": "mock", "meta": {"n_ctx": 4096}}]},
            **(pages or {}),
        }
        self.sent: list[Sent] = []
        self.headers: list[dict[str, str]] = []
        self.url = ""
        routes = [
            Route("/v1/chat/completions", self._complete, methods=["POST"]),
            Route("/v1/completions", self._complete, methods=["POST"]),
            Route("/{path:path}", self._page, methods=["GET"]),
        ]
        self._app = Starlette(routes=routes)

    async def _page(self, request: Request) -> Response:
        page = self.pages.get(request.url.path)
        if page is None:
            return error_response(404, "no such path", "not_found")
        if isinstance(page, Response):
            return page
        return PlainTextResponse(page) if isinstance(page, str) else JSONResponse(page)

    async def _complete(self, request: Request) -> Response:
        sent = Sent(await request.json())
        self.sent.append(sent)
        self.headers.append(dict(request.headers))
        reply = self.script(sent.body)
        if isinstance(reply, Response):
            return reply
        return StreamingResponse(self._play(reply, sent), media_type="text/event-stream")

    async def _play(self, steps: Sequence[Step], sent: Sent) -> AsyncIterator[bytes]:
        try:
            for step in steps:
                # A sleep of 0 still lets the loop flush, so that pieces leave one by one.
                await asyncio.sleep(step.delay_s)
                while step.until is not None and not step.until():
                    await asyncio.sleep(0.005)
                sent.stamps_s.append(time.perf_counter())
                yield step.data
        except (asyncio.CancelledError, GeneratorExit):
            sent.is_abandoned = True
            raise

    @contextmanager
    def running(self) -> Iterator[MockServer]:
        config = uvicorn.Config(self._app, host="127.0.0.1", port=0, log_level="error", lifespan="off")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.005)
        port = server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        try:
            yield self
        finally:
            server.should_exit = True
            thread.join(timeout=10)
