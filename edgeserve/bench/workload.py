"""What is sent, and when: lengths and arrival times drawn from a seed before the first request leaves.

Owns: length distributions, arrival processes, the plan of requests, and traces read from JSONL.
Does not know: the text of a prompt (prompts.py), HTTP, or how a request went.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from edgeserve.errors import UsageError

MAX_TOKENS_DRAWN = 1_000_000
# Traces in Mooncake's format name the prompt's content in blocks of this many tokens.
TRACE_BLOCK_TOKENS = 512


@dataclass(frozen=True)
class Lengths:
    """A distribution of token counts: `fixed` (a), `uniform` (a to b), `lognormal` (median a, sigma b), or a
    `mix` of such, each with its share."""

    kind: str
    a: float
    b: float = 0.0
    parts: tuple[tuple[float, Lengths], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """`512`, `128-1024`, `lognormal:512:0.6`, or a mix such as `90%64-192+10%1330`."""
        if "%" in text:
            return cls._mix([part.strip().partition("%") for part in text.split("+")])
        return cls._simple(text)

    @classmethod
    def _mix(cls, parts: Sequence[tuple[str, str, str]]) -> Lengths:
        try:
            shares = [(float(share) / 100, cls._simple(length)) for share, _, length in parts]
        except ValueError:
            shares = []
        if not all(share > 0 for share, _ in shares) or not math.isclose(sum(s for s, _ in shares), 1.0):
            raise UsageError("The shares of a mix must come to 100 %.", "Write it like 90%64-192+10%1330.")
        _, largest = max(shares, key=lambda part: part[0])
        return cls("mix", largest.a, largest.b, tuple(shares))

    @classmethod
    def _simple(cls, text: str) -> Lengths:
        parts = text.strip().lower().split(":")
        try:
            if parts[0] == "lognormal" and len(parts) == 3:
                lengths = cls("lognormal", int(parts[1]), float(parts[2]))
            elif len(parts) == 1 and "-" in parts[0]:
                low, high = (int(part) for part in parts[0].split("-"))
                lengths = cls("uniform", low, high)
            elif len(parts) == 1:
                lengths = cls("fixed", int(parts[0]))
            else:
                raise ValueError
        except ValueError:
            raise UsageError(
                f"{text!r} is not a length.",
                "Write 512, 128-1024, lognormal:512:0.6 (median, sigma) or 90%64-192+10%1330.",
            ) from None
        lengths._check()
        return lengths

    def _check(self) -> None:
        sane = 1 <= self.a <= MAX_TOKENS_DRAWN and math.isfinite(self.b) and self.b <= MAX_TOKENS_DRAWN
        if not sane or (self.kind == "uniform" and self.b < self.a) or self.b < 0:
            raise UsageError(f"A length must lie between 1 and {MAX_TOKENS_DRAWN:,}, the lower bound first.")

    def draw(self, rng: random.Random) -> int:
        if self.kind == "mix":
            shares, lengths = zip(*self.parts, strict=True)
            return int(rng.choices(lengths, shares)[0].draw(rng))
        if self.kind == "uniform":
            return rng.randint(int(self.a), int(self.b))
        if self.kind == "lognormal":
            drawn = rng.lognormvariate(math.log(self.a), self.b)
            return max(1, min(MAX_TOKENS_DRAWN, round(drawn)))
        return int(self.a)

    @property
    def typical(self) -> int:
        """A length in the middle; of a mix, of its commonest part."""
        if self.kind == "mix":
            return max(self.parts, key=lambda part: part[0])[1].typical
        return round((self.a + self.b) / 2) if self.kind == "uniform" else int(self.a)

    def __str__(self) -> str:
        if self.kind == "mix":
            return "+".join(f"{100 * share:g}%{lengths}" for share, lengths in self.parts)
        if self.kind == "uniform":
            return f"{int(self.a)}-{int(self.b)}"
        return f"lognormal:{int(self.a)}:{self.b:g}" if self.kind == "lognormal" else str(int(self.a))


class Arrivals(StrEnum):
    """How requests come in an open loop."""

    CONSTANT = "constant"
    POISSON = "poisson"
    GAMMA = "gamma"


def arrival_times_s(
    arrivals: Arrivals, rate_per_s: float, duration_s: float, rng: random.Random, burstiness: float = 1.0
) -> list[float]:
    """Scheduled instants in [0, duration), the first at 0 for a constant rate.

    Gamma gaps have shape = burstiness and scale = 1 / (rate * burstiness): mean 1 / rate whatever the
    burstiness, 1 is Poisson, below 1 comes in bursts, above 1 is more even. Not rescaled: a short Poisson run
    offers the number that it drew, which the report states.
    """
    if not (rate_per_s > 0 and math.isfinite(rate_per_s)):
        raise UsageError("A rate must be a number of requests per second above 0.")
    if not (burstiness > 0 and math.isfinite(burstiness)):
        raise UsageError("Burstiness must be above 0.")
    if arrivals is Arrivals.CONSTANT:
        return [index / rate_per_s for index in range(math.ceil(duration_s * rate_per_s))]
    shape = burstiness if arrivals is Arrivals.GAMMA else 1.0
    times: list[float] = []
    at_s = rng.gammavariate(shape, 1 / (rate_per_s * shape))
    while at_s < duration_s:
        times.append(at_s)
        at_s += rng.gammavariate(shape, 1 / (rate_per_s * shape))
    return times


@dataclass(frozen=True)
class Planned:
    """One request before it has a text.

    `at_s` is the scheduled instant after the start of the run, None in a closed loop. `shared_prefix_tokens`
    of the prompt are the same for all requests of the run; `block_ids` (traces) name content block by block.
    """

    index: int
    num_prompt_tokens: int
    max_tokens: int
    at_s: float | None = None
    shared_prefix_tokens: int = 0
    block_ids: tuple[int, ...] = ()
    label: str = ""


@dataclass(frozen=True)
class Shape:
    """The lengths of a workload's requests. The shared prefix comes on top of the prompt's own tokens."""

    prompt: Lengths
    output: Lengths
    shared_prefix_tokens: int = 0

    def plan(self, index: int, rng: random.Random, at_s: float | None = None, label: str = "") -> Planned:
        return Planned(
            index=index,
            num_prompt_tokens=self.prompt.draw(rng) + self.shared_prefix_tokens,
            max_tokens=self.output.draw(rng),
            at_s=at_s,
            shared_prefix_tokens=self.shared_prefix_tokens,
            label=label,
        )


def open_loop(
    shape: Shape, arrivals: Arrivals, rate_per_s: float, duration_s: float, seed: int, burstiness: float = 1.0
) -> list[Planned]:
    """Arrival times and lengths come from streams of their own: the same seed at another rate keeps the
    lengths, so that points of a sweep differ in the rate alone."""
    times = arrival_times_s(arrivals, rate_per_s, duration_s, random.Random(f"{seed}-times"), burstiness)
    lengths = random.Random(f"{seed}-lengths")
    return [shape.plan(index, lengths, at_s) for index, at_s in enumerate(times)]


def closed_loop(shape: Shape, num_requests: int, seed: int) -> list[Planned]:
    lengths = random.Random(f"{seed}-lengths")
    return [shape.plan(index, lengths) for index in range(num_requests)]


def read_trace(path: Path) -> list[Planned]:
    """One JSON object a line, sorted by time. Own fields: `at_s`, `prompt_tokens`, `max_tokens`,
    `shared_prefix_tokens`. Mooncake's fields are understood too: `timestamp` (ms), `input_length`,
    `output_length`, `hash_ids`."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"The trace {path} cannot be read: {error}.") from error
    planned = sorted(_trace_lines(lines, path), key=lambda request: request.at_s or 0.0)
    if not planned:
        raise UsageError(f"The trace {path} holds no requests.")
    return planned


