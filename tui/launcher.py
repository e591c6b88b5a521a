"""A server started from here: `edgeserve serve` in a process of its own, which ends with the application.

Owns the child's life, the last lines it said, and the choice of a free port. Loads no model itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections import deque
from collections.abc import Sequence
from urllib.parse import urlsplit

_END_S = 5.0
_KEPT_LINES = 30


class Launcher:
    """At most one child at a time."""

    def __init__(self) -> None:
        self.lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def exit_code(self) -> int | None:
        """Of a child that has ended; None while one runs, and before there was one."""
        return None if self._process is None else self._process.returncode

    async def start(self, arguments: Sequence[str], port: int) -> str:
        """Start `edgeserve serve ARGUMENTS` on the loopback; the address it will answer at. An earlier child
        is ended first."""
        await self.stop()
        self.lines.clear()
        command = ["-m", "edgeserve", "serve", *arguments, "--host", "127.0.0.1", "--port", str(port)]
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            # Ctrl-C in the terminal is for the screen.
            start_new_session=True,
        )
        self._reader = asyncio.create_task(self._read(self._process))
        return f"http://127.0.0.1:{port}"

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        async for line in process.stderr:
            self.lines.append(line.decode(errors="replace").rstrip())
        await process.wait()

    async def stop(self) -> None:
        """End the child, if there is one; politely first."""
        process = self._process
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            try:
                async with asyncio.timeout(_END_S):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()
        if self._reader is not None:
            await self._reader
        self._process = self._reader = None


def free_port(url: str) -> int:
    """The port of `url` if nobody listens there, else any free one."""
    wanted = urlsplit(url).port or 8080
    for port in (wanted, 0):
        with socket.socket() as probe:
            # As servers do: a port whose last connections linger is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return int(probe.getsockname()[1])
    return wanted
