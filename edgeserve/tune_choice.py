"""Which of the measured settings are fastest: the choice and its reasons, over seconds by tune.py.

The choice is for a prompt of a thousand tokens and two hundred tokens of answer behind it. Who runs one
sequence reads the prompt in large chunks and decodes alone. Who serves several reads it in the small chunks
that keep other streams fluent, and decodes half of the answer while other sequences decode too.

Nothing is chosen that is not clearly faster than the settings without tuning: by a margin, and in nearly all
turns. Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from edgeserve.config import FlashAttention
from edgeserve.engine.tuning import StepSample, Tuning, Tunings

NUM_STREAMS = 4
"""Sequences that decode at once where several are served."""

PROMPT_TOKENS, ANSWER_TOKENS = 1000, 200
"""The request that settings are chosen for."""

SMALL_CHUNK, LARGE_CHUNK = 32, 128
MARGIN = 0.03
"""What is not faster by more than that stays out of the choice: it might be noise."""

MIN_ROUNDS = 3
_MOST_WINS = 0.8


@dataclass(frozen=True, slots=True)
class Candidate:
    flash_attn: FlashAttention
    n_threads: int


@dataclass(slots=True)
class Turns:
    """A candidate's samples in seconds, one a turn and kind of step: turn i of one was beside turn i of the
    others. Prompt steps by their tokens, at depth; `streams_s` are decodes of a few streams at once."""

    decode_s: list[float] = field(default_factory=list)
    decode_deep_s: list[float] = field(default_factory=list)
    chunk_s: dict[int, list[float]] = field(default_factory=dict)
    streams_s: list[float] = field(default_factory=list)

    @property
    def alone_s(self) -> list[float]:
        """Expected seconds of the request that has the machine to itself, by turn; its prompt in small chunks
        where there was no time to measure large ones."""
        return self._request_s(
            LARGE_CHUNK if LARGE_CHUNK in self.chunk_s else SMALL_CHUNK, self.decode_deep_s
        )

    @property
    def beside_s(self) -> list[float]:
        """Expected seconds of the request among others, by turn."""
        pairs = zip(self.decode_deep_s, self.streams_s, strict=False)
        return self._request_s(SMALL_CHUNK, [(alone + streams) / 2 for alone, streams in pairs])

    def _request_s(self, chunk: int, token_s: Sequence[float]) -> list[float]:
        pairs = zip(self.chunk_s.get(chunk, ()), token_s, strict=False)
        return [PROMPT_TOKENS / chunk * step_s + ANSWER_TOKENS * each_s for step_s, each_s in pairs]

    def row(self, candidate: Candidate) -> dict[str, object]:
        """Medians, for the table: decode in ms, prompts in tokens per second; None where nothing was
        measured."""
        return {
            "flash_attn": candidate.flash_attn,
            "n_threads": candidate.n_threads,
            "decode_ms": _ms(self.decode_s),
            "decode_deep_ms": _ms(self.decode_deep_s),
            "streams_ms": _ms(self.streams_s),
            "prefill_tok_s": {
                size: size / median(samples) for size, samples in sorted(self.chunk_s.items()) if samples
            },
            "request_s": median(self.alone_s) if self.alone_s else None,
            "request_beside_s": median(self.beside_s) if self.beside_s else None,
            "turns": len(self.alone_s),
        }


def _ms(samples: Sequence[float]) -> float | None:
    return 1e3 * median(samples) if samples else None


def is_clearly_faster(challenger: Sequence[float], default: Sequence[float]) -> bool:
    """By more than MARGIN in the middle, and faster in nearly all turns."""
    ratios = [a / b for a, b in zip(challenger, default, strict=False)]
    if len(ratios) < MIN_ROUNDS:
        return False
    return median(ratios) < 1 - MARGIN and sum(ratio < 1 for ratio in ratios) >= _MOST_WINS * len(ratios)


def choose(default: Candidate, turns: dict[Candidate, Turns]) -> tuple[Tunings, list[str]]:
    """The fastest for one sequence and for several, with the reasons for both."""
    alone, why_alone = _choose(default, turns, _ALONE)
    beside, why_beside = _choose(default, turns, _BESIDE)
    return Tunings(alone, beside), list(dict.fromkeys([why_alone[0], *why_beside, *why_alone[1:]]))


@dataclass(frozen=True, slots=True)
class _Load:
    """What a choice is for: who runs it, what is computed, and the seconds of that by turn."""

    name: str
    request: str
    seconds: Callable[[Turns], list[float]]


_ALONE = _Load(
    "One sequence",
    f"{PROMPT_TOKENS:,} prompt tokens and {ANSWER_TOKENS} tokens of answer",
    lambda turns: turns.alone_s,
)
_BESIDE = _Load(
    "Several sequences",
    f"the same in small chunks, half of the answer beside {NUM_STREAMS - 1} streams,",
    lambda turns: turns.beside_s,
)


def _choose(default: Candidate, turns: dict[Candidate, Turns], load: _Load) -> tuple[Tuning, list[str]]:
    """Flash attention by the whole request, then the threads of decoding and of prompts apart."""
    most = default.n_threads
    kinds = {item.flash_attn: turns[item] for item in turns if item.n_threads == most}
    times = {kind: load.seconds(samples) for kind, samples in kinds.items()}
    flash_attn = default.flash_attn
    for kind, samples_s in times.items():
        if is_clearly_faster(samples_s, times[default.flash_attn]):
            flash_attn = kind
    chosen = {item.n_threads: turns[item] for item in turns if item.flash_attn == flash_attn}
    n_threads = _fewer(chosen, most, lambda samples: samples.decode_deep_s)
    n_threads_batch = _fewer(chosen, most, lambda samples: samples.chunk_s.get(SMALL_CHUNK, []))
    tuning = Tuning(
        flash_attn, n_threads, n_threads_batch, steps=_steps(chosen[n_threads], chosen[n_threads_batch])
    )
    return tuning, [
        _flash_reason(load, flash_attn, times),
        f"{n_threads} threads decode and {n_threads_batch} read prompts, {_of_threads(chosen, most)}.",
    ]


def _fewer(by_threads: dict[int, Turns], most: int, samples_of: Callable[[Turns], Sequence[float]]) -> int:
    for n_threads, turns in by_threads.items():
        if n_threads != most and is_clearly_faster(samples_of(turns), samples_of(by_threads[most])):
            return n_threads
    return most


def _steps(decode: Turns, prompts: Turns) -> tuple[StepSample, ...]:
    decodes = [StepSample(1, 0, median(decode.decode_s))] if decode.decode_s else []
    chunks = [StepSample(0, size, median(samples)) for size, samples in sorted(prompts.chunk_s.items())]
    streams = [StepSample(NUM_STREAMS, 0, median(decode.streams_s))] if decode.streams_s else []
    return (*decodes, *streams, *chunks)


def _flash_reason(
    load: _Load, chosen: FlashAttention, samples_s: Mapping[FlashAttention, Sequence[float]]
) -> str:
    times = {kind: median(samples) for kind, samples in samples_s.items() if samples}
    if len(times) < 2:
        return f"{load.name}: flash attention {chosen}; the other way was not measured."
    other = next(kind for kind in times if kind != chosen)
    text = f"{load.request} take {times[chosen]:.1f} s, {times[other]:.1f} s with {other}"
    small = ", too small a difference to leave the default" if times[other] < times[chosen] else ""
    return f"{load.name}: flash attention {chosen}; {text}{small}."


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
