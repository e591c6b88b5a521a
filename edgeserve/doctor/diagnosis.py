"""From symptom to cause: what a server's figures say, what to change, and what to expect of it.

Owns the rules and their thresholds. Pure: whoever has figures (observed.py), from two scrapes, a benchmark or
a running monitor, gets the same findings. A figure that is not known is None, and a rule that lacks one says
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Literal

from edgeserve.doctor.observed import Observed, Queue
from edgeserve.ink import format_ms, significant

MIN_REQUESTS, MIN_GAPS = 3, 50
SLOW_FIRST_TOKEN_S = 2.0
MOSTLY, HARDLY = 0.5, 0.3
UNEVEN_GAPS, FAR_FROM_MIDDLE, WORTH_A_LINE = 3.0, 1.5, 0.1
BUSY, IDLE = 0.9, 0.6
CELLS_FULL, MUCH_EVICTED = 0.9, 0.1
LITTLE_BETTER, SLOWER_WITH_DEPTH = 0.8, 1.3
LONG_PROMPT_TOKENS = 100


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A finding: what is so, the setting to change, what to expect of that, and the figures behind it."""

    rule: str
    sentence: str
    remedy: str
    expect: str
    figures: Mapping[str, str]
    level: Literal["problem", "note"] = "problem"


def diagnose(seen: Observed) -> list[Diagnosis]:
    """Every rule that has its evidence, in the order of the table."""
    return [found for rule in RULES if (found := rule(seen)) is not None]


def has_evidence(seen: Observed) -> bool:
    """Whether there was enough to call a server healthy when no rule holds."""
    return (seen.num_requests or 0) >= MIN_REQUESTS


# --- the rules ---------------------------------------------------------------------------------------------


def slow_prefill(seen: Observed) -> Diagnosis | None:
    """The first token is late although nobody was in the way."""
    ttft, share, speed = seen.ttft_miss_s, seen.queue_share, seen.prefill_tok_s
    if ttft is None or share is None or speed is None or (seen.num_misses or 0) < MIN_REQUESTS:
        return None
    if ttft < SLOW_FIRST_TOKEN_S or share > HARDLY:
        return None
    return Diagnosis(
        "slow prefill",
        f"The first token of a cold prompt takes {format_ms(ttft)}, and the queue is not why.",
        "Keep what stays the same at the start of prompts; otherwise `edgeserve tune` (flash attention,"
        " threads), more layers on a GPU (-ngl), a smaller model or quantization.",
        f"Every 100 prompt tokens that are found in the cache save {format_ms(100 / speed)}.",
        _known(
            ("ttft of cold prompts", format_ms(ttft)),
            ("cold prompts", seen.num_misses),
            ("queue's part of ttft", _percent(share)),
            ("prefill", f"{significant(speed)} tok/s"),
            ("mean prompt", seen.mean_prompt_tokens and f"{seen.mean_prompt_tokens:.0f} tokens"),
        ),
    )


def queueing(seen: Observed) -> Diagnosis | None:
    """The first token is late because the request waited its turn."""
    ttft, queue, share = seen.ttft_s, seen.queue_s, seen.queue_share
    if ttft is None or queue is None or share is None or (seen.num_requests or 0) < MIN_REQUESTS:
        return None
    if share < MOSTLY or ttft < SLOW_FIRST_TOKEN_S / 2:
        return None
    return Diagnosis(
        "queueing",
        f"Of {format_ms(ttft)} to the first token, {format_ms(queue)} are waiting for a turn.",
        _way_out_of_the_queue(seen),
        f"At best the first token comes {format_ms(queue)} sooner; streams get slower with more beside them.",
        _known(
            ("ttft", format_ms(ttft)),
            ("of that in the queue", f"{format_ms(queue)}, {_percent(share)}"),
            ("requests", seen.num_requests),
            ("slots", seen.num_slots),
            ("time in steps", None if seen.busy_share is None else _percent(seen.busy_share)),
            ("KV cells in use", _cells_text(seen)),
        ),
    )


def _way_out_of_the_queue(seen: Observed) -> str:
    if (seen.busy_share or 0.0) >= BUSY:
        return (
            "The machine computes all the time: fewer or shorter requests, or a lower --max-waiting that"
            " refuses early. More sequences (-np) help only as far as batching does."
        )
    if (seen.cells_share or 0.0) >= CELLS_FULL:
        return "A larger -c or a quantized cache (-ctk q8_0 -ctv q8_0): more sequences find no cells."
    return "More sequences (-np) with a context (-c) that grows along."


