"""A small HTTP server on the loopback that serves files as well or as badly as a test asks."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Served:
    """One path: its bytes and how it behaves. `cuts`: after how many bytes responses break off, in turn."""

    body: bytes = b""
    etag: str | None = '"v1"'
    ranges: bool = True
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    cuts: list[int] = field(default_factory=list)
    range_status: int = 206
    range_lie: int = 0
    on_request: Callable[[Served], None] | None = None


class FileServer:
    def __init__(self) -> None:
        self.paths: dict[str, Served] = {}
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: Any) -> None:
                pass

            def do_HEAD(self) -> None:
                server.answer(self)

            def do_GET(self) -> None:
                server.answer(self)

        self.httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.httpd.daemon_threads = True
        # A client that hangs up on purpose is part of the tests, not an error to print.
        self.httpd.handle_error = lambda request, client_address: None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.httpd.server_address[1]}"

    def asked(self, path: str) -> list[dict[str, str]]:
        """Headers, names in lower case, of each GET of `path`."""
        return [headers for method, asked, headers in self.requests if (method, asked) == ("GET", path)]

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        path = handler.path.split("?")[0]
        headers = {name.lower(): value for name, value in handler.headers.items()}
        self.requests.append((handler.command, path, headers))
        served = self.paths.get(path, Served(b"no such file", status=404))
        if served.on_request:
            served.on_request(served)
        status, body, extra = self._selected(served, headers)
        handler.send_response(status)
        for name, value in (served.headers | extra).items():
            handler.send_header(name, value)
        if served.etag:
            handler.send_header("ETag", served.etag)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        if handler.command == "HEAD":
            return
        if served.cuts and status in (200, 206):
            body = body[: served.cuts.pop(0)]
            handler.close_connection = True
        with suppress(ConnectionError):
            handler.wfile.write(body)

    def _selected(self, served: Served, headers: dict[str, str]) -> tuple[int, bytes, dict[str, str]]:
        wanted = re.match(r"bytes=(\d+)-(\d*)$", headers.get("range", ""))
        if served.status != 200 or wanted is None or not served.ranges:
            return served.status, served.body, {}
        if served.range_status != 206:
            return served.range_status, b"", {}
        if headers.get("if-range", served.etag) != served.etag:
            return 200, served.body, {}
        start = int(wanted[1])
        end = min(int(wanted[2] or len(served.body) - 1), len(served.body) - 1)
        shown = f"bytes {start + served.range_lie}-{end}/{len(served.body)}"
        return 206, served.body[start : end + 1], {"Content-Range": shown}


@contextmanager
def file_server() -> Iterator[FileServer]:
    server = FileServer()
    thread = threading.Thread(target=server.httpd.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.httpd.shutdown()
        server.httpd.server_close()
        thread.join()
