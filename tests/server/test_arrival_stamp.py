"""When a request counts as arrived: stamped by the connection, before the application gets to run."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import uvicorn
from starlette.types import Receive, Scope, Send

from edgeserve.server.http_protocol import RECEIVED_KEY, HttpConfig


class Noting:
    """An application that notes when it was called, when it had the body, and what it was told of both."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, float, Any]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        called_s = time.perf_counter()
        while (await receive()).get("more_body"):
            pass
        self.seen.append((called_s, time.perf_counter(), scope["state"].get(RECEIVED_KEY)))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})


def exchange(port: int, *pieces: bytes) -> float:
    """Send the pieces apart from each other, read until the end; when the last one was sent."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
        for piece in pieces:
            time.sleep(0.05)
            sent_s = time.perf_counter()
            sock.sendall(piece)
        while sock.recv(65536):
            pass
    return sent_s


def test_the_stamp_is_that_of_the_bytes_which_completed_the_request() -> None:
    app = Noting()
    server = uvicorn.Server(HttpConfig(app, 30.0))
    sock = socket.create_server(("127.0.0.1", 0))
    port = sock.getsockname()[1]
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    thread.start()
    head = b"POST / HTTP/1.1\r\nHost: h\r\nConnection: close\r\nContent-Length: 4\r\n\r\n"
    try:
        at_once_s = exchange(port, head + b"body")
        in_pieces_s = exchange(port, head, b"bo", b"dy")
    finally:
        server.should_exit = True
        thread.join()
        sock.close()
    (called_s, _, received_s), (slow_called_s, complete_s, slow_received_s) = app.seen
    assert at_once_s <= received_s <= called_s
    assert slow_called_s < in_pieces_s <= slow_received_s <= complete_s
