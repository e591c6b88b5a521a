"""Misbehaving clients against a server in a process of its own, with a restart by SIGTERM in between.

    python benchmarks/chaos.py MODEL [--requests 200] [--clients 32] [--seed 1]

Waves of requests (tests/server/chaos_clients.py says of what kinds) meet one server; in the middle of the
last wave it gets SIGTERM, drains, and another takes its port. Checked: every request that was sent in full
and waited for has a whole answer; the servers count exactly what the clients sent; after each wave no slot
is busy and all used cells are only cached ones. Memory, threads and open files are shown after each wave.
The exit code is 1 when a check fails.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "server"))

from chaos_clients import Outcome, run
from server_process import Server, free_port

RESTART_S = 60.0


def wave(port: int, num: int, num_clients: int, seed: int) -> list[Outcome]:
    return run(port, num, num_clients, seed, RESTART_S)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=200, help="in the last wave, which meets the restart")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--waves", type=int, default=2, help="half as large, before the last one")
    parser.add_argument("--threads", default="1")
    arguments = parser.parse_args()
    extra = [
        "-c",
        "8192",
        "-np",
        "4",
        "--max-waiting",
        "16",
        "-t",
        arguments.threads,
        "--sse-ping-interval",
        "0.2",
    ]
    port = free_port()
    failures: list[str] = []
    sent: list[Outcome] = []

    server = Server(arguments.model, port, extra)
    print(f"{'after':22} {'RSS MiB':>8} {'threads':>8} {'files':>6} {'in use':>7} {'counted':>8} {'sent':>6}")

    def report(name: str) -> None:
        state = server.settle()
        num = sum(outcome.is_counted for outcome in sent)
        print(
            f"{name:22} {state['rss_mib']:8.1f} {state['threads']:8} {state['files']:6}"
            f" {state['cells in use']:7} {state['counted']:8} {num:6}",
            flush=True,
        )
        if state["cells in use"] or state["counted"] != num:
            failures.append(
                f"{name}: {state['cells in use']} cells in use, {state['counted']} of {num} counted"
            )

    report("start")
    for index in range(arguments.waves):
        sent += wave(port, arguments.requests // 2, arguments.clients, arguments.seed + index)
        report(f"wave {index + 1}")

    last: list[Outcome] = []
    seed = arguments.seed + arguments.waves
    clients = threading.Thread(
        target=lambda: last.extend(wave(port, arguments.requests, arguments.clients, seed)), name="clients"
    )
    clients.start()
    logged_before = sum(server.outcomes().values())
    while sum(server.outcomes().values()) < logged_before + arguments.requests // 3:
        time.sleep(0.05)
    started_s = time.monotonic()
    exit_code = server.terminate()
    print(f"SIGTERM: ended with {exit_code} after {time.monotonic() - started_s:.1f} s of draining")
    first = server.outcomes()
    server = Server(arguments.model, port, extra)
    clients.join()
    sent += last
    counted_before = sum(first.values())
    state = server.settle()
    logged = first + server.outcomes()
    num = sum(outcome.is_counted for outcome in sent)
    print(f"last wave: {state['rss_mib']:.1f} MiB, {state['threads']} threads, {state['files']} files")
    if counted_before + state["counted"] != num or sum(logged.values()) != num:
        failures.append(f"{num} requests sent, {counted_before} + {state['counted']} counted")
    if exit_code != 0:
        failures.append(f"the server ended with {exit_code}")
    server.terminate()

    failures += [f"{outcome.action}: {outcome.fault}" for outcome in sent if outcome.fault]
    by_status = Counter(str(outcome.status or "left") for outcome in sent)
    print("sent", len(sent), dict(sorted(by_status.items())))
    print("logged", dict(sorted(logged.items())))
    faults = [line for line in server.lines() if "Traceback" in line or "ERROR" in line]
    failures += faults
    print(*failures, sep="\n") if failures else print("no failure")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
