"""What this client itself costs: the same code against a server that does nothing.

Owns: a null server on loopback that answers every request with a fixed stream at once, and the two figures
that follow. Does not know: benchmarks. A figure of the same size as these says more about the client; a TTFT
less so, since it counts from the writing of the request and not from the call.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from statistics import median
from time import perf_counter

from edgeserve.client import Client

NUM_REQUESTS = 5
NUM_CHUNKS = 400
_CHUNK = b'data: {"choices":[{"index":0,"delta":{"content":"word "}}]}\n\n'
_LAST = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"length"}]}\n\ndata: [DONE]\n\n'
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


@dataclass(frozen=True)
class ClientCost:
    """Medians over a few requests: from the call to the first token, and the time to take one chunk."""

    ttft_s: float
    chunk_s: float


async def client_cost() -> ClientCost:
    """Takes a few tens of milliseconds; needs nothing but loopback."""
    async with _null_server() as url, Client(url, model="null") as client:
        found = [await _one(client) for _ in range(NUM_REQUESTS)]
    return ClientCost(median(ttft for ttft, _ in found), median(chunk for _, chunk in found))


async def _one(client: Client) -> tuple[float, float]:
    sent_s = perf_counter()
    first_s = 0.0
    num_chunks = 0
    async with aclosing(client.chat_stream([], max_tokens=NUM_CHUNKS)) as events:
        async for event in events:
            if event.is_output:
                first_s = first_s or event.at_s
                num_chunks += 1
    return first_s - sent_s, (perf_counter() - first_s) / max(1, num_chunks)


@asynccontextmanager
async def _null_server() -> AsyncIterator[str]:
    server = await asyncio.start_server(_answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        yield f"http://127.0.0.1:{port}"


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(
        int(line.partition(b":")[2])
        for line in head.split(b"\r\n")
        if line.lower().startswith(b"content-length")
    )
    await reader.readexactly(length)
    writer.write(_HEAD + NUM_CHUNKS * _CHUNK + _LAST)
    await writer.drain()
    writer.close()
