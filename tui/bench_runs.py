"""Benchmarks of the bench screen: which options a scenario has, the child that runs one, earlier results.

Owns the child's life and the folder of results. Knows nothing of widgets; what a benchmark means is bench's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from edgeserve.bench.compare import compare, read_summary
from edgeserve.bench.options import Scenario
from edgeserve.bench.read_options import read_options
from edgeserve.bench.report import comparison_text
from edgeserve.client import hide_user
from edgeserve.folders import data_dir
from tui.bench_child import REPORT

# What each scenario can be told here, by the names of `edgeserve bench`'s options.
FIELDS: Mapping[Scenario, tuple[str, ...]] = {
    Scenario.DECODE: ("streams", "prompt", "output_tokens", "repeats"),
    Scenario.DEPTH: ("depths", "output_tokens", "repeats"),
    Scenario.STALL: ("stall_prompt", "streams", "output_tokens", "repeats"),
    Scenario.TURNS: ("turns", "prompt", "output_tokens", "repeats"),
    Scenario.LOAD: ("rate", "duration", "warmup", "prompt", "output_tokens", "slo", "repeats"),
    Scenario.SWEEP: ("rate", "duration", "warmup", "prompt", "output_tokens", "slo", "repeats"),
    Scenario.CLOSED: ("concurrency", "requests", "prompt", "output_tokens", "repeats"),
    Scenario.TRACE: ("trace", "slo", "repeats"),
    Scenario.PROBE: ("stall_prompt", "probe_rate", "duration", "repeats"),
}
ABOUT: Mapping[Scenario, str] = {
    Scenario.DECODE: "one stream, then several at once",
    Scenario.DEPTH: "one stream behind longer and longer prompts",
    Scenario.STALL: "a long prompt arrives while others decode",
    Scenario.TURNS: "one chat that grows",
    Scenario.LOAD: "requests at a given rate",
    Scenario.SWEEP: "the rate up to which the objective is kept",
    Scenario.CLOSED: "a fixed number of clients",
    Scenario.TRACE: "arrivals and lengths from a file",
    Scenario.PROBE: "one-token requests at a steady rate, a long prompt among them",
}


@dataclass(frozen=True, slots=True)
class BenchRun:
    """One finished benchmark on disk."""

    directory: Path

    @property
    def title(self) -> str:
        """When, and which scenario."""
        stamp, _, scenario = self.directory.name.partition("_")
        try:
            when = f"{datetime.strptime(stamp, '%Y%m%d-%H%M%S'):%Y-%m-%d %H:%M}"
        except ValueError:
            when = stamp
        return f"{when}  {scenario}"

    @property
    def report(self) -> str:
        """The text as it was printed."""
        try:
            return (self.directory / REPORT).read_text(encoding="utf-8")
        except OSError as error:
            return f"The report cannot be read: {error.strerror}."


class BenchStore:
    """Results in `directory`; by default the user's own data directory."""

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = directory or data_dir() / "bench"

    def new_directory(self, scenario: Scenario) -> Path:
        return self.directory / f"{datetime.now():%Y%m%d-%H%M%S}_{scenario.value}"

    def runs(self) -> list[BenchRun]:
        """The newest first; only what has a summary."""
        found = sorted(self.directory.glob("*/summary.json"), reverse=True)
        return [BenchRun(path.parent) for path in found]


def compared(first: BenchRun, second: BenchRun) -> str:
    """The two side by side. Raises UsageError when they have nothing in common."""
    a, b = (read_summary(run.directory / "summary.json") for run in (first, second))
    return f"first   {first.title}\nsecond  {second.title}\n\n{comparison_text(compare(a, b))}"


def command_of(url: str, typed: Mapping[str, str]) -> list[str]:
    """The same benchmark as a command line; the key and the address's user are left out."""
    words = ["edgeserve", "bench", "--url", hide_user(url)]
    for name, text in typed.items():
        words += [f"--{name.replace('_', '-')}", text] if text else []
    return words


class BenchChild:
    """One running benchmark. `news` ends with it; `stop` asks for what has been measured so far."""

    def __init__(self, url: str, api_key: str | None, typed: Mapping[str, str], directory: Path) -> None:
        """Raises UsageError for options that cannot be understood."""
        read_options(typed, url, api_key, None)
        self._request = {
            "url": url,
            "api_key": api_key,
            "typed": dict(typed),
            "directory": str(directory),
            "command": command_of(url, typed),
            "width": 64,
        }
        self._process: asyncio.subprocess.Process | None = None

    async def news(self) -> AsyncGenerator[dict[str, Any], None]:
        """{"progress": text}, then {"done": directory} or {"error": text}. Closing it ends the child."""
        process = self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tui.bench_child"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            # Ctrl-C in the terminal is for the screen; the child is stopped by `stop`.
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(self._request).encode() + b"\n")
            await process.stdin.drain()
            is_over = False
            async for line in process.stdout:
                document = json.loads(line)
                is_over = is_over or "done" in document or "error" in document
                yield document
            if not is_over:
                yield {"error": f"The benchmark ended with code {await process.wait()}."}
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    def stop(self) -> None:
        """Ask the child to end with what it has."""
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(signal.SIGINT)
