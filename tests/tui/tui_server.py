"""What the TUI is tried against: edgeserve's own server on a real socket, and a stand-in for llama-server."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx2

from edgeserve.config import ServerConfig
from edgeserve.engine.async_engine import AsyncEngine
from edgeserve.engine.request import RequestOutput
from edgeserve.server.ports import listen
from edgeserve.server.run import DrainingServer, address_of
from edgeserve.server.state import ServerState


class PacedEngine(AsyncEngine):
    """Rests before each step where a test wants requests to last, however fast the machine is."""

    rest_s = 0.0

    def _step(self) -> list[RequestOutput]:
        time.sleep(self.rest_s)
        return super()._step()


@dataclass(frozen=True)
class Live:
    """A running edgeserve server, and a client for it."""

    url: str
    state: ServerState
    http: httpx2.Client
    engine: PacedEngine

    @contextmanager
    def unhurried(self, rest_s: float = 0.05) -> Iterator[None]:
        """Answers of hundreds of tokens take longer than anything that a test does meanwhile."""
        self.engine.rest_s = rest_s
        try:
            yield
        finally:
            self.engine.rest_s = 0.0

    def get(self, path: str) -> Any:
        response = self.http.get(path)
        assert response.status_code == 200, response.text
        return response.json()

    def metric(self, name: str) -> float:
        """One sample of /metrics, by its name with labels."""
        lines = self.http.get("/metrics").text.splitlines()
        return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name} "))

    def chat(self, text: str, **params: Any) -> Any:
        body = {"messages": [{"role": "user", "content": text}], "temperature": 0, **params}
        response = self.http.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        return response.json()

    def is_idle(self) -> bool:
        stats = self.state.engine_stats()
        return stats is not None and not stats.running and not stats.waiting

    def wait_until_idle(self) -> None:
        deadline = time.monotonic() + 60
        while not self.is_idle():
            assert time.monotonic() < deadline
            time.sleep(0.01)


@contextmanager
def serve(engine: PacedEngine, port: int = 0) -> Iterator[Live]:
    """A server on this engine until the block ends; the engine stays."""
    state = ServerState(ServerConfig(sse_ping_s=0.2))
    state.attach(engine)
    assert state.serving is not None
    sock = listen("127.0.0.1", port)
    server = DrainingServer(state)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    thread.start()
    try:
        with httpx2.Client(base_url=address_of("127.0.0.1", sock), timeout=60) as http:
            while not server.started:
                time.sleep(0.005)
            yield Live(str(http.base_url).rstrip("/"), state, http, engine)
    finally:
        server.should_exit = True
        server.force_exit = True
        thread.join()
        sock.close()
        state.serving.template.close()


@contextmanager
def streams(
    live: Live, count: int, max_tokens: int = 900, prompt: str = "Tell me a story."
) -> Iterator[None]:
    """`count` long answers under way, or waiting for their turn; all of them left at the end. They last."""
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "stream": True,
        "max_tokens": max_tokens,
        "ignore_eos": True,
    }
    with live.unhurried(), httpx2.Client(base_url=live.url, timeout=60) as http:
        opened = [
            http.send(http.build_request("POST", "/v1/chat/completions", json=body), stream=True)
            for _ in range(count)
        ]
        refused = [response.read() for response in opened if response.status_code != 200]
        assert not refused, refused
        try:
            yield
        finally:
            for response in opened:
                response.close()
    live.wait_until_idle()


# --- a stand-in for llama-server ---------------------------------------------------------------------------


@dataclass
class LlamaServer:
    """What it answers; a path that is missing answers 501, as llama-server does without the flag."""

    slots: list[dict[str, Any]] | None
    metrics: dict[str, float] | None
    url: str = ""
    n_ctx: int = 4096
    model: str = "qwen3-4b"
    refusal: tuple[int, str] | None = None
    asked: list[str] = field(default_factory=list)

    def answer(self, path: str) -> tuple[int, str]:
        self.asked.append(path)
        if self.refusal is not None:
            status, message = self.refusal
            return status, json.dumps({"error": {"code": status, "message": message}})
        documents: dict[str, object] = {
            "/props": {
                "default_generation_settings": {"n_ctx": self.n_ctx, "params": {"temperature": 0.8}},
                "total_slots": len(self.slots or []),
                "model_path": "/elsewhere/qwen.gguf",
                "build_info": "b1-abc",
            },
            "/v1/models": {"data": [{"id": self.model, "meta": {"n_ctx_train": 40960}}]},
            "/health": {"status": "ok"},
        }
        if self.slots is not None:
            documents["/slots"] = self.slots
        if path == "/metrics" and self.metrics is not None:
            lines = [f"llamacpp:{name} {value}" for name, value in self.metrics.items()]
            return 200, "# HELP llamacpp:x Some text.\n" + "\n".join(lines) + "\n"
        if path in documents:
            return 200, json.dumps(documents[path])
        status = 501 if path in ("/slots", "/metrics") else 404
        return status, json.dumps({"error": {"code": status, "message": "This server does not support it."}})


@contextmanager
def llama_server(
    slots: list[dict[str, Any]] | None = None, metrics: dict[str, float] | None = None
) -> Iterator[LlamaServer]:
    """A server that answers GET as llama-server does; its answers may be changed while it runs."""
    stand_in = LlamaServer(slots, metrics)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # the base class asks for this name
            status, text = stand_in.answer(self.path)
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    stand_in.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield stand_in
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def slot(index: int, *, decoded: int = 0, **fields: Any) -> dict[str, Any]:
    """One busy slot as a newer llama-server tells it."""
    return {
        "id": index,
        "id_task": 70 + index,
        "n_ctx": 4096,
        "is_processing": True,
        "n_prompt_tokens": 500,
        "n_prompt_tokens_processed": 400,
        "n_prompt_tokens_cache": 100,
        "next_token": [{"has_next_token": True, "n_remain": 100, "n_decoded": decoded}],
        **fields,
    }
