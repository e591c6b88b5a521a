"""Measure settings of a model here against each other: flash attention, threads, cells.

Owns what is compared, in which order and for how long. What is measured are steps (tune_probe.py); candidates
take turns, so that a machine that gets slower meanwhile is slower for all of them. What follows from the
times is tune_choice.py's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from edgeserve.config import EngineConfig, FlashAttention
from edgeserve.engine.resolve import resolve
from edgeserve.engine.tuning import Tunings
from edgeserve.errors import EdgeserveError
from edgeserve.llama import Model
from edgeserve.tune_choice import (
    LARGE_CHUNK,
    MIN_ROUNDS,
    NUM_STREAMS,
    SMALL_CHUNK,
    Candidate,
    Turns,
    choose,
    choose_layout,
)
from edgeserve.tune_probe import SEED_TOKENS, Probe, Streams

CHUNKS = (16, 32, 64, 128, 256, 512)
SHORT_S = 15.0
"""The longest that the short version may take."""

_SHORT_ROUNDS, _FULL_ROUNDS = 5, 7
_DECODES = 4


@dataclass(frozen=True, slots=True)
class TuneResult:
    """`table` holds the medians behind the choice; `layouts` the decode of four streams by cell layout, in
    ms."""

    tunings: Tunings
    reasons: list[str]
    table: list[dict[str, object]]
    layouts: dict[str, float] = field(default_factory=dict)


class Deadline:
    """When to stop measuring: at a time, or as soon as somebody says so."""

    def __init__(self, limit_s: float | None = None, is_stopped: Callable[[], bool] = lambda: False) -> None:
        self._end_s = None if limit_s is None else time.monotonic() + limit_s
        self.is_stopped = is_stopped

    def has_time_for(self, duration_s: float) -> bool:
        if self.is_stopped():
            return False
        return self._end_s is None or time.monotonic() + duration_s < self._end_s


def tune(
    model: Model,
    config: EngineConfig,
    on_progress: Callable[[str], None] = lambda text: None,
    deadline: Deadline | None = None,
    *,
    is_short: bool = False,
) -> TuneResult:
    """Measure and choose. A setting that cannot be had (flash attention off with a quantized V cache) is left
    out. `is_short` leaves out cell layouts and most chunk sizes."""
    deadline = deadline or Deadline()
    base = resolve(config, model)
    default = Candidate("on" if base.flash_attn == "auto" else base.flash_attn, base.n_threads)
    turns = _measure_all(model, base, default, deadline, on_progress, is_short)
    tunings, reasons = choose(default, turns)
    layouts: dict[str, list[float]] = {}
    if not is_short and deadline.has_time_for(0):
        on_progress("cells split and unified")
        layouts = _measure_layouts(model, replace(base, flash_attn=tunings.beside.flash_attn))
        unified, reason = choose_layout(layouts)
        beside = replace(tunings.beside, kv_unified=unified)
        tunings, reasons = replace(tunings, beside=beside), [*reasons, reason]
    table = [samples.row(candidate) for candidate, samples in turns.items()]
    shown = {name: 1e3 * median(samples) for name, samples in layouts.items()}
    return TuneResult(tunings, reasons, table, shown)


# --- measuring ---------------------------------------------------------------------------------------------


def candidates(default: Candidate, base: EngineConfig, *, is_short: bool = False) -> Iterator[Candidate]:
    """The default first. Half the threads too: memory, not computing, is what decoding waits for, though two
    threads are never too many for it."""
    quantized_v = base.type_v not in ("f32", "f16", "bf16")
    other: FlashAttention = "off" if default.flash_attn == "on" else "on"
    kinds = (default.flash_attn,) if quantized_v else (default.flash_attn, other)
    for flash_attn in kinds:
        yield Candidate(flash_attn, default.n_threads)
        if default.n_threads > (2 if is_short else 1):
            yield Candidate(flash_attn, default.n_threads // 2)


def _measure_all(
    model: Model,
    base: EngineConfig,
    default: Candidate,
    deadline: Deadline,
    on_progress: Callable[[str], None],
    is_short: bool,
) -> dict[Candidate, Turns]:
    wanted = list(candidates(default, base, is_short=is_short))
    turns = {candidate: Turns() for candidate in wanted}
    probes: dict[FlashAttention, _Probes] = {}
    try:
        for kind in dict.fromkeys(candidate.flash_attn for candidate in wanted):
            on_progress(f"flash attention {kind}")
            try:
                probes[kind] = _Probes(model, base, kind, is_short=is_short)
            except EdgeserveError:
                # What cannot be had here, for want of memory or support, is no candidate.
                if kind == default.flash_attn:
                    raise
        _take_turns(probes, turns, deadline, on_progress, is_short)
    finally:
        for probe in probes.values():
            probe.close()
    return turns


class _Probes:
    """What the steps of one kind of attention are timed on: one sequence, and a few at once."""

    def __init__(self, model: Model, base: EngineConfig, kind: FlashAttention, *, is_short: bool) -> None:
        self.one = Probe(model, base, kind, n_ubatch=128 if is_short else base.n_ubatch)
        unified = base.kv_unified is True
        try:
            self.few = Streams(model, replace(base, flash_attn=kind), NUM_STREAMS, unified=unified)
        except EdgeserveError:
            self.one.close()
            raise

    def close(self) -> None:
        self.one.close()
        self.few.close()


def _take_turns(
    probes: dict[FlashAttention, _Probes],
    turns: dict[Candidate, Turns],
    deadline: Deadline,
    on_progress: Callable[[str], None],
    is_short: bool,
) -> None:
    num_rounds = _SHORT_ROUNDS if is_short else _FULL_ROUNDS
    usable = {candidate: samples for candidate, samples in turns.items() if candidate.flash_attn in probes}
    threads = next(iter(usable)).n_threads
    for probe in probes.values():
        probe.one.step(1, threads)  # the first touches memory for the first time
    for number in range(num_rounds):
        for candidate in _order(usable, number):
            if _has_time(usable[candidate].decode_s, deadline, _DECODES):
                usable[candidate].decode_s.append(_decode_s(probes[candidate.flash_attn].one, candidate))
    token_s = median(next(iter(usable.values())).decode_s or [0.0])
    for probe in probes.values():
        # A token of a prompt takes at most about half of what one takes alone.
        if not deadline.has_time_for(SEED_TOKENS * token_s / 2):
            return
        probe.one.deepen()
        probe.one.step(1, threads)
    sizes = _sizes(next(iter(probes.values())), threads, len(usable), deadline)
    for number in range(num_rounds):
        on_progress(f"turn {number + 1} of {num_rounds}")
        for candidate in _order(usable, number):
            if not _has_time(usable[candidate].alone_s, deadline, 1 / 8):
                return
            _take_turn(probes[candidate.flash_attn], usable[candidate], candidate, sizes)
    if not is_short:
        _measure_chunks(probes, usable, deadline, on_progress)


def _sizes(probes: _Probes, n_threads: int, num_candidates: int, deadline: Deadline) -> tuple[int, ...]:
    """The chunks of every turn: large ones only where enough turns of them fit into the time."""
    token_s = probes.one.step(SMALL_CHUNK, n_threads) / SMALL_CHUNK
    num_tokens = MIN_ROUNDS * num_candidates * (SMALL_CHUNK + LARGE_CHUNK)
    return (SMALL_CHUNK, LARGE_CHUNK) if deadline.has_time_for(num_tokens * token_s) else (SMALL_CHUNK,)


def _take_turn(probes: _Probes, samples: Turns, candidate: Candidate, sizes: tuple[int, ...]) -> None:
    """One sample of all that the choice rests on."""
    n_threads = candidate.n_threads
    samples.decode_deep_s.append(_decode_s(probes.one, candidate))
    for size in sizes:
        samples.chunk_s.setdefault(size, []).append(probes.one.step(size, n_threads))
    samples.streams_s.append(median(probes.few.step(n_threads) for _ in range(_DECODES)))


def _measure_chunks(
    probes: dict[FlashAttention, _Probes],
    turns: dict[Candidate, Turns],
    deadline: Deadline,
    on_progress: Callable[[str], None],
) -> None:
    """Prompts by larger and smaller chunks, for the table and for what the scheduler should expect."""
    most = max(candidate.n_threads for candidate in turns)
    on_progress("prompts in chunks")
    for number in range(MIN_ROUNDS):
        for candidate in _order(turns, number):
            samples = turns[candidate].chunk_s
            for size in CHUNKS if candidate.n_threads == most else ():
                expected_s = size / SMALL_CHUNK * median(samples.get(SMALL_CHUNK) or [0.0])
                if size not in (SMALL_CHUNK, LARGE_CHUNK) and deadline.has_time_for(expected_s):
                    step_s = probes[candidate.flash_attn].one.step(size, candidate.n_threads)
                    samples.setdefault(size, []).append(step_s)


def _order(turns: dict[Candidate, Turns], number: int) -> list[Candidate]:
    """Forwards and backwards in turn: who is measured first is not always the same."""
    return list(turns) if number % 2 == 0 else list(turns)[::-1]


def _has_time(samples: Sequence[float], deadline: Deadline, times: float) -> bool:
    return deadline.has_time_for(times * samples[-1] if samples else 0.0)


def _decode_s(probe: Probe, candidate: Candidate) -> float:
    return median(probe.step(1, candidate.n_threads) for _ in range(_DECODES))


def _measure_layouts(model: Model, base: EngineConfig) -> dict[str, list[float]]:
    """Decodes of a few streams at once, in turns."""
    layouts = {
        name: Streams(model, base, NUM_STREAMS, SEED_TOKENS, unified=name == "unified")
        for name in ("split", "unified")
    }
    found: dict[str, list[float]] = {name: [] for name in layouts}
    try:
        for _ in range(_FULL_ROUNDS):
            for name, streams in layouts.items():
                found[name].append(median(streams.step(base.n_threads) for _ in range(_DECODES)))
    finally:
        for streams in layouts.values():
            streams.close()
    return found