def waiting(seen: Observed) -> Diagnosis | None:
    """Who waits at this moment, and for what; a problem once that has lasted."""
    queue = seen.queue
    if queue is None or not queue.num_waiting:
        return None
    has_waited = (queue.waited_s or 0.0) >= SLOW_FIRST_TOKEN_S / 2
    return Diagnosis(
        "waiting",
        _who_waits(queue),
        "A larger -c, or a smaller max_tokens in the requests, lets it in sooner."
        if "cells" in queue.waits_for
        else _way_out_of_the_queue(seen),
        "It runs once a running request ends, at the latest.",
        _known(
            ("waiting", f"{queue.num_waiting:,}"),
            ("since", None if queue.waited_s is None else format_ms(queue.waited_s)),
            ("its prompt", queue.num_prompt_tokens and f"{queue.num_prompt_tokens:,} tokens"),
            ("its answer, at most", queue.max_tokens and f"{queue.max_tokens:,} tokens"),
            ("slots", seen.num_slots),
            ("KV cells in use", _cells_text(seen)),
        ),
        level="problem" if has_waited else "note",
    )


def _who_waits(queue: Queue) -> str:
    if not queue.first_id:
        are = "request waits" if queue.num_waiting == 1 else "requests wait"
        return f"{queue.num_waiting:,} {are} in the server's queue."
    behind = f", and {queue.num_waiting - 1:,} behind it" if queue.num_waiting > 1 else ""
    return f"{queue.first_id} waits for {queue.waits_for or 'its turn'}{behind}."


def stalls(seen: Observed) -> Diagnosis | None:
    """Most gaps are fine, the longest are not, and prompts of others were in the same steps. Fewer than one
    gap in a hundred shows in the mean only."""
    p50, p99, mean, share = seen.gap_p50_s, seen.gap_p99_s, seen.gap_mean_s or 0.0, seen.stalled_share
    if p50 is None or p99 is None or share is None or (seen.num_gaps or 0) < MIN_GAPS:
        return None
    is_often = p99 >= UNEVEN_GAPS * p50
    if share < WORTH_A_LINE or not (is_often or mean >= FAR_FROM_MIDDLE * p50):
        return None
    worst = f"{format_ms(p99)} at the 99th percentile" if is_often else f"{format_ms(mean)} on average"
    target = seen.itl_target_s
    is_kept = bool(target) and p99 <= (target or 0.0)
    whose = f"the prompt of {' and '.join(seen.prefilling[:2])}" if seen.prefilling else "prompts of others"
    return Diagnosis(
        "stalls",
        f"Gaps between tokens are {format_ms(p50)} in the middle and {worst}: steps also carry {whose}.",
        f"{'That keeps the target; a' if is_kept else 'A'} lower --itl-target-ms makes the pieces of those"
        " prompts smaller.",
        "The long gaps come down to about the target; prompts take longer to their first token.",
        _known(
            ("gap p50", format_ms(p50)),
            ("gap p99", format_ms(p99)),
            ("gap mean", format_ms(mean) if mean else None),
            ("gaps", seen.num_gaps),
            ("decode time stalled by prompts", _percent(share)),
            ("target", format_ms(target) if target else None),
        ),
        level="note" if is_kept else "problem",
    )


def idle_machine(seen: Observed) -> Diagnosis | None:
    """Streams run all the time, and the engine is not computing all the time, or spends it on drawing."""
    busy, running = seen.busy_share, seen.num_running
    if busy is None or running is None or running < 1:
        return None
    drawing = seen.sample_share or 0.0
    if busy >= IDLE and drawing < 2 * WORTH_A_LINE:
        return None
    where = (
        f"{_percent(drawing)} of the step time goes into drawing tokens"
        if drawing >= 2 * WORTH_A_LINE
        else f"steps fill only {_percent(busy)} of the time"
    )
    remedy = (
        "Fewer samplers (top_k before top_p, no penalties, no logprobs), or greedy (temperature 0)."
        if drawing >= 2 * WORTH_A_LINE
        else "More requests at once, within -np; look for slow readers of streams, and check --threads."
    )
    return Diagnosis(
        "idle machine",
        f"Requests are running, but {where}.",
        remedy,
        f"At most {significant(1 / max(busy * (1 - drawing), 0.01))} times the tokens per second.",
        _known(
            ("time in steps", _percent(busy)),
            ("of that, drawing tokens", _percent(drawing)),
            ("running", f"{running:.1f}"),
            ("streams in a step", seen.decodes_per_step and f"{seen.decodes_per_step:.1f}"),
            ("output", seen.output_tok_s and f"{significant(seen.output_tok_s)} tok/s"),
        ),
        level="note",
    )


