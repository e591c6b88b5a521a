"""What the server refuses to read, and how it says no: always an error object."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import pytest
from conftest import Serve
from live_server import Live, attached, get, raw_request

from edgeserve.config import ServerConfig
from edgeserve.engine.async_engine import AsyncEngine
from edgeserve.server.limits import Limits

CHAT = "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}


def error_of(answer: bytes) -> dict[str, object]:
    return dict(json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"])


@pytest.fixture(scope="module")
def strict(engine: AsyncEngine) -> Iterator[Live]:
    limits = Limits(header_s=0.3, body_s=0.3)
    with attached(engine, ServerConfig(max_body_bytes=10_000), limits) as live:
        yield live


def test_a_large_body_is_refused_by_its_length(strict: Live) -> None:
    response = strict.http.post(CHAT, content=b" " * 20_000, headers=JSON)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "payload_too_large"


def test_a_large_chunked_body_is_refused_as_it_comes(strict: Live) -> None:
    def pieces() -> Iterator[bytes]:
        for _ in range(50):
            yield b" " * 1000

    response = strict.http.post(CHAT, content=pieces(), headers=JSON)
    assert response.status_code == 413


def test_slow_headers_are_cut_off(strict: Live) -> None:
    answer = raw_request(strict, "GET /health HTTP/1.1\r\nHost: local")
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert error_of(answer)["code"] == "request_timeout"


def test_a_connection_without_a_request_is_closed(strict: Live) -> None:
    assert raw_request(strict, b"") == b""


def test_slow_headers_of_a_second_request_are_cut_off(strict: Live) -> None:
    with socket.create_connection(("127.0.0.1", strict.port), timeout=20) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert sock.recv(65536).startswith(b"HTTP/1.1 200 ")
        sock.sendall(b"GET /hea")
        received = b"".join(iter(lambda: sock.recv(65536), b""))
    assert b"HTTP/1.1 408 " in received


def test_a_slow_body_is_cut_off(strict: Live) -> None:
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        "Content-Length: 100\r\nConnection: close\r\n\r\n{"
    )
    answer = raw_request(strict, head)
    assert answer.startswith(b"HTTP/1.1 408 ")


def test_what_is_not_http_gets_an_error_object(live: Live) -> None:
    answer = raw_request(live, "NONSENSE\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert error_of(answer)["code"] == "invalid_http"


def test_a_client_that_leaves_in_the_body_harms_nobody(live: Live) -> None:
    with socket.create_connection(("127.0.0.1", live.port)) as sock:
        sock.sendall(
            f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            "Content-Length: 1000\r\n\r\n{".encode()
        )
    assert live.http.get("/health").status_code == 200


def test_unknown_paths_and_methods(live: Live) -> None:
    missing = live.http.get("/v2/nothing")
    assert missing.status_code == 404
    assert missing.json()["error"]["type"] == "not_found_error"
    wrong = live.http.get(CHAT)
    assert wrong.status_code == 405
    assert wrong.json()["error"]["code"] == "method_not_allowed"
    assert wrong.headers["allow"] == "POST"


@pytest.mark.parametrize("path", ["/", "/metrics", "/health", "/v1/models"])
def test_head(live: Live, path: str) -> None:
    answer = raw_request(live, get(path).replace("GET", "HEAD", 1))
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.endswith(b"\r\n\r\n")


def test_deep_nesting_in_ignored_fields_is_refused(live: Live) -> None:
    deep = b'{"messages": [{"role": "user", "content": "x"}], "metadata": ' + b"[" * 300 + b"]" * 300 + b"}"
    response = live.http.post(CHAT, content=deep, headers=JSON)
    assert response.status_code == 400


def test_a_refused_client_that_is_still_sending_gets_its_status(serve: Serve) -> None:
    """The answer is known after the headers; cutting the client off in mid-body would lose it."""
    locked = serve(api_keys=("k",))
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {8 << 20}\r\nConnection: close\r\n\r\n"
    )
    answer = raw_request(locked, head.encode() + b" " * (8 << 20))
    assert answer.startswith(b"HTTP/1.1 401 ")
    assert error_of(answer)["code"] == "invalid_api_key"


def test_a_client_that_asks_first_need_not_send(serve: Serve) -> None:
    locked = serve(api_keys=("k",))
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        "Content-Length: 1000\r\nExpect: 100-continue\r\nConnection: close\r\n\r\n"
    )
    assert raw_request(locked, head).startswith(b"HTTP/1.1 401 ")
