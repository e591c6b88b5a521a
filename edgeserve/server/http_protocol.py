"""Uvicorn's HTTP/1.1 connection, made impatient: headers must arrive in time, and refusals are error objects.

Owns only what happens before a request reaches the application: its arrival is stamped here. A connection
that sends its headers a byte at a time would otherwise be held open for ever.
"""

from __future__ import annotations

import asyncio
import json
import time

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from edgeserve.errors import InvalidRequestError, RequestError
from edgeserve.server.http_errors import SlowRequestError, error_document

RECEIVED_KEY = "edgeserve.received_s"
"""In the state of a request's scope: the clock of time.perf_counter() when the bytes that completed it were
received. Later requests of a pipeline, which wait for the answers before them, have none."""


class HttpConfig(uvicorn.Config):
    """Uvicorn's settings for this server. It logs nothing by itself but faults."""

    def __init__(self, app: ASGIApp, header_s: float) -> None:
        super().__init__(
            app,
            http=ImpatientProtocol,
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            # Streams that outlive draining are told so first; this is for connections that do not listen.
            timeout_graceful_shutdown=2,
        )
        self.header_s = header_s


class ImpatientProtocol(H11Protocol):
    _header_timer: asyncio.TimerHandle | None = None
    _has_data = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        received_s = time.perf_counter()
        self._has_data = True
        if self._header_timer is None and self._awaits_headers:
            self._start_timer()
        super().data_received(data)
        if self.cycle is not None and not self.cycle.more_body:
            # The first to find it complete is right: what comes later belongs to another request.
            self.scope["state"].setdefault(RECEIVED_KEY, received_s)
        if not self._awaits_headers:
            self._has_data = False
            self._stop_timer()

    def send_400_response(self, msg: str) -> None:
        self._refuse(InvalidRequestError(msg, code="invalid_http"))

    @property
    def _awaits_headers(self) -> bool:
        cycle = self.cycle
        return cycle is None or cycle.response_complete

    def _start_timer(self) -> None:
        assert isinstance(self.config, HttpConfig)
        self._header_timer = self.loop.call_later(self.config.header_s, self._on_late)

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _on_late(self) -> None:
        if self.transport.is_closing() or not self._awaits_headers:
            return
        if self._has_data:
            self._refuse(SlowRequestError("The request's headers did not arrive in time."))
        else:
            self.transport.close()

    def _refuse(self, error: RequestError) -> None:
        body = json.dumps(error_document(error)).encode()
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        for event in (
            h11.Response(status_code=error.status, headers=headers),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
