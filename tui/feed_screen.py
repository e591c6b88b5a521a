"""What all screens have in common: they read the application's one feed, and say above whom they watch."""

from __future__ import annotations

from textual.screen import Screen

from tui.feed import Feed
from tui.lines import TwoEndedLine
from tui.status_texts import link_parts, server_parts

_NARROW_COLUMNS = 100


class FeedScreen(Screen[None]):
    """A screen of an application that has a feed. Its first line has the id "top"."""

    @property
    def feed(self) -> Feed:
        """The application's."""
        feed = vars(self.app)["feed"]
        assert isinstance(feed, Feed)
        return feed

    @property
    def is_drawn(self) -> bool:
        """Whether its widgets are there: not yet, or no longer, when the feed speaks at the wrong moment."""
        return bool(self.query("#top"))

    def show_top(self) -> None:
        """Which server, and how it stands."""
        feed, is_narrow = self.feed, self.size.width < _NARROW_COLUMNS
        right = link_parts(feed, feed.now(), is_narrow=is_narrow)
        self.query_one("#top", TwoEndedLine).show(server_parts(feed.facts, feed.address), right)
