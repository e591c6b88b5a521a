"""Messages between the feed, the application and its screens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from textual.message import Message


@dataclass
class FeedChanged(Message):
    """There is something new to show, or time has passed; sent to the visible screen a few times a second.

    `is_still`: nothing has changed but the time.
    """

    is_still: bool


@dataclass
class StartServer(Message):
    """Somebody wants a server: the model and flags of `edgeserve serve`."""

    arguments: Sequence[str]
