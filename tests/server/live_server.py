"""A live server around the small real model, for tests: a real socket and the real engine."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx2

from edgeserve.config import ServerConfig
from edgeserve.engine.async_engine import AsyncEngine
from edgeserve.server.limits import Limits
from edgeserve.server.ports import listen
from edgeserve.server.run import DrainingServer, address_of
from edgeserve.server.sse import PING
from edgeserve.server.state import ServerState

N_CTX_SEQ = 2048
NUM_SLOTS = 2
MAX_WAITING = 4


@dataclass(frozen=True)
class Live:
    """A running server, and a client for it."""

    url: str
    port: int
    state: ServerState
    server: DrainingServer
    http: httpx2.Client

    @property
    def stats(self) -> Any:
        stats = self.state.engine_stats()
        assert stats is not None
        return stats

    def post(self, path: str, **body: Any) -> Any:
        """The JSON answer of a request that must succeed."""
        response = self.http.post(path, json=body)
        assert response.status_code == 200, response.text
        return response.json()

    def error(self, path: str, status: int, **body: Any) -> dict[str, Any]:
        """The error object of a request that must fail."""
        response = self.http.post(path, json=body)
        assert response.status_code == status, response.text
        error = response.json()["error"]
        assert {"message", "type", "param", "code"} <= set(error)
        return dict(error)

    def wait_until(self, holds: Callable[[], bool], what: str, at_most_s: float = 90.0) -> None:
        deadline = time.monotonic() + at_most_s
        while not holds():
            assert time.monotonic() < deadline, f"still waiting: {what}"
            time.sleep(0.01)

    def wait_until_idle(self) -> None:
        self.wait_until(lambda: not self.stats.running and not self.stats.waiting, "for an idle engine")


@contextmanager
def serving(state: ServerState) -> Iterator[Live]:
    """Run a server in a thread until the block ends."""
    sock = listen(state.config.host, 0)
    server = DrainingServer(state)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, name="test-server")
    thread.start()
    url = address_of(state.config.host, sock)
    try:
        with httpx2.Client(base_url=url, timeout=60, verify=False) as http:
            live = Live(url, sock.getsockname()[1], state, server, http)
            live.wait_until(lambda: server.started, "for the server to start")
            yield live
    finally:
        server.should_exit = True
        thread.join()
        sock.close()


@contextmanager
def attached(engine: AsyncEngine, config: ServerConfig, limits: Limits | None = None) -> Iterator[Live]:
    state = ServerState(config, limits)
    state.attach(engine)
    assert state.serving is not None
    try:
        with serving(state) as live:
            yield live
    finally:
        state.serving.template.close()


def sse_documents(body: str) -> list[Any]:
    """The documents of a stream; "[DONE]" as it stands, comments left out."""
    datas = [line.removeprefix("data: ") for line in body.split("\n") if line.startswith("data: ")]
    return [data if data == "[DONE]" else json.loads(data) for data in datas]


@contextmanager
def streaming(
    live: Live, path: str = "/v1/chat/completions", *, keeps_pings: bool = False, **body: Any
) -> Iterator[Iterator[bytes]]:
    """An open stream of a long answer, without its pings: the first piece brings the first token. Leaving the
    block closes the connection."""
    fields = {
        "messages": [{"role": "user", "content": "Tell me a story."}],
        "stream": True,
        "max_tokens": 1000,
        "ignore_eos": True,
        **body,
    }
    with (
        httpx2.Client(base_url=live.url, timeout=60, verify=False) as http,
        http.stream("POST", path, json=fields) as response,
    ):
        assert response.status_code == 200, response.read()
        # Held here: an iterator that is thrown away takes its connection with it.
        chunks = response.iter_raw()
        yield chunks if keeps_pings else (chunk for chunk in chunks if chunk.replace(PING, b""))


def raw_request(live: Live, text: str | bytes, timeout_s: float = 90.0) -> bytes:
    """What the server answers to these very bytes, until it closes the connection."""
    data = text.encode("latin-1") if isinstance(text, str) else text
    with socket.create_connection(("127.0.0.1", live.port), timeout=timeout_s) as sock:
        sock.sendall(data)
        return b"".join(iter(lambda: sock.recv(65536), b""))


def get(path: str, *headers: str, host: str | None = "localhost") -> str:
    """A GET request's bytes; `host` None leaves the header out."""
    lines = [f"GET {path} HTTP/1.1", *([f"Host: {host}"] if host is not None else []), *headers]
    return "\r\n".join([*lines, "Connection: close", "", ""])


def post_bytes(body: dict[str, Any], path: str = "/v1/chat/completions", *headers: str) -> bytes:
    data = json.dumps(body).encode()
    head = [
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(data)}",
        *headers,
    ]
    return "\r\n".join([*head, "", ""]).encode() + data
