"""What all screens have in common: they read the application's one feed."""

from __future__ import annotations

from textual.screen import Screen

from tui.feed import Feed


class FeedScreen(Screen[None]):
    """A screen of an application that has a feed."""

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
