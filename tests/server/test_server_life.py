"""From loading to the end: what a server answers while it loads, drains, is stuck or has lost its engine."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest
from live_server import Live, serving, sse_documents, streaming

from edgeserve.config import EngineConfig, ServerConfig
from edgeserve.engine.async_engine import AsyncEngine
from edgeserve.engine.request import EngineStats, RequestTimings, SequenceStats, SequenceStatus, StepStats
from edgeserve.errors import ModelError, UsageError
from edgeserve.llama import Model
from edgeserve.server.ports import PortTakenError, listen, occupant
from edgeserve.server.run import address_of, run_server
from edgeserve.server.state import ServerState

HI = [{"role": "user", "content": "Hi"}]
READY_S = 60


def test_while_loading_everything_says_so(engine: Any) -> None:
    state = ServerState(ServerConfig())
    with serving(state) as live:
        state.report_progress(0.25)
        for response in (
            live.http.get("/health"),
            live.http.get("/v1/models"),
            live.http.post("/v1/chat/completions", json={"messages": HI}),
        ):
            assert response.status_code == 503
            error = response.json()["error"]
            assert (error["type"], error["code"]) == ("unavailable_error", "loading")
            assert error["progress"] == 0.25
            assert response.headers["retry-after"]
        assert live.http.get("/metrics").status_code == 200
        assert live.http.get("/").json()["model"] is None
        state.attach(engine)
        assert live.http.get("/health").json()["status"] == "ok"
        assert live.post("/v1/chat/completions", messages=HI, max_tokens=1)
    assert state.serving is not None
    state.serving.template.close()


def test_a_failed_load_is_told(engine: Any) -> None:
    state = ServerState(ServerConfig())
    with serving(state) as live:
        state.fail(ModelError("The file is not a model."))
        error = live.http.get("/health").json()["error"]
        assert error["code"] == "load_failed"
        assert "The file is not a model." in error["message"]


@dataclass
class StoppedEngine:
    """An engine whose thread does nothing more: what cannot be caused with the real one."""

    model: Model
    config: EngineConfig
    is_alive: bool = True
    stats: EngineStats = field(default_factory=EngineStats)


def stats_of(silent_s: float, *, has_work: bool, longest_step_s: float = 0.1) -> EngineStats:
    sequence = SequenceStats("r", SequenceStatus.DECODE, 0, RequestTimings(5, 0, 5, 1), 10)
    step = StepStats(1, 0.0, longest_step_s, 1, 0)
    return EngineStats(
        running=(sequence,) if has_work else (),
        recent_steps=(step,),
        heartbeat_s=time.perf_counter() - silent_s,
    )


@pytest.mark.parametrize(
    ("silent_s", "has_work", "longest_step_s", "code"),
    [
        (1000, True, 0.1, "engine_stuck"),
        (1000, False, 0.1, None),
        (5, True, 0.1, None),
        (100, True, 10, None),
    ],
)
def test_a_stuck_engine_is_told_from_a_busy_and_an_idle_one(
    model: Model, silent_s: float, has_work: bool, longest_step_s: float, code: str | None
) -> None:
    state = ServerState(ServerConfig())
    stopped: Any = StoppedEngine(
        model,
        EngineConfig(model.path),
        True,
        stats_of(silent_s, has_work=has_work, longest_step_s=longest_step_s),
    )
    state.attach(stopped)
    with serving(state) as live:
        response = live.http.get("/health")
        assert response.status_code == (503 if code else 200)
        assert response.json().get("error", {}).get("code") == code
        stopped.is_alive = False
        assert live.http.get("/health").json()["error"]["code"] == "engine_stopped"
    assert state.serving is not None
    state.serving.template.close()


@pytest.fixture
def child(model_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A server in a process of its own, ready; it prints its address first."""
    script = (
        "import sys\n"
        "from edgeserve.config import EngineConfig, ServerConfig\n"
        "from edgeserve.engine.async_engine import AsyncEngine\n"
        "from edgeserve.llama import Model\n"
        "from edgeserve.server.run import run_server\n"
        "def load(progress):\n"
        "    config = EngineConfig(model_path=sys.argv[1], n_ctx=2048, n_seq_max=1, n_threads=1)\n"
        "    return AsyncEngine(Model(sys.argv[1]), config)\n"
        "config = ServerConfig(port=0, drain_timeout_s=float(sys.argv[2]))\n"
        "show = lambda url: print(url, flush=True)\n"
        "print('ended by', run_server(config, load, on_ready=show), flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(model_path), "60"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    yield process
    process.kill()
    process.communicate()


def connect(process: subprocess.Popen[str]) -> Live:
    assert process.stdout is not None
    url = process.stdout.readline().strip()
    assert url.startswith("http://127.0.0.1:"), url
    http = httpx2.Client(base_url=url, timeout=60, verify=False)
    nothing: Any = None
    return Live(url, int(url.rpartition(":")[2]), nothing, nothing, http)


def health_code(live: Live) -> str | None:
    response = live.http.get("/health")
    return None if response.status_code == 200 else str(response.json()["error"]["code"])


def test_sigterm_lets_the_running_finish_and_nobody_in(child: subprocess.Popen[str]) -> None:
    live = connect(child)
    with streaming(live, max_tokens=60) as stream:
        received = next(stream)
        child.send_signal(signal.SIGTERM)
        live.wait_until(lambda: health_code(live) == "draining", "for draining to begin")
        refused = live.error("/v1/chat/completions", 503, messages=HI)
        assert refused["code"] == "draining"
        received += b"".join(stream)
    *chunks, done = sse_documents(received.decode())
    assert done == "[DONE]"
    assert chunks[-1]["timings"]["predicted_n"] == 60
    live.http.close()
    out, err = child.communicate(timeout=READY_S)
    assert child.returncode == 0
    assert f"ended by {int(signal.SIGTERM)}" in out
    lines = [json.loads(line) for line in err.splitlines() if line.startswith("{")]
    assert [(line["outcome"], line.get("error")) for line in lines] == [
        ("rejected", "draining"),
        ("length", None),
    ]


def test_a_second_signal_does_not_wait(child: subprocess.Popen[str]) -> None:
    live = connect(child)
    with streaming(live) as stream:
        next(stream)
        child.send_signal(signal.SIGINT)
        live.wait_until(lambda: health_code(live) == "draining", "for draining to begin")
        child.send_signal(signal.SIGINT)
        received = b"".join(stream)
        out, err = child.communicate(timeout=READY_S)
    assert sse_documents(received.decode())[-1]["error"]["code"] == "cancelled"
    assert f"ended by {int(signal.SIGINT)}" in out
    assert child.returncode == 0
    assert "Traceback" not in err
    live.http.close()


def test_draining_ends_what_takes_too_long(model: Model, model_path: Path) -> None:
    engine = AsyncEngine(
        model, EngineConfig(model_path=str(model_path), n_ctx=2048, n_seq_max=1, n_threads=1)
    )
    engine.start()
    state = ServerState(ServerConfig(drain_timeout_s=0.2))
    state.attach(engine)
    with (
        serving(state) as live,
        streaming(live) as stream,
        httpx2.Client(base_url=live.url, verify=False) as http,
    ):
        received = next(stream)
        with http.stream("GET", "/events") as events:
            live.server.drain()
            received += b"".join(stream)
            assert b"".join(events.iter_raw())
    error = sse_documents(received.decode())[-1]["error"]
    assert error["type"] == "unavailable_error"
    assert not engine.is_alive


def test_a_taken_port_names_who_has_it_and_a_free_one() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortTakenError) as caught:
            listen("127.0.0.1", port)
        assert str(port) in caught.value.message
        assert str(os.getpid()) in caught.value.message
        free = int("".join(filter(str.isdigit, caught.value.hint.split("--port", 1)[1].split(",")[0])))
        assert free > port
        listen("127.0.0.1", free).close()
    assert occupant(port) == "another program"


