"""What watching costs: the TUI's processor time, what it takes from the server, and how fast it starts.

    edgeserve serve smollm2-135m -np 4 --port 8080 &
    python benchmarks/tui_cost.py --url http://127.0.0.1:8080 [--minutes 3] [--window 60] [--streams 4]

`--streams` answers run all the time. Windows without and with `edgeserve tui` take turns; tokens are counted
by the server's own counter, processor time by the system, for the TUI's process alone, in a terminal of
`--size`. Prints one JSON document, and each window to stderr as it ends; `others_share` is what everything
but server, TUI and this script took of all cores, so that a machine that was not quiet shows.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import json
import os
import pty
import struct
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import aclosing, contextmanager, suppress
from dataclasses import asdict, dataclass
from statistics import median

import psutil

from edgeserve.client import Client
from edgeserve.errors import EdgeserveError
from tui.llama_server import read_metrics
from tui.server_memory import find_process

FIRST_FRAME = b"prefill"
SETTLE_S = 3.0


@dataclass(frozen=True)
class Window:
    """One stretch of time. Shares are of one core, `others_share` of all of them."""

    is_watched: bool
    seconds: float
    tokens_per_s: float
    tui_share: float | None
    server_share: float | None
    others_share: float


class Terminal:
    """`edgeserve tui` in a terminal that nobody reads."""

    def __init__(self, url: str, columns: int, rows: int) -> None:
        started_s = time.perf_counter()
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.environ["TERM"] = "xterm-256color"
            os.execv(sys.executable, [sys.executable, "-m", "edgeserve", "tui", "--url", url])
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.first_frame_s: float | None = None
        self.process = psutil.Process(self.pid)
        self._reader = threading.Thread(target=self._drain, args=(started_s,), daemon=True)
        self._reader.start()

    def _drain(self, started_s: float) -> None:
        seen = b""
        # A terminal whose other end has gone reads as an error.
        with suppress(OSError):
            while data := os.read(self._fd, 65536):
                if self.first_frame_s is None:
                    seen += data
                    if FIRST_FRAME in seen:
                        self.first_frame_s = time.perf_counter() - started_s

    def wait_for_frame(self, at_most_s: float = 60.0) -> float:
        deadline = time.monotonic() + at_most_s
        while self.first_frame_s is None:
            if time.monotonic() > deadline:
                raise SystemExit("The TUI drew nothing.")
            time.sleep(0.002)
        return self.first_frame_s

    def close(self) -> None:
        os.write(self._fd, b"q")
        os.waitpid(self.pid, 0)
        self._reader.join()
        os.close(self._fd)


def core_s(process: psutil.Process | None) -> float:
    """Processor time of a process and of those that it started."""
    if process is None:
        return 0.0
    times = [process.cpu_times(), *(child.cpu_times() for child in process.children(recursive=True))]
    return sum(entry.user + entry.system for entry in times)


def all_core_s() -> float:
    """Processor time that anything took on this machine."""
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0) + getattr(times, "steal", 0.0)
    return sum(times) - idle - getattr(times, "steal", 0.0)


async def tokens(client: Client) -> float:
    metrics = read_metrics(await client.get_text("/metrics"))
    return metrics["edgeserve_generation_tokens_total"]


async def keep_busy(client: Client, number: int) -> None:
    """One answer after the other, all of the same length."""
    body = {"max_tokens": 256, "ignore_eos": True, "temperature": 0.0}
    count = 0
    while True:
        count += 1
        message = {"role": "user", "content": f"Tell story {number} of chapter {count}."}
        try:
            async with aclosing(client.chat_stream([message], **body)) as events:
                async for _ in events:
                    pass
        except EdgeserveError as error:
            raise SystemExit(f"The load failed: {error}") from error


@contextmanager
def watching(url: str, size: tuple[int, int], *, is_watched: bool) -> Iterator[Terminal | None]:
    if not is_watched:
        yield None
        return
    terminal = Terminal(url, *size)
    try:
        yield terminal
    finally:
        terminal.close()


async def measure(
    client: Client, server: psutil.Process | None, terminal: Terminal | None, seconds: float
) -> Window:
    """Everything is counted between the same two moments."""
    await asyncio.sleep(SETTLE_S)
    watched = terminal.process if terminal is not None else None
    own = psutil.Process()

    def taken() -> list[float]:
        return [core_s(watched), core_s(server), core_s(own) - core_s(watched), all_core_s()]

    first, first_tokens, started_s = taken(), await tokens(client), time.perf_counter()
    await asyncio.sleep(seconds)
    last, last_tokens = taken(), await tokens(client)
    elapsed_s = time.perf_counter() - started_s
    tui_s, server_s, own_s, all_s = (after - before for before, after in zip(first, last, strict=True))
    return Window(
        terminal is not None,
        elapsed_s,
        (last_tokens - first_tokens) / elapsed_s,
        tui_s / elapsed_s if terminal is not None else None,
        server_s / elapsed_s if server is not None else None,
        (all_s - tui_s - server_s - own_s) / elapsed_s / (os.cpu_count() or 1),
    )


async def compare(options: argparse.Namespace) -> list[Window]:
    pid = find_process(options.url)
    server = psutil.Process(pid) if pid is not None else None
    windows = []
    async with Client(options.url) as client:
        load = [asyncio.create_task(keep_busy(client, number)) for number in range(options.streams)]
        try:
            for turn in range(2 * options.minutes):
                with watching(options.url, options.size, is_watched=bool(turn % 2)) as terminal:
                    windows.append(await measure(client, server, terminal, options.window))
                    print(json.dumps(asdict(windows[-1])), file=sys.stderr)
        finally:
            for task in load:
                task.cancel()
            await asyncio.gather(*load, return_exceptions=True)
    return windows


def starts(url: str, size: tuple[int, int], count: int) -> list[float]:
    found = []
    for _ in range(count):
        terminal = Terminal(url, *size)
        found.append(terminal.wait_for_frame())
        terminal.close()
    return found


def size_of(text: str) -> tuple[int, int]:
    columns, _, rows = text.partition("x")
    return int(columns), int(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--minutes", type=int, default=3, help="windows of each kind")
    parser.add_argument("--window", type=float, default=60.0, help="seconds of a window")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--size", type=size_of, default=(180, 50), metavar="COLUMNSxROWS")
    options = parser.parse_args()
    first_frames_s = starts(options.url, options.size, options.starts)
    windows = asyncio.run(compare(options))
    watched = [window for window in windows if window.is_watched]
    plain = [window for window in windows if not window.is_watched]
    document = {
        "first_frame_s": {"median": median(first_frames_s), "all": first_frames_s},
        "tui_share_of_a_core": median(window.tui_share or 0.0 for window in watched),
        "tokens_per_s_watched_over_not": median(window.tokens_per_s for window in watched)
        / median(window.tokens_per_s for window in plain),
        "others_share": median(window.others_share for window in windows),
        "load_average": os.getloadavg(),
        "windows": [asdict(window) for window in windows],
    }
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