def overload(seen: Observed) -> Diagnosis | None:
    """Computing all the time while the queue grows, requests are refused, or the objective is missed."""
    grows = _grows(seen.num_waiting_first, seen.num_waiting_last)
    is_full = (seen.busy_share or 0.0) >= BUSY and (grows or bool(seen.num_rejected))
    is_missed = bool(seen.is_saturated) or _is_below(seen.attainment, seen.attainment_target)
    if not is_full and not (is_missed and seen.is_saturated is not None):
        return None
    return Diagnosis(
        "overload",
        "More is asked than this machine can do: requests wait longer and longer, or miss their objective.",
        "A lower --max-waiting refuses early what would come too late; fewer requests a second, shorter"
        " answers, or a smaller model keep the rest in time.",
        "The requests that are taken meet their objective again; `edgeserve bench --scenario sweep` finds the"
        " rate that can be kept.",
        _known(
            ("time in steps", None if seen.busy_share is None else _percent(seen.busy_share)),
            ("waiting", _from_to(seen.num_waiting_first, seen.num_waiting_last)),
            ("rejected", seen.num_rejected),
            ("within the objective", None if seen.attainment is None else _percent(seen.attainment)),
            ("queue grew through the run", "yes" if seen.is_saturated else None),
        ),
    )


def full_cells(seen: Observed) -> Diagnosis | None:
    """Running requests hold the cells, or cached prefixes are given up faster than they help."""
    share = seen.cells_share
    evicted, looked_up = seen.num_evicted_tokens, seen.num_looked_up_tokens
    is_full = share is not None and share >= CELLS_FULL
    # A slot that a new conversation takes over loses its old one, however many cells are free.
    has_no_room = seen.filled_share >= CELLS_FULL
    is_churning = bool(has_no_room and evicted and looked_up and evicted >= MUCH_EVICTED * looked_up)
    if not is_full and not is_churning:
        return None
    what = (
        "Running requests hold nearly all KV cells."
        if is_full
        else f"The prefix cache gave up {evicted:,} tokens while {looked_up:,} were looked up."
    )
    return Diagnosis(
        "full cells",
        what,
        "A quantized cache (-ctk q8_0 -ctv q8_0) holds nearly twice as much in the same memory; a cap on"
        " answers (-n) frees cells sooner; fewer sequences (-np) leave more to each; a larger -c where memory"
        " allows.",
        "Requests are let in sooner, and prefixes stay until they are asked for again.",
        _known(
            ("KV cells in use", _cells_text(seen)),
            ("cells kept for reuse", None if seen.cells_cached is None else f"{seen.cells_cached:,}"),
            ("tokens evicted", evicted),
            ("tokens looked up", looked_up),
        ),
        level="problem" if is_full else "note",
    )


def useless_hits(seen: Observed) -> Diagnosis | None:
    """Prompts are found in the cache and start no sooner."""
    hit, miss = seen.ttft_hit_s, seen.ttft_miss_s
    enough = min(seen.num_hits or 0, seen.num_misses or 0) >= MIN_REQUESTS
    if hit is None or miss is None or not enough or hit < LITTLE_BETTER * miss:
        return None
    is_queue = (seen.queue_share or 0.0) >= MOSTLY
    is_short = (seen.hit_cached_tokens or 0.0) < 100
    if is_queue:
        why, remedy = "the queue outweighs what the cache saves", "See queueing: -np, or less load."
    elif is_short:
        why, remedy = "what is found is short", "Put what stays the same first, what changes last."
    else:
        why = "taking a long prefix over costs as much as it saves"
        remedy = "Keep a conversation in one sequence, or share cells (--kv-unified) instead of copying them."
    return Diagnosis(
        "useless hits",
        f"Prompts found in the prefix cache start no sooner than cold ones: {why}.",
        remedy,
        f"A hit should take clearly less than a cold prompt's {format_ms(miss)}.",
        _known(
            ("ttft of hits", f"{format_ms(hit)}, {seen.num_hits} requests"),
            ("ttft of cold prompts", f"{format_ms(miss)}, {seen.num_misses} requests"),
            ("tokens found", seen.hit_cached_tokens and f"{seen.hit_cached_tokens:.0f}"),
            ("of a prompt of", seen.hit_prompt_tokens and f"{seen.hit_prompt_tokens:.0f}"),
            ("queue's part of ttft", None if seen.queue_share is None else _percent(seen.queue_share)),
        ),
        level="note",
    )