def test_small_writes_are_not_held_back(live: Live) -> None:
    """Every token is a small write: held back for the client's delayed acknowledgement it is 40 ms late."""
    with socket.create_connection(("127.0.0.1", live.port)):
        live.wait_until(lambda: bool(live.server.server_state.connections), "for the connection")
        for connection in list(live.server.server_state.connections):
            server_side = connection.transport.get_extra_info("socket")
            assert server_side.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.7"])
def test_an_address_that_is_not_ours(host: str) -> None:
    with pytest.raises(UsageError):
        listen(host, 0)


@pytest.mark.parametrize(
    ("host", "name"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("localhost", "localhost")]
)
def test_the_address_shown_is_one_to_open(host: str, name: str) -> None:
    with listen(host, 0) as sock:
        assert address_of(host, sock) == f"http://{name}:{sock.getsockname()[1]}"


def test_what_loading_raises_ends_the_server_and_reaches_the_caller() -> None:
    def load(progress: Any) -> Any:
        progress(0.5)
        raise ModelError("The file is not a model.")

    addresses: list[str] = []
    with pytest.raises(ModelError, match="not a model"):
        run_server(ServerConfig(port=0), load, on_listening=addresses.append)
    assert len(addresses) == 1


def test_a_slow_load_is_told_from_the_first_moment_on() -> None:
    addresses: list[str] = []
    is_seen = threading.Event()

    def load(progress: Any) -> Any:
        progress(0.25)
        is_seen.wait(90)
        raise ModelError("Enough.")

    def serve() -> None:
        with pytest.raises(ModelError):
            run_server(ServerConfig(port=0), load, on_listening=addresses.append)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        while not addresses:
            time.sleep(0.01)
        with httpx2.Client(base_url=addresses[0], timeout=60, verify=False) as http:
            response = http.get("/health")
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["progress"]) == (503, "loading", 0.25)
        assert response.headers["retry-after"]
    finally:
        is_seen.set()
        thread.join()


def test_a_server_for_anybody_is_refused_before_it_listens() -> None:
    def never(progress: Any) -> Any:
        raise AssertionError("loaded all the same")

    addresses: list[str] = []
    with pytest.raises(UsageError, match="no API key"):
        run_server(ServerConfig(host="0.0.0.0", port=0), never, on_listening=addresses.append)
    assert not addresses


def test_impossible_defaults_are_refused_at_the_start() -> None:
    for defaults in ({"temperature": -1.0}, {"no_such_option": 1}):
        with pytest.raises(UsageError):
            ServerState(ServerConfig(request_defaults=defaults))
