"""Clients that leave at every stage, send nonsense, send slowly: nothing is left behind, all is counted."""

from __future__ import annotations

import asyncio
import re
import threading

from chaos_clients import ACTIONS, run
from conftest import ServeApart
from live_server import Live

from edgeserve.config import ServerConfig


def tasks_of(live: Live) -> set[str]:
    """What runs on the server's event loop."""
    [server] = live.server.servers
    return {repr(task.get_coro()) for task in asyncio.all_tasks(server.get_loop())}


def counted(live: Live) -> int:
    values = re.findall(
        r"^edgeserve_requests_total\{.*\} (\S+)$", live.http.get("/metrics").text, re.MULTILINE
    )
    return int(sum(map(float, values)))


def test_nothing_is_left_behind(serve_apart: ServeApart) -> None:
    live = serve_apart(ServerConfig(sse_ping_s=0.05), n_ctx=1024, n_seq_max=2, max_waiting=6)
    threads_before, tasks_before = set(threading.enumerate()), tasks_of(live)
    outcomes = run(live.port, num_requests=32, num_clients=12, seed=1)
    assert [outcome for outcome in outcomes if outcome.fault] == []
    assert len({outcome.action for outcome in outcomes}) == len(set(ACTIONS))
    live.wait_until(lambda: live.state.num_active == 0, "for all to be forgotten")
    live.wait_until_idle()

    stats = live.stats
    assert not stats.running and not stats.waiting
    assert stats.num_used_cells == stats.num_cached_cells
    assert not any(slot["is_processing"] for slot in live.http.get("/slots").json())

    num_counted = sum(outcome.is_counted for outcome in outcomes)
    live.wait_until(lambda: counted(live) >= num_counted, "for all to be counted")
    assert counted(live) == num_counted

    live.http.close()
    live.wait_until(lambda: not live.server.server_state.connections, "for all connections to end")
    live.wait_until(lambda: tasks_of(live) <= tasks_before, "for all tasks to end")
    assert not live.server.server_state.tasks
    # Worker threads of the event loop stay; there is a bound to them.
    left = set(threading.enumerate()) - threads_before
    assert {thread.name.rpartition("_")[0] for thread in left} <= {"asyncio"}


def test_the_same_server_serves_on(serve_apart: ServeApart) -> None:
    """With one slot and no queue at all, nearly everybody is refused; it is as good as new afterwards."""
    live = serve_apart(n_ctx=512, n_seq_max=1, max_waiting=0)
    outcomes = run(live.port, num_requests=16, num_clients=8, seed=2)
    assert [outcome for outcome in outcomes if outcome.fault] == []
    live.wait_until(lambda: live.state.num_active == 0, "for all to be forgotten")
    live.wait_until_idle()
    answer = live.post("/v1/completions", prompt="Hi", max_tokens=3, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 3
