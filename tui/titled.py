"""A panel that is told its titles and contents again and again, and repaints only what has changed.

Owns the comparing. Setting a title of a frame repaints the whole panel, and painting is most of what watching
costs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from textual.geometry import Region
from textual.widget import Widget


class Titled(Widget):
    """Drawn line by line, within a frame that has titles."""

    _titles: tuple[str, str] = ("", "")

    def entitle(self, title: str, subtitle: str = "") -> None:
        """Both titles of the frame, as markup."""
        if (title, subtitle) != self._titles:
            self._titles = (title, subtitle)
            self.border_title, self.border_subtitle = title, subtitle

    def repaint_lines(self, lines: Iterable[int]) -> None:
        """Only these, counted from the first below the frame."""
        regions = [Region(0, y, self.size.width, 1) for y in lines if 0 <= y < self.size.height]
        if regions:
            self.refresh(*regions)


def changed(old: Sequence[object], new: Sequence[object]) -> list[int]:
    """Where two sequences differ, places that only one of them has included."""
    common = min(len(old), len(new))
    places = [index for index in range(common) if old[index] != new[index]]
    return [*places, *range(common, max(len(old), len(new)))]
