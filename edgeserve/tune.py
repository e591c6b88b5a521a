"""Measure which settings are fastest for a model here, and choose: flash attention, threads, cells.

Owns what is compared, the choice and its reasons. The choice is for one user's ordinary request beside
others: a prompt of a thousand tokens computed in the small chunks that keep other streams fluent, and two
hundred tokens of answer behind it. What is measured are steps (tune_probe.py); candidates take turns, so that
a machine that gets slower meanwhile is slower for all of them.

Nothing is chosen that is not clearly faster than the settings without tuning: by a margin, and in nearly all
turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from edgeserve.config import EngineConfig, FlashAttention
from edgeserve.engine.resolve import resolve
from edgeserve.engine.tuning import StepSample, Tuning
from edgeserve.errors import EdgeserveError
from edgeserve.llama import Model
from edgeserve.tune_probe import Probe, Streams

PROMPT_TOKENS, ANSWER_TOKENS = 1000, 200
"""The request that settings are chosen for."""

SMALL_CHUNK = 32
CHUNKS = (16, 32, 64, 128, 256, 512)
MARGIN = 0.03
"""What is not faster by more than that stays out of the choice: it might be noise."""

SHORT_S = 15.0
"""The longest that the short version may take."""

_MIN_ROUNDS, _SHORT_ROUNDS, _FULL_ROUNDS = 3, 5, 7
_MOST_WINS = 0.8
_DECODES = 4


@dataclass(frozen=True, slots=True)
class Candidate:
    flash_attn: FlashAttention
    n_threads: int

    def __str__(self) -> str:
        return f"flash attention {self.flash_attn}, {self.n_threads} threads"


@dataclass(slots=True)
class Turns:
    """A candidate's samples in seconds, one a turn and kind of step: turn i of one was beside turn i of the
    others. Prompt steps by their tokens, at depth."""

    decode_s: list[float] = field(default_factory=list)
    decode_deep_s: list[float] = field(default_factory=list)
    chunk_s: dict[int, list[float]] = field(default_factory=dict)

    @property
    def request_s(self) -> list[float]:
        """Expected seconds of the request that settings are chosen for, by turn."""
        pairs = zip(self.chunk_s.get(SMALL_CHUNK, ()), self.decode_deep_s, strict=False)
        return [PROMPT_TOKENS / SMALL_CHUNK * chunk + ANSWER_TOKENS * deep for chunk, deep in pairs]

    def row(self, candidate: Candidate) -> dict[str, object]:
        """Medians, for the table: decode in ms, prompts in tokens per second; None where nothing was
        measured."""
        return {
            "flash_attn": candidate.flash_attn,
            "n_threads": candidate.n_threads,
            "decode_ms": _ms(self.decode_s),
            "decode_deep_ms": _ms(self.decode_deep_s),
            "prefill_tok_s": {
                size: size / median(samples) for size, samples in sorted(self.chunk_s.items()) if samples
            },
            "request_s": median(self.request_s) if self.request_s else None,
            "turns": len(self.request_s),
        }


def _ms(samples: Sequence[float]) -> float | None:
    return 1e3 * median(samples) if samples else None


@dataclass(frozen=True, slots=True)
class TuneResult:
    """`table` holds the medians behind the choice; `layouts` the decode of four streams by cell layout, in
    ms."""

    tuning: Tuning
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
    tuning, reasons = choose(default, turns)
    layouts: dict[str, list[float]] = {}
    if not is_short and deadline.has_time_for(0):
        on_progress("cells split and unified")
        layouts = _measure_layouts(model, replace(base, flash_attn=tuning.flash_attn))
        unified, reason = choose_layout(layouts)
        tuning, reasons = replace(tuning, kv_unified=unified), [*reasons, reason]
    table = [samples.row(candidate) for candidate, samples in turns.items()]
    shown = {name: 1e3 * median(samples) for name, samples in layouts.items()}
    return TuneResult(tuning, reasons, table, shown)


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
    probes: dict[FlashAttention, Probe] = {}
    try:
        for kind in dict.fromkeys(candidate.flash_attn for candidate in wanted):
            on_progress(f"flash attention {kind}")
            try:
                probes[kind] = Probe(model, base, kind, n_ubatch=128 if is_short else base.n_ubatch)
            except EdgeserveError:
                # What cannot be had here, for want of memory or support, is no candidate.
                if kind == default.flash_attn:
                    raise
        _take_turns(probes, turns, deadline, on_progress, is_short)
    finally:
        for probe in probes.values():
            probe.close()
    return turns


def _take_turns(
    probes: dict[FlashAttention, Probe],
    turns: dict[Candidate, Turns],
    deadline: Deadline,
    on_progress: Callable[[str], None],
    is_short: bool,
) -> None:
    num_rounds = _SHORT_ROUNDS if is_short else _FULL_ROUNDS
    usable = {candidate: samples for candidate, samples in turns.items() if candidate.flash_attn in probes}
    for probe in probes.values():
        probe.step(1, next(iter(usable)).n_threads)  # the first touches memory for the first time
    for number in range(num_rounds):
        for candidate in _order(usable, number):
            if _has_time(usable[candidate].decode_s, deadline, _DECODES):
                usable[candidate].decode_s.append(_decode_s(probes[candidate.flash_attn], candidate))
    for probe in probes.values():
        probe.deepen()
        probe.step(1, next(iter(usable)).n_threads)
    for number in range(num_rounds):
        on_progress(f"turn {number + 1} of {num_rounds}")
        for candidate in _order(usable, number):
            samples, probe = usable[candidate], probes[candidate.flash_attn]
            if not _has_time(samples.request_s, deadline, 1 / 20):
                return
            samples.decode_deep_s.append(_decode_s(probe, candidate))
            samples.chunk_s.setdefault(SMALL_CHUNK, []).append(probe.step(SMALL_CHUNK, candidate.n_threads))
    _measure_chunks(probes, usable, deadline, on_progress, is_short)


def _measure_chunks(
    probes: dict[FlashAttention, Probe],
    turns: dict[Candidate, Turns],
    deadline: Deadline,
    on_progress: Callable[[str], None],
    is_short: bool,
) -> None:
    """Prompts by larger and smaller chunks, for the table and for what the scheduler should expect."""
    sizes = (128,) if is_short else CHUNKS
    most = max(candidate.n_threads for candidate in turns)
    on_progress("prompts in chunks")
    for number in range(1 if is_short else _MIN_ROUNDS):
        for candidate in _order(turns, number):
            samples = turns[candidate].chunk_s
            for size in sizes if candidate.n_threads == most else ():
                expected_s = size / SMALL_CHUNK * median(samples.get(SMALL_CHUNK) or [0.0])
                if size != SMALL_CHUNK and deadline.has_time_for(expected_s):
                    step_s = probes[candidate.flash_attn].step(size, candidate.n_threads)
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
    layouts = {"split": Streams(model, base, unified=False), "unified": Streams(model, base, unified=True)}
    found: dict[str, list[float]] = {name: [] for name in layouts}
    try:
        for _ in range(_FULL_ROUNDS):
            for name, streams in layouts.items():
                found[name].append(median(streams.step() for _ in range(_DECODES)))
    finally:
        for streams in layouts.values():
            streams.close()
    return found


# --- choosing ----------------------------------------------------------------------------------------------


def is_clearly_faster(challenger: Sequence[float], default: Sequence[float]) -> bool:
    """By more than MARGIN in the middle, and faster in nearly all turns."""
    ratios = [a / b for a, b in zip(challenger, default, strict=False)]
    if len(ratios) < _MIN_ROUNDS:
        return False
    return median(ratios) < 1 - MARGIN and sum(ratio < 1 for ratio in ratios) >= _MOST_WINS * len(ratios)


def choose(default: Candidate, turns: dict[Candidate, Turns]) -> tuple[Tuning, list[str]]:
    """Flash attention by the whole request, then the threads of decoding and of prompts apart."""
    most = default.n_threads
    kinds = {item.flash_attn: turns[item] for item in turns if item.n_threads == most}
    kept = kinds[default.flash_attn]
    flash_attn = default.flash_attn
    for kind, samples in kinds.items():
        if is_clearly_faster(samples.request_s, kept.request_s):
            flash_attn = kind
    chosen = {item.n_threads: turns[item] for item in turns if item.flash_attn == flash_attn}
    n_threads = _fewer(chosen, most, lambda samples: samples.decode_deep_s)
    n_threads_batch = _fewer(chosen, most, lambda samples: samples.chunk_s.get(SMALL_CHUNK, []))
    tuning = Tuning(
        flash_attn, n_threads, n_threads_batch, steps=_steps(chosen[n_threads], chosen[n_threads_batch])
    )
    reasons = [
        _flash_reason(default, flash_attn, kinds),
        f"{n_threads} threads decode and {n_threads_batch} read prompts, {_of_threads(chosen, most)}.",
    ]
    return tuning, reasons


def _fewer(by_threads: dict[int, Turns], most: int, samples_of: Callable[[Turns], Sequence[float]]) -> int:
    for n_threads, turns in by_threads.items():
        if n_threads != most and is_clearly_faster(samples_of(turns), samples_of(by_threads[most])):
            return n_threads
    return most


def _steps(decode: Turns, prompts: Turns) -> tuple[StepSample, ...]:
    decodes = [StepSample(1, 0, median(decode.decode_s))] if decode.decode_s else []
    chunks = [StepSample(0, size, median(samples)) for size, samples in sorted(prompts.chunk_s.items())]
    return (*decodes, *chunks)


def _flash_reason(default: Candidate, chosen: FlashAttention, kinds: dict[FlashAttention, Turns]) -> str:
    times = {kind: median(turns.request_s) for kind, turns in kinds.items() if turns.request_s}
    if len(times) < 2:
        return f"flash attention {chosen}: the other way was not measured."
    other = next(kind for kind in times if kind != chosen)
    request = f"{PROMPT_TOKENS:,} prompt tokens in small steps and {ANSWER_TOKENS} tokens of answer"
    text = (
        f"flash attention {chosen}: {request} take {times[chosen]:.1f} s, {times[other]:.1f} s with {other}"
    )
    if times[other] < times[chosen]:
        return f"{text}, too small a difference to leave the default."
    return f"{text}."


def _of_threads(by_threads: dict[int, Turns], most: int) -> str:
    parts = [
        f"{n_threads}: {1e3 * median(turns.decode_deep_s):.1f} ms a token"
        for n_threads, turns in sorted(by_threads.items())
        if turns.decode_deep_s
    ]
    return f"of {most} ({', '.join(parts)})" if len(parts) > 1 else f"of {most}"


def choose_layout(layouts: Mapping[str, Sequence[float]]) -> tuple[bool, str]:
    """Split cells unless unified ones are clearly faster: they also keep what is idle out of others' way."""
    unified = is_clearly_faster(layouts["unified"], layouts["split"])
    times = {name: 1e3 * median(samples) for name, samples in layouts.items()}
    name = "unified" if unified else "split"
    shown = ", ".join(f"{value:.1f} ms a step when {name}" for name, value in times.items())
    return unified, f"{name} cells: four streams take {shown}."
