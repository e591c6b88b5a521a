"""A long run of everything at once: does a server that is never left alone leak, stall or lose count?

    python benchmarks/soak.py MODEL [--minutes 30] [--rate 2] [--seed 1]

Requests of all kinds (tests/server/chaos_clients.py: whole, streamed, left at every stage, slow, malformed,
impossible) arrive at random at the given mean rate, and are not slowed down by slow answers. Every tenth of
the time they pause until the server is idle, and it is asked what it holds: no cell may be in use, every
request must be counted once, threads and files must be as before. At the end the resident memory's slope is
told, in MiB an hour, without the first fifth of the time, which fills caches. Exit code 1 when a check fails.
"""

from __future__ import annotations

import argparse
import random
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "server"))

from chaos_clients import ACTIONS, Client, Outcome, attempt
from server_process import Server, free_port

NUM_PAUSES = 10
MAX_CLIENTS = 64
SAMPLE_S = 1.0


@dataclass
class Arrivals:
    """Requests at random instants; each one has a thread of its own, so that none waits for another."""

    port: int
    rate: float
    dice: random.Random
    outcomes: list[Outcome] = field(default_factory=list)
    num_skipped: int = 0
    """Arrivals that found too many clients still busy: they were not sent."""

    def run(self, until_s: float) -> None:
        threads: list[threading.Thread] = []
        while time.monotonic() < until_s:
            time.sleep(self.dice.expovariate(self.rate))
            threads = [thread for thread in threads if thread.is_alive()]
            if len(threads) >= MAX_CLIENTS:
                self.num_skipped += 1
                continue
            threads.append(threading.Thread(target=self._one, args=(self.dice.random(),)))
            threads[-1].start()
        for thread in threads:
            thread.join()

    def _one(self, seed: float) -> None:
        dice = random.Random(seed)
        self.outcomes.append(attempt(dice.choice(ACTIONS), Client(self.port, dice), 0.0))


def slope_mib_per_h(samples: list[tuple[float, float]]) -> float:
    """Least squares through (seconds, MiB), without the first fifth."""
    at_s, mib = np.array(samples[len(samples) // 5 :]).T
    return float(np.polyfit(at_s, mib, 1)[0] * 3600)


def sample_memory(server: Server, samples: list[tuple[float, float]], done: threading.Event) -> None:
    while not done.wait(SAMPLE_S):
        samples.append((time.monotonic(), server.rss_mib()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--rate", type=float, default=2.0, help="requests a second, on average")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", default="1")
    arguments = parser.parse_args()
    options = ["-c", "8192", "-np", "4", "--max-waiting", "16", "-t", arguments.threads]
    port = free_port()
    server = Server(arguments.model, port, options)
    arrivals = Arrivals(port, arguments.rate, random.Random(arguments.seed))
    samples: list[tuple[float, float]] = []
    done = threading.Event()
    threading.Thread(target=sample_memory, args=(server, samples, done), daemon=True).start()
    failures: list[str] = []
    started_s = time.monotonic()
    print(
        f"{'minute':>6} {'RSS MiB':>8} {'threads':>8} {'files':>6} {'in use':>7} {'counted':>8} {'sent':>6}"
    )
    for pause in range(NUM_PAUSES):
        arrivals.run(started_s + arguments.minutes * 60 * (pause + 1) / NUM_PAUSES)
        state = server.settle()
        num = sum(outcome.is_counted for outcome in arrivals.outcomes)
        minute = (time.monotonic() - started_s) / 60
        print(
            f"{minute:6.1f} {state['rss_mib']:8.1f} {state['threads']:8} {state['files']:6}"
            f" {state['cells in use']:7} {state['counted']:8} {num:6}",
            flush=True,
        )
        if state["cells in use"] or state["counted"] != num:
            failures.append(f"minute {minute:.1f}: {state['cells in use']} cells in use, {num} sent")
    done.set()
    exit_code = server.terminate()
    if exit_code != 0:
        failures.append(f"the server ended with {exit_code}")
    failures += [f"{outcome.action}: {outcome.fault}" for outcome in arrivals.outcomes if outcome.fault]
    failures += [line for line in server.lines() if "Traceback" in line or "ERROR" in line]
    by_status = Counter(str(outcome.status or "left") for outcome in arrivals.outcomes)
    print(f"sent {len(arrivals.outcomes)}, {arrivals.num_skipped} skipped, {dict(sorted(by_status.items()))}")
    print(f"logged {dict(sorted(server.outcomes().items()))}")
    print(f"memory grows by {slope_mib_per_h(samples):+.1f} MiB an hour ({len(samples)} samples)")
    print(*failures, sep="\n") if failures else print("no failure")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
