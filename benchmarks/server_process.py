"""A server in a process of its own, for the scripts that are hard on it: what it counts, logs, holds."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx2
import psutil

READY_S = 120.0


class Server:
    """`edgeserve serve` as a child process. Its log lines are the count of what it has seen."""

    def __init__(self, model: str, port: int, extra: list[str]) -> None:
        handle, self._log = tempfile.mkstemp(suffix=".log")
        command = [sys.executable, "-m", "edgeserve", "serve", model, "--port", str(port), *extra]
        self.process = subprocess.Popen(command, stderr=handle)
        os.close(handle)
        self.usage = psutil.Process(self.process.pid)
        self.http = httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=30)
        self._wait(self._is_ready)

    def _wait(self, holds: Any, at_most_s: float = READY_S) -> None:
        give_up_s = time.monotonic() + at_most_s
        while not holds():
            if self.process.poll() is not None or time.monotonic() > give_up_s:
                raise SystemExit(f"the server did not come this far:\n{self.lines()[-20:]}")
            time.sleep(0.05)

    def _is_ready(self) -> bool:
        try:
            return self.http.get("/health").status_code == 200
        except httpx2.TransportError:
            return False

    def settle(self) -> dict[str, Any]:
        """Wait until nothing runs, then tell what is there."""
        self._wait(lambda: not any(slot["is_processing"] for slot in self.http.get("/slots").json()))
        text = ""

        def is_idle() -> bool:
            nonlocal text
            text = self.http.get("/metrics").text
            return (
                metric(text, "edgeserve_requests_running") + metric(text, "edgeserve_requests_waiting") == 0
            )

        self._wait(is_idle)
        self._wait(lambda: self.num_connections() <= 1, 30)
        return {
            "rss_mib": self.rss_mib(),
            "threads": self.usage.num_threads(),
            "files": self.usage.num_fds(),
            "counted": metric(text, "edgeserve_requests_total"),
            "cells in use": metric(text, 'edgeserve_kv_cells{state="used"}'),
        }

    def num_connections(self) -> int:
        return sum(item.status == psutil.CONN_ESTABLISHED for item in self.usage.net_connections())

    def rss_mib(self) -> float:
        return float(self.usage.memory_info().rss / 2**20)

    def lines(self) -> list[str]:
        return Path(self._log).read_text(encoding="utf-8").splitlines()

    def outcomes(self) -> Counter[str]:
        """What became of requests, by the log."""
        documents = [json.loads(line) for line in self.lines() if line.startswith("{")]
        return Counter(document["outcome"] for document in documents)

    def terminate(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(READY_S)


def metric(text: str, name: str) -> int:
    """The sum over all labels, or of the one series that `name` spells out."""
    pattern = rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)$"
    return int(sum(map(float, re.findall(pattern, text, re.MULTILINE))))


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