def _trace_lines(lines: Sequence[str], path: Path) -> Iterator[Planned]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield _trace_request(json.loads(line), number - 1)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(
                f"Line {number} of {path} is not a request ({type(error).__name__}: {error}).",
                'Each line needs at least {"at_s": 0.5, "prompt_tokens": 512, "max_tokens": 64}.',
            ) from error


def _trace_request(entry: dict[str, Any], index: int) -> Planned:
    at_s = float(entry["at_s"]) if "at_s" in entry else float(entry["timestamp"]) / 1000
    num_prompt_tokens = int(entry["prompt_tokens"] if "prompt_tokens" in entry else entry["input_length"])
    max_tokens = int(entry["max_tokens"] if "max_tokens" in entry else entry["output_length"])
    if not (math.isfinite(at_s) and at_s >= 0):
        raise ValueError("a time before the start")
    if not (1 <= num_prompt_tokens <= MAX_TOKENS_DRAWN and 1 <= max_tokens <= MAX_TOKENS_DRAWN):
        raise ValueError("a length out of range")
    return Planned(
        index=index,
        num_prompt_tokens=num_prompt_tokens,
        max_tokens=max_tokens,
        at_s=at_s,
        shared_prefix_tokens=int(entry.get("shared_prefix_tokens", 0)),
        block_ids=tuple(int(block) for block in entry.get("hash_ids", ())),
    )