def cold_prompts(seen: Observed) -> Diagnosis | None:
    """Long prompts, and none began like an earlier one."""
    misses, requests, length = seen.num_misses, seen.num_requests, seen.mean_prompt_tokens
    if misses is None or requests is None or length is None or length < LONG_PROMPT_TOKENS:
        return None
    if misses < max(MIN_REQUESTS, requests):
        return None
    speed = seen.prefill_tok_s
    return Diagnosis(
        "cold prompts",
        f"None of {misses:,} prompts began like an earlier one: all of each had to be read.",
        "Put what stays the same first (system prompt, examples), what changes last.",
        f"Every 100 prompt tokens that are found in the cache save {format_ms(100 / speed)}."
        if speed
        else "What is found in the cache need not be read.",
        _known(
            ("prompts", misses),
            ("mean prompt", f"{length:,.0f} tokens"),
            ("prefill", speed and f"{significant(speed)} tok/s"),
        ),
        level="note",
    )


def slow_depth(seen: Observed) -> Diagnosis | None:
    """The same model decodes clearly slower behind a long context."""
    shallow, deep = seen.shallow_tpot_s, seen.deep_tpot_s
    low, high = seen.shallow_tokens, seen.deep_tokens
    if shallow is None or deep is None or low is None or high is None or high <= low:
        return None
    if deep < SLOWER_WITH_DEPTH * shallow:
        return None
    per_thousand_s = (deep - shallow) / (high - low) * 1000
    return Diagnosis(
        "slow at depth",
        f"A token takes {format_ms(shallow)} behind {low:,} tokens and {format_ms(deep)} behind {high:,}:"
        " each token reads the whole context.",
        "A quantized cache (-ctk q8_0 -ctv q8_0) reads about half as much; summarize long chats; models with"
        " a sliding window read only a part. `edgeserve tune` measures whether flash attention helps here.",
        f"Each 1,000 tokens of context less save about {format_ms(per_thousand_s)} a token.",
        _known(
            (f"per token at {low:,}", format_ms(shallow)),
            (f"per token at {high:,}", format_ms(deep)),
            ("cache types", _cache_types(seen)),
        ),
        level="note",
    )


RULES: tuple[Callable[[Observed], Diagnosis | None], ...] = (
    overload,
    queueing,
    waiting,
    slow_prefill,
    stalls,
    full_cells,
    useless_hits,
    cold_prompts,
    slow_depth,
    idle_machine,
)


# --- words -------------------------------------------------------------------------------------------------


def _known(*pairs: tuple[str, object]) -> dict[str, str]:
    return {name: str(value) for name, value in pairs if value is not None}


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _cells_text(seen: Observed) -> str | None:
    return None if seen.cells_share is None else f"{seen.cells_used:,} of {seen.cells_total:,}"


def _grows(first: int | None, last: int | None) -> bool:
    """A queue that was empty at first says how the window began, not that it grows; others come and go by
    chance, by about the square root of their length."""
    if not first or last is None:
        return False
    return last - first > 2 * sqrt(first)


def _is_below(value: float | None, bound: float | None) -> bool:
    return value is not None and bound is not None and value < bound


def _from_to(first: int | None, last: int | None) -> str | None:
    return None if first is None or last is None else f"{first}, then {last}"


def _cache_types(seen: Observed) -> str | None:
    types = [str(seen.settings[name]) for name in ("type_k", "type_v") if name in seen.settings]
    return "/".join(types) or None
