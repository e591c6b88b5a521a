"""The figures of a chat in words: the line under an answer, tokens' times, totals, a prefill's progress.

Owns wording, units and what is left out when a figure would mean nothing. Computes nothing that
`chat_answer` and `metrics` define.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prompt_toolkit.utils import get_cwidth

from edgeserve.chat.answer import Figures, TokenTime
from edgeserve.ink import Ink, format_ms, printable, significant, without_colour
from edgeserve.metrics import MIN_TOKENS_FOR_RATE, percentile, prefill_share, tokens_per_s
from edgeserve.stream_events import PromptProgress

MIN_WAIT_SHOWN_S = 0.1
_CELL_COLUMNS = 22
_GAP = "   "


def figures_lines(figures: Figures, n_ctx: int | None, ink: Ink, columns: int, *notes: str) -> list[str]:
    """The quiet line under an answer, broken between figures where `columns` are too few."""
    parts = [
        _prompt(figures, ink),
        ink(f"ttft {_ms(figures.ttft_s)}", "dim"),
        ink(_prefill(figures), "prefill"),
        ink(_decode(figures), "decode"),
        ink(_wait("queued", figures.queue_s), "dim"),
        ink(_wait("stalled", figures.stalled_s), "stalled"),
        ink(_context(figures, n_ctx), "dim"),
        *(ink(note, "dim") for note in notes),
    ]
    lines: list[str] = []
    for part in filter(None, parts):
        longer = f"{lines[-1]}{_GAP}{part}" if lines else part
        if lines and get_cwidth(without_colour(longer)) <= columns:
            lines[-1] = longer
        else:
            lines.append(part)
    return lines


def _ms(seconds: float | None) -> str:
    return format_ms(seconds) if seconds is not None else "n/a"


def _prompt(figures: Figures, ink: Ink) -> str:
    if figures.num_prompt is None:
        return ink("prompt n/a", "dim")
    cached = f" ({figures.num_cached:,} cached)" if figures.num_cached else ""
    return ink(f"prompt {figures.num_prompt:,}", "dim") + ink(cached, "cached")


def _prefill(figures: Figures) -> str:
    rate = figures.prefill_tokens_per_s
    if rate is not None:
        return f"prefill {significant(rate)} tok/s"
    # A rate over a handful of tokens measures the call, not the model.
    if figures.num_evaluated is not None and figures.num_evaluated < MIN_TOKENS_FOR_RATE:
        return f"prefill {figures.num_evaluated} evaluated"
    return "prefill n/a"


def _decode(figures: Figures) -> str:
    if figures.tpot_s is None:
        return "decode n/a"
    rate = figures.decode_tokens_per_s
    speed = f"  {significant(rate)} tok/s" if rate is not None else ""
    return f"decode {significant(figures.tpot_s * 1000)} ms/token{speed}"


def _wait(what: str, seconds: float) -> str:
    """Time given to other requests, once it is long enough to be felt."""
    return f"{what} {format_ms(seconds)}" if seconds >= MIN_WAIT_SHOWN_S else ""


def _context(figures: Figures, n_ctx: int | None) -> str:
    if figures.num_context is None:
        return ""
    return f"context {figures.num_context:,}" + (f"/{n_ctx:,}" if n_ctx else "")


def progress_text(progress: PromptProgress, age_s: float) -> str:
    """`prefill 1,240 of 3,120 tokens (40 %), 6 s left`; `age_s` is how old the report is.

    While there is nothing to tell the time left by, the seconds since the report show that time passes.
    """
    share = 100 * progress.processed / progress.total if progress.total else 100
    text = f"prefill {progress.processed:,} of {progress.total:,} tokens ({share:.0f} %)"
    num_evaluated = progress.processed - progress.cache
    if num_evaluated < MIN_TOKENS_FOR_RATE or progress.time_ms <= 0:
        return f"{text}, for {age_s:.0f} s" if age_s >= 1 else text
    left_s = (progress.total - progress.processed) * progress.time_ms / 1000 / num_evaluated - age_s
    return f"{text}, {left_s:.0f} s left" if left_s >= 1 else text


def token_time_lines(
    times: Sequence[TokenTime], ttft_s: float | None, clock: str, ink: Ink, columns: int
) -> list[str]:
    """Each token's time beside its text. The first one's is TTFT: it holds the whole prefill."""
    if not times:
        return []
    later = times[1:]
    cells = [_token_cell(_ms(ttft_s), times[0], ink, "prefill")]
    cells += [_token_cell(f"{time.time_s * 1000:,.1f}", time, ink, "decode") for time in later]
    per_line = max(1, columns // _CELL_COLUMNS)
    lines = [f"time of each token, by the {clock}'s clock, in ms (the first: ttft, by the client's)"]
    lines += ["".join(cells[start : start + per_line]).rstrip() for start in range(0, len(cells), per_line)]
    return lines + _summary_lines(later)


def _token_cell(shown_time: str, time: TokenTime, ink: Ink, style: str) -> str:
    text = printable(time.text).replace("\n", "↵").replace("\t", "⇥").replace(" ", "·")
    several = f"×{time.num_tokens} " if time.num_tokens > 1 else ""
    text = _cut(several + text, _CELL_COLUMNS - 10)
    space = " " * (_CELL_COLUMNS - 9 - get_cwidth(text))
    return f"{ink(f'{shown_time:>8}', style)} {ink(text, 'dim')}{space}"


def _cut(text: str, columns: int) -> str:
    if get_cwidth(text) <= columns:
        return text
    while get_cwidth(text) > columns - 1:
        text = text[:-1]
    return text + "…"


def _summary_lines(times: Sequence[TokenTime]) -> list[str]:
    """Percentiles over gaps of one token: a gap that holds several is not one token's time."""
    single = [time.time_s for time in times if time.num_tokens == 1]
    p50, p90 = percentile(single, 50), percentile(single, 90)
    if p50 is None or p90 is None:
        return []
    longest = max(range(len(times)), key=lambda index: times[index].time_s)
    return [
        f"n {len(single)}   p50 {significant(p50 * 1000)} ms   p90 {significant(p90 * 1000)} ms"
        f"   longest {significant(times[longest].time_s * 1000)} ms (number {longest + 2})"
    ]


