"""An idle server frees its model, and the next request brings it back."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from live_server import Live, serving, streaming

from edgeserve.config import EngineConfig, ServerConfig
from edgeserve.engine.async_engine import AsyncEngine
from edgeserve.errors import ModelError
from edgeserve.llama import Log, Model
from edgeserve.server.run import _start
from edgeserve.server.sleep import Sleeper
from edgeserve.server.state import ServerState

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]


class Loads:
    """Makes engines on a model of their own, and can be told to fail or to wait."""

    def __init__(self, path: Path, log: Log) -> None:
        self.path, self.log = path, log
        self.count = 0
        self.failure: ModelError | None = None
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def __call__(self, on_progress: object) -> AsyncEngine:
        self.count += 1
        on_progress(0.5)
        self.may_go_on.wait(90)
        if self.failure is not None:
            raise self.failure
        model = Model(self.path, log=self.log)
        return AsyncEngine(model, EngineConfig(str(self.path), n_ctx=512, n_seq_max=1, n_threads=1))


@contextmanager
def sleepy(loads: Loads, sleep_idle_s: float) -> Iterator[Live]:
    state = ServerState(ServerConfig(sleep_idle_s=sleep_idle_s))
    _start(state, loads)
    with serving(state) as live:
        live.server.sleeper = Sleeper(state, lambda: _start(state, loads))
        yield live
        state.close()


@pytest.fixture
def loads(model: Model) -> Loads:
    # The newest Log gets llama.cpp's messages: sharing one keeps other tests' view of them.
    return Loads(Path(model.path), model.log)


def asleep(live: Live) -> None:
    live.wait_until(lambda: live.http.get("/props").json()["is_sleeping"], "for it to fall asleep")
    live.wait_until(lambda: not live.server.sleeper._lock.locked(), "for the model to be freed")


def test_asleep_and_awake_again(loads: Loads) -> None:
    with sleepy(loads, 0.2) as live:
        # An answer that takes longer than the time to sleep keeps it awake.
        with streaming(live, max_tokens=30) as stream:
            for _ in stream:
                assert live.state.serving is not None
        before = live.post(CHAT, messages=HI, max_tokens=3, temperature=0)["choices"]
        children, served = psutil.Process().children(), live.state.serving
        asleep(live)
        # What is known about the model is told without it; asking does not wake it.
        assert live.http.get("/health").json()["is_sleeping"] is True
        assert live.http.get("/v1/models").json()["data"][0]["meta"]["n_ctx"] == 512
        assert live.http.get("/").json()["model"]
        assert "edgeserve_requests_total" in live.http.get("/metrics").text
        for path in ("/slots", "/events"):
            assert live.http.get(path).json()["error"]["code"] == "asleep"
        assert loads.count == 1
        # Weights, context and the template's process are gone.
        assert served.model.handle is None
        assert not served.engine.is_alive
        assert len(psutil.Process().children()) < len(children)

        assert live.post(CHAT, messages=HI, max_tokens=3, temperature=0)["choices"] == before
        assert loads.count == 2
        assert live.http.get("/health").json()["is_sleeping"] is False
        asleep(live)
        assert live.post("/tokenize", content="Hi")["tokens"]
        assert loads.count == 3


def test_many_that_come_at_once_wake_it_once_and_all_are_served(loads: Loads) -> None:
    with sleepy(loads, 0.2) as live:
        asleep(live)
        loads.may_go_on.clear()
        answers: list[int] = []

        def ask() -> None:
            answers.append(live.post(CHAT, messages=HI, max_tokens=1)["timings"]["ttft_ms"])

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        live.wait_until(lambda: live.state.num_open == 4, "for all to wait")
        live.wait_until(lambda: loads.count == 2, "for the load to begin")
        started_s = time.perf_counter()
        # Meanwhile the server is healthy: a request would be served.
        assert live.http.get("/health").status_code == 200
        slots = live.http.get("/slots").json()["error"]
        assert (slots["code"], slots["progress"]) == ("loading", 0.5)
        waited_ms = (time.perf_counter() - started_s) * 1e3
        loads.may_go_on.set()
        for thread in threads:
            thread.join()
        # They arrived before the load began: it is in their time to the first token.
        assert len(answers) == 4
        assert min(answers) > waited_ms
        assert loads.count == 2


def test_a_load_that_fails_or_comes_too_late_is_that_requests_answer(loads: Loads) -> None:
    with sleepy(loads, 0.2) as live:
        asleep(live)
        loads.failure = ModelError("The file is gone.")
        error = live.error(CHAT, 503, messages=HI)
        assert error["code"] == "load_failed"
        assert "The file is gone." in error["message"]
        loads.failure = None
        assert live.post(CHAT, messages=HI, max_tokens=1)

        # Who waits for a load while the server is asked to stop is told so.
        asleep(live)
        loads.may_go_on.clear()
        answers = []
        thread = threading.Thread(target=lambda: answers.append(live.error(CHAT, 503, messages=HI)))
        thread.start()
        live.wait_until(lambda: loads.count == 4, "for the load to begin")
        live.server.drain()
        thread.join()
        assert answers[0]["code"] == "draining"
        loads.may_go_on.set()


def test_by_default_it_never_sleeps() -> None:
    assert ServerConfig().sleep_idle_s == 0
