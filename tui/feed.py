"""The one feed of an application: follows a server, keeps what it said, and asks it for changes.

Owns the connection's life and the latest state, for every screen. Screens read; nobody but this writes.
Knows nothing of widgets.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing

from edgeserve.client import Client, hide_user, server_root
from edgeserve.errors import EdgeserveError
from tui.history import History
from tui.launcher import Launcher
from tui.server_memory import PlannedMemory, ProcessMemory, find_process, planned_memory, process_memory
from tui.snapshot import Link, LinkState, ServerFacts, Snapshot
from tui.source import watch

MEMORY_EVERY_S = 2.0


class Feed:
    """What is known of the server at `url`. `version` grows with every change."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """Raises UsageError when `url` is no address."""
        self.version = 0
        self.launcher: Launcher | None = None
        """Of the server that was started from here, if any."""
        self.turn_to(url, api_key)

    def turn_to(self, url: str, api_key: str | None = None) -> None:
        """Another server; whoever follows must begin anew."""
        self.url = server_root(url)
        self.api_key = api_key
        self.version += 1
        self.since_s = time.monotonic()
        self.link = Link(LinkState.LOOKING)
        self.facts: ServerFacts | None = None
        self.history = History()
        self.planned: PlannedMemory | None = None
        self.real: ProcessMemory | None = None
        self._pid: int | None = None

    @property
    def address(self) -> str:
        """`url` as it may be shown: without a user that it names."""
        return hide_user(self.url)

    @property
    def latest(self) -> Snapshot | None:
        """The newest snapshot; stays after the server has gone."""
        return self.history.latest

    @property
    def is_live(self) -> bool:
        return self.link.state is LinkState.LIVE

    @property
    def is_starting(self) -> bool:
        """Whether a server was started from here and has not answered yet."""
        return self.latest is None and self.launcher is not None and self.launcher.is_alive

    def now(self) -> float:
        """The observer's clock."""
        return time.monotonic()

    async def follow(self) -> None:
        """Runs until it is cancelled."""
        async with aclosing(watch(self.url, self.api_key)) as updates:
            async for update in updates:
                self._take(update)

    def _take(self, update: Link | ServerFacts | Snapshot) -> None:
        self.version += 1
        if isinstance(update, Snapshot):
            self.history.take(update)
        elif isinstance(update, ServerFacts):
            self._take_facts(update)
        else:
            self.link = update

    def _take_facts(self, facts: ServerFacts) -> None:
        """A server that has come (back): its counters start anew."""
        self.facts = facts
        self.history = History()
        self.since_s = time.monotonic()
        self.planned = self.real = self._pid = None

    async def follow_memory(self) -> None:
        """Looks at the server's process now and then, where it runs on this machine. Until cancelled."""
        planned_for: ServerFacts | None = None
        while True:
            facts = self.facts
            if facts is not None and self.is_live:
                if planned_for is not facts:
                    planned_for, self.planned = facts, await asyncio.to_thread(planned_memory, facts)
                    self._pid = await asyncio.to_thread(find_process, facts.url)
                if self._pid is not None:
                    self.real = await asyncio.to_thread(process_memory, self._pid)
                self.version += 1
            await asyncio.sleep(MEMORY_EVERY_S)

    async def cancel(self, request_id: str) -> str:
        """Ask the server to end a request; what came of it, in words."""
        try:
            async with Client(self.url, self.api_key, read_timeout_s=5.0) as client:
                await client.post_json(f"/requests/{request_id}/cancel", {})
        except EdgeserveError as error:
            return f"Not cancelled: {error.message}"
        return "Cancelled."
