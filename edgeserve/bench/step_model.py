"""What a step costs, as a formula fitted to measured rows: the model's place in a simulation.

Owns the formula, its fit to the rows of `edgeserve bench --engine`, and its making from a few known figures.
Knows nothing of queues or requests.

    decode step of B sequences with C resident tokens in all:   fixed + each * B + depth * C
    a piece of n prompt tokens behind c resident ones:          n * (cost in pieces of n) + depth * n * c

A step that carries both pays the fixed part, the reading of the weights, once.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgeserve.errors import UsageError


@dataclass(frozen=True, slots=True)
class StepModel:
    """`prefill_s` maps piece sizes to seconds per token, the fixed part of a step included; between two sizes
    it is interpolated over the logarithm, beyond them the nearest holds. `source` says where it is from."""

    fixed_s: float
    each_s: float
    depth_s: float
    prefill_s: Mapping[int, float]
    source: str = ""

    def __post_init__(self) -> None:
        values = [self.fixed_s, self.each_s, self.depth_s, *self.prefill_s.values()]
        if not self.prefill_s or not all(math.isfinite(value) and value >= 0 for value in values):
            raise UsageError("A step model needs costs that are numbers from 0 on, and one for prompts.")
        if self.fixed_s + self.each_s <= 0 or min(self.prefill_s.values()) <= 0:
            raise UsageError("A step that costs nothing cannot be simulated.")

    def step_s(self, decode_depths: Sequence[int], prefills: Sequence[tuple[int, int]]) -> float:
        """Seconds of a step. `decode_depths` are the resident tokens of each decoding sequence, `prefills`
        (tokens, resident tokens before them) of each prompt's piece."""
        num_prefill = sum(size for size, _ in prefills)
        behind = sum(size * depth for size, depth in prefills)
        decode_s = self.each_s * len(decode_depths) + self.depth_s * sum(decode_depths)
        # The measured cost of a piece holds the fixed part already.
        base_s = num_prefill * self.prefill_token_s(num_prefill) if num_prefill else self.fixed_s
        return base_s + decode_s + self.depth_s * behind

    def prefill_token_s(self, num_tokens: int) -> float:
        sizes = sorted(self.prefill_s)
        place = bisect_left(sizes, num_tokens)
        if place == 0 or place == len(sizes):
            nearest = sizes[0] if place == 0 else sizes[-1]
            # A smaller piece than any measured costs as much as a step at least.
            return max(self.prefill_s[nearest], (self.fixed_s + self.each_s * num_tokens) / num_tokens)
        low, high = sizes[place - 1], sizes[place]
        share = math.log(num_tokens / low) / math.log(high / low)
        return math.exp((1 - share) * math.log(self.prefill_s[low]) + share * math.log(self.prefill_s[high]))


def from_figures(decode_ms: float, prefill_tok_s: float, each_ms: float, depth_ms: float) -> StepModel:
    """From a token's time alone, prompt tokens per second, and what a further sequence, and 1,000 resident
    tokens, add to a step. Raises UsageError."""
    if decode_ms <= each_ms or prefill_tok_s <= 0:
        raise UsageError(
            "A token alone costs more than a further sequence, and prompts have a speed above 0."
        )
    return StepModel(
        fixed_s=(decode_ms - each_ms) / 1e3,
        each_s=each_ms / 1e3,
        depth_s=depth_ms / 1e6,
        prefill_s={512: 1 / prefill_tok_s},
        source=f"{decode_ms:g} ms per token, {prefill_tok_s:g} prompt tokens/s, as given",
    )


def from_prediction(
    decode_s: Callable[[int, int], float], prefill_token_s: Callable[[int], float], source: str
) -> StepModel:
    """From an estimate: seconds of a decode step by (sequences, resident tokens of each), and seconds per
    prompt token by the size of its piece."""
    points = [(num, resident) for num in (1, 2, 4, 8) for resident in (64, 1024, 4096)]
    rows = [{"pl": num, "pp": resident, "tg": 1, "t_tg": decode_s(num, resident)} for num, resident in points]
    fixed_s, each_s, depth_s = _fit_decode(rows)
    pieces = {size: prefill_token_s(size) for size in (8, 32, 128, 512)}
    return StepModel(fixed_s, each_s, depth_s, pieces, source)


def from_engine_bench(documents: Sequence[Mapping[str, Any]]) -> StepModel:
    """Fit to the documents of `edgeserve bench --engine --json`, best with several -npl and -npp, and one
    document for each -b that prompts may come in. Raises UsageError when they do not allow it."""
    rows = [(row, int(document["n_batch"])) for document in documents for row in _rows(document)]
    fixed_s, each_s, depth_s = _fit_decode([row for row, _ in rows])
    prefill: dict[int, list[float]] = {}
    for row, n_batch in rows:
        piece = min(n_batch, row["pp"] * row["pl"])
        # Half of a prompt lies behind a token on average, however it is cut.
        token_s = row["t_pp"] / (row["pp"] * row["pl"]) - depth_s * row["pp"] / 2
        prefill.setdefault(piece, []).append(max(token_s, 1e-9))
    means = {piece: sum(values) / len(values) for piece, values in prefill.items()}
    names = ", ".join(sorted({str(document.get("model")) for document in documents}))
    return StepModel(fixed_s, each_s, depth_s, means, f"{len(rows)} rows measured with {names}")


def _rows(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if not str(document.get("schema", "")).startswith("edgeserve-engine-bench/"):
        raise UsageError("This is no result of `edgeserve bench --engine`.", "Make one with --json or --out.")
    rows = document.get("rows") or []
    if document.get("is_pp_shared") or not rows:
        raise UsageError("The result has no rows with a prompt for each sequence.", "Measure without -pps.")
    return list(rows)


def _fit_decode(rows: Sequence[Mapping[str, Any]]) -> tuple[float, float, float]:
    """(fixed, each, depth) by least squares on relative errors, none below 0: a cost that comes out negative
    is left out, and the rest is fitted again."""
    # Mean resident tokens while a row decodes: its prompts, and half of what it generates.
    features = np.array([[1.0, row["pl"], row["pl"] * (row["pp"] + row["tg"] / 2)] for row in rows])
    seconds = np.array([row["t_tg"] / row["tg"] for row in rows])
    kept = [0, 1, 2]
    while True:
        scaled = features[:, kept] / seconds[:, None]
        found = np.linalg.lstsq(scaled, np.ones(len(rows)), rcond=None)[0]
        if found.min() >= 0 or len(kept) == 1:
            break
        kept.pop(int(np.argmin(found)))
    costs = [0.0, 0.0, 0.0]
    for index, value in zip(kept, found, strict=True):
        costs[index] = max(0.0, float(value))
    return costs[0], costs[1], costs[2]
