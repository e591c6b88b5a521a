"""Prefill and decode of a feed on their two charts: which figure is drawn, and the words around it."""

from __future__ import annotations

from tui import words
from tui.charts import TimeChart
from tui.feed import Feed
from tui.history import Bucket

NOT_TOLD = "this server does not tell it"


def show_speeds(feed: Feed, prefill: TimeChart, decode: TimeChart, column_s: float) -> None:
    """Both charts up to now, a column for every `column_s` seconds."""
    now = feed.history.now(feed.now())
    columns = _columns(feed, max(prefill.num_columns, decode.num_columns, 1), column_s)
    speeds = [column.prefill_tokens_per_s for column in columns]
    gaps = [column.ms_per_token for column in columns]
    prefill.show(speeds[-max(1, prefill.num_columns) :], column_s)
    decode.show(gaps[-max(1, decode.num_columns) :], column_s, target_ms(feed))
    latest = feed.latest
    tells_prefill = latest is None or latest.tells_prefill
    tells_decode = latest is None or latest.tells_decode
    prefill.entitle(
        f"prefill  [b $prefill]{_prefill_text(now) if tells_prefill else words.NA}[/]",
        "tok/s" if tells_prefill else NOT_TOLD,
    )
    decode.entitle(
        f"decode  [b $decode]{_decode_text(now) if tells_decode else words.NA}[/]",
        f"ms/token   {_target_text(feed)}" if tells_decode else NOT_TOLD,
    )


def target_ms(feed: Feed) -> float | None:
    """The server's gap target where it is a number; None when automatic or not told."""
    told = feed.latest.itl_target_ms if feed.latest else None
    return told or (feed.facts.itl_target_ms if feed.facts else None) or None


def _columns(feed: Feed, num_columns: int, column_s: float) -> list[Bucket]:
    """Work up to now, on a grid that does not move with the clock."""
    last = int(feed.now() // column_s) + 1
    return [
        feed.history.column(index * column_s, (index + 1) * column_s)
        for index in range(last - num_columns, last)
    ]


def _target_text(feed: Feed) -> str:
    target = target_ms(feed)
    if target:
        return f"╌ target {words.duration(target / 1e3)}"
    is_automatic = feed.facts is not None and feed.facts.itl_target_ms == 0
    return "target automatic" if is_automatic else "target not told"


def _prefill_text(now: Bucket) -> str:
    return words.rate(now.prefill_tokens_per_s) if now.prefill_tokens else "idle"


def _decode_text(now: Bucket) -> str:
    if now.ms_per_token is None:
        return "idle"
    return f"{words.per_token(now.ms_per_token)} · {words.rate(now.decode_tokens_per_s)}"