@dataclass(slots=True)
class Totals:
    """Sums over the answers of one chat, as far as servers told."""

    num_answers: int = 0
    num_evaluated: int = 0
    num_cached: int = 0
    num_output: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    num_decode_steps: int = 0

    def add(self, figures: Figures) -> None:
        self.num_answers += 1
        self.num_evaluated += figures.num_evaluated or 0
        self.num_cached += figures.num_cached or 0
        self.num_output += figures.num_output or 0
        self.prefill_s += figures.prefill_s or 0.0
        if figures.decode_s is not None and figures.num_output:
            self.decode_s += figures.decode_s
            self.num_decode_steps += figures.num_output - 1

    def lines(self, ink: Ink) -> list[str]:
        """What /stats says."""
        if not self.num_answers:
            return ["No answer yet."]
        prefill_rate = tokens_per_s(self.num_evaluated, self.prefill_s)
        decode_rate = tokens_per_s(self.num_decode_steps, self.decode_s)
        share = prefill_share(self.prefill_s, self.decode_s)
        return [
            f"answers   {self.num_answers}",
            ink(f"prefill   {self.num_evaluated:,} tokens evaluated", "prefill")
            + ink(f", {self.num_cached:,} cached", "cached")
            + ink(_time_and_rate(self.prefill_s, prefill_rate), "prefill"),
            ink(f"decode    {self.num_output:,} tokens", "decode")
            + ink(_time_and_rate(self.decode_s, decode_rate), "decode"),
            *([f"time      {share:.0%} prefill, {1 - share:.0%} decode".replace("%", " %")] if share else []),
        ]


def _time_and_rate(seconds: float, rate: float | None) -> str:
    if seconds <= 0:
        return ""
    return f"   {format_ms(seconds)}" + (f"   {significant(rate)} tok/s" if rate is not None else "")
