"""Clients that behave badly: they leave at every stage, send nonsense, send slowly and read slowly.

Used by test_chaos.py and, at full size, by benchmarks/chaos.py. Every request that a client sends in full and
waits for must get a whole answer; what the server has seen the headers of must be counted once.
"""

from __future__ import annotations

import http.client
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

CHAT, COMPLETIONS, NATIVE = "/v1/chat/completions", "/v1/completions", "/completion"
WAIT_S = 120


@dataclass(frozen=True)
class Outcome:
    """How one request went. `fault` says what is wrong, "" when nothing is; `status` is None where the client
    did not wait for one; `is_counted` is whether the server must have counted the request."""

    action: str
    status: int | None = None
    is_counted: bool = True
    fault: str = ""


class RefusedError(Exception):
    """Nobody listens: the request was never made."""


@dataclass(frozen=True)
class Client:
    """One client of the server at `port`, with its own dice."""

    port: int
    dice: random.Random

    @contextmanager
    def connect(self) -> Iterator[socket.socket]:
        try:
            sock = socket.create_connection(("127.0.0.1", self.port), timeout=WAIT_S)
        except OSError as error:
            raise RefusedError(str(error)) from error
        with sock:
            yield sock

    def body(self, path: str = CHAT, **fields: Any) -> dict[str, Any]:
        """A short request; some prompts share a beginning, some are long."""
        words = "word " * self.dice.choice((1, 5, 40, 150))
        text = f"{self.dice.choice(('Tell me', 'Say', 'Count'))} {words}{self.dice.randrange(50)}"
        prompt = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
        limit = "n_predict" if path == NATIVE else "max_tokens"
        return {**prompt, limit: self.dice.randrange(1, 13), "ignore_eos": True, **fields}

    # -- what a request can be ------------------------------------------------------------------------------

    def whole(self) -> Outcome:
        path = self.dice.choice((CHAT, COMPLETIONS, NATIVE))
        return self.ask("whole", path, self.body(path))

    def stream(self) -> Outcome:
        path = self.dice.choice((CHAT, COMPLETIONS, NATIVE))
        return self.ask("stream", path, self.body(path, stream=True))

    def choices(self) -> Outcome:
        fields = {"n": 2, "stream": self.dice.random() < 0.5, "stream_options": {"include_usage": True}}
        return self.ask("choices", CHAT, self.body(**fields))

    def slow_reader(self) -> Outcome:
        return self.ask("slow reader", CHAT, self.body(stream=True), read_pause_s=0.05)

    def slow_sender(self) -> Outcome:
        return self.ask("slow sender", CHAT, self.body(), num_pieces=6)

    def malformed(self) -> Outcome:
        data = self.dice.choice((b"", b"{", b"[]", b"\xff\xfe", b'{"messages": [', b"[" * 5000, b"null"))
        return self.ask("malformed", CHAT, data)

    def impossible(self) -> Outcome:
        fields = self.dice.choice(
            (
                {"temperature": -1},
                {"max_tokens": "many"},
                {"messages": []},
                {"messages": [{"role": "user", "content": "word " * 9000}]},
                {"grammar": "root ::= x"},
                {"n": 10**6},
            )
        )
        return self.ask("impossible", CHAT, self.body(**fields, stream=self.dice.random() < 0.5))

    def leave_in_headers(self) -> Outcome:
        with self.connect() as sock:
            sock.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: local")
        return Outcome("leave in headers", is_counted=False)

    def leave_in_body(self) -> Outcome:
        data = request_bytes(CHAT, self.body())
        with self.connect() as sock:
            sock.sendall(data[: -self.dice.randrange(1, 20)])
        return Outcome("leave in body")

    def leave_at_once(self) -> Outcome:
        with self.connect() as sock:
            sock.sendall(request_bytes(CHAT, self.body(stream=self.dice.random() < 0.5)))
        return Outcome("leave at once")

    def leave_soon(self) -> Outcome:
        """In the queue, in the prefill or in the answer, as it happens."""
        with self.connect() as sock:
            sock.sendall(request_bytes(CHAT, self.body(max_tokens=300)))
            time.sleep(self.dice.random() * 0.5)
        return Outcome("leave soon")

    def leave_in_stream(self) -> Outcome:
        with self.connect() as sock:
            sock.sendall(request_bytes(CHAT, self.body(stream=True, max_tokens=300)))
            sock.recv(1 + self.dice.randrange(2000))
            if self.dice.random() < 0.5:
                # Reset the connection instead of closing it politely.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        return Outcome("leave in stream")

    # -- asking and reading ---------------------------------------------------------------------------------

    def ask(
        self,
        action: str,
        path: str,
        body: dict[str, Any] | bytes,
        num_pieces: int = 1,
        read_pause_s: float = 0.0,
    ) -> Outcome:
        data = request_bytes(path, body)
        with self.connect() as sock:
            try:
                size = -(-len(data) // num_pieces)
                for start in range(0, len(data), size):
                    sock.sendall(data[start : start + size])
                    if num_pieces > 1:
                        time.sleep(0.05)
                response = http.client.HTTPResponse(sock, method="POST")
                response.begin()
                raw = read_slowly(response, read_pause_s) if read_pause_s else response.read()
            except (OSError, http.client.HTTPException) as error:
                return Outcome(action, None, False, f"no answer: {type(error).__name__}: {error}")
        return Outcome(action, response.status, True, fault_in(response, raw))


ACTIONS: tuple[Callable[[Client], Outcome], ...] = (
    Client.whole,
    Client.whole,
    Client.stream,
    Client.stream,
    Client.choices,
    Client.slow_reader,
    Client.slow_sender,
    Client.malformed,
    Client.impossible,
    Client.leave_in_headers,
    Client.leave_in_body,
    Client.leave_at_once,
    Client.leave_soon,
    Client.leave_soon,
    Client.leave_in_stream,
    Client.leave_in_stream,
)


def request_bytes(path: str, body: dict[str, Any] | bytes) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + data


def read_slowly(response: http.client.HTTPResponse, pause_s: float) -> bytes:
    pieces = []
    while piece := response.read(200):
        pieces.append(piece)
        time.sleep(pause_s)
    return b"".join(pieces)


def fault_in(response: http.client.HTTPResponse, raw: bytes) -> str:
    """What is wrong with an answer that came to its end, or ""."""
    if response.status not in (200, 400, 413, 429, 503):
        return f"status {response.status}: {raw[:200]!r}"
    if response.getheader("content-type", "").startswith("text/event-stream"):
        events = [block for block in raw.split(b"\n\n") if block.startswith(b"data: ")]
        last = events[-1] if events else b""
        is_whole = last == b"data: [DONE]" or b'"stop":true' in last or last.startswith(b'data: {"error"')
        return "" if is_whole else f"a stream without an end: {last[:200]!r}"
    document = json.loads(raw)
    is_error = set(document) == {"error"} and {"message", "type", "param", "code"} <= set(document["error"])
    return "" if is_error == (response.status != 200) else f"no error object: {raw[:200]!r}"


def run(port: int, num_requests: int, num_clients: int, seed: int, restart_s: float = 0.0) -> list[Outcome]:
    """Requests from many clients at once, all ACTIONS in turn, with dice from the seed.

    For `restart_s` a refused connection is tried again: a server that starts anew is not there for a moment.
    """
    numbers = iter(range(num_requests))
    lock = threading.Lock()
    outcomes: list[Outcome] = []

    def work() -> None:
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            dice = random.Random(f"{seed}-{number}")
            action = ACTIONS[(number + seed) % len(ACTIONS)]
            outcome = attempt(action, Client(port, dice), restart_s)
            with lock:
                outcomes.append(outcome)

    threads = [threading.Thread(target=work, name=f"chaos-{index}") for index in range(num_clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def attempt(action: Callable[[Client], Outcome], client: Client, restart_s: float) -> Outcome:
    give_up_s = time.monotonic() + restart_s
    while True:
        try:
            return action(client)
        except RefusedError as error:
            if time.monotonic() > give_up_s:
                return Outcome(action.__name__, None, False, f"refused: {error}")
            time.sleep(0.1)
        except Exception as error:
            return Outcome(action.__name__, None, False, f"{type(error).__name__}: {error}")
