"""What is said about the server and the connection to it, and the figures of one request in full."""

from __future__ import annotations

from tui import words
from tui.dialogs import Figures
from tui.feed import Feed
from tui.lines import TwoEndedLine
from tui.snapshot import LinkState, SequenceView, ServerFacts, ServerKind


def server_parts(facts: ServerFacts | None, url: str) -> list[TwoEndedLine.Part]:
    """Which server and model."""
    address = url.removeprefix("http://")
    parts = [("edgeserve", "name"), ("  ", "plain")]
    if facts is None:
        return [*parts, (address, "quiet")]
    kind = "" if facts.kind is ServerKind.EDGESERVE else f" · {facts.kind.value}"
    return [*parts, (facts.model or "no model", "plain"), (f"  ·  {address}{kind}", "quiet")]


def link_parts(feed: Feed, now_s: float, *, is_narrow: bool = False) -> list[TwoEndedLine.Part]:
    """How many run and wait, or what is wrong with the connection."""
    if feed.link.state is LinkState.LIVE:
        snapshot = feed.latest
        if snapshot is None:
            return [("connected", "quiet")]
        waiting = snapshot.num_waiting
        return [
            (f"{len(snapshot.running)} running", "decode" if snapshot.running else "quiet"),
            (" · ", "quiet"),
            ("queue n/a" if waiting is None else f"{waiting:,} waiting", "prefill" if waiting else "quiet"),
            *([(f"   watched {words.span(now_s - feed.since_s)}", "quiet")] if not is_narrow else []),
        ]
    is_quiet = feed.link.state is LinkState.LOOKING or feed.is_starting
    return [(_link_text(feed), "quiet" if is_quiet else "stalled")]


def _link_text(feed: Feed) -> str:
    link = feed.link
    if feed.is_starting:
        return "starting"
    if link.state is LinkState.LOOKING:
        return "looking for the server"
    again = f", again in {link.retry_s:g} s" if link.retry_s else ""
    if link.state is LinkState.LOADING:
        return f"{link.message.rstrip('.')}{again}"
    if link.state is LinkState.REFUSED:
        return "refused" if feed.latest is None else link.message
    return f"server gone{again}"


def absent_text(feed: Feed) -> str:
    """What fills the screen before the first word of a server."""
    link = feed.link
    address = feed.address.removeprefix("http://")
    if feed.is_starting:
        return f"Starting a server at {address}.{_said(feed)}"
    if feed.launcher is not None and feed.launcher.exit_code is not None:
        return (
            f"The server that was started here has ended: exit code {feed.launcher.exit_code}.{_said(feed)}"
        )
    if link.state is LinkState.LOOKING:
        return f"Looking for a server at {address}."
    if link.state is LinkState.LOADING:
        return f"{address}\n\n{link.message}\nThis screen continues by itself."
    if link.state is LinkState.REFUSED:
        return f"{address}\n\n{link.message}"
    if feed.facts is not None:
        return f"The server at {address} has gone.\n\nThis screen continues when it is back."
    return (
        f"No server answers at {address}.\n\n"
        "Start one in another terminal:   edgeserve serve\n"
        "or here:   press s\n"
        "Another address:   edgeserve tui --url http://HOST:PORT\n\n"
        "This screen picks it up by itself.   F2 plans without a server."
    )


def _said(feed: Feed) -> str:
    """The last lines of the server that was started here."""
    lines = feed.launcher.lines if feed.launcher is not None else ()
    return "".join(["\n", *(f"\n{line}" for line in lines)]) if lines else ""


def request_figures(view: SequenceView) -> Figures.Section:
    """All that is known of one request."""
    own = view.own_ms_per_token
    rows = [
        ("state", view.status.value + (f", for {view.waits_for}" if view.waits_for else "")),
        ("slot", str(view.slot) if view.slot >= 0 else "none"),
        ("prompt", f"{words.count(view.num_prompt)} tokens"),
        ("cached", f"{words.count(view.num_cached)} tokens"),
        ("evaluated", f"{words.count(view.num_evaluated)} tokens"),
        ("out", f"{view.num_output:,} of at most {words.count(view.max_tokens)} tokens"),
        ("queue", _ms(view.queue_ms)),
        ("prefill", _ms(view.prefill_ms)),
        ("ttft", _ms(view.ttft_ms)),
        ("decode", _ms(view.decode_ms)),
        ("stalled by others", _ms(view.stalled_ms)),
        ("own decode", words.per_token(own)),
    ]
    return view.request_id, "", rows


def _ms(milliseconds: float | None) -> str:
    return words.duration(None if milliseconds is None else milliseconds / 1e3)
