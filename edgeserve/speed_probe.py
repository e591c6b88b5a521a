"""Child process: the devices that this build sees, or how fast a model runs here. `python -m
edgeserve.speed_probe`

Owns the clock around single steps of the engine's own context and batch: decode with an almost empty and a
long context, decode of several sequences, prompts. Draws no conclusions (planner/calibrate.py does).

Request, one JSON document on stdin:
    {"want": "devices"}
    {"want": "speed", "path", "n_threads", "n_gpu_layers", "flash_attn": ["off", "on"], "budget_s"}

Answer, JSON lines: {"devices": [...]}, or one line for each figure with kind, n_prompt, num_resident,
num_sequences, n_ubatch, flash_attn, seconds (the median) and count; {"error": ...} when it cannot be done.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from edgeserve.config import EngineConfig, FlashAttention
from edgeserve.errors import EdgeserveError

_N_UBATCH = 512
_CHUNK = 32
_LONG, _SHORT = 2048, 16
_NUM_SEQUENCES = 4
# So many steps for a median, unless the time is over: where others keep the cores busy, threads wait for each
# other at every operation, and a step takes a hundred times as long.
_DECODE_STEPS, _LEAST_STEPS = 24, 5
# The clocks of laptops rise within the first steps.
_WARM_STEPS = 3
# A row that says how prompts of a steady stream fare: small chunks instead of whole micro-batches.
CHUNKED = "chunked prefill"

Json = dict[str, Any]


def main() -> int:
    """Answer the request on stdin; 1 after an error that has a sentence."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever the library prints must not get between
    request = json.load(sys.stdin)
    try:
        for answer in _answers(request):
            print(json.dumps(answer), file=answers, flush=True)
    except EdgeserveError as error:
        print(json.dumps({"error": str(error)}), file=answers, flush=True)
        return 1
    return 0


def _answers(request: Json) -> Iterator[Json]:
    if request["want"] == "devices":
        from edgeserve import ggml

        yield {"devices": [asdict(device) for device in ggml.devices()]}
        return
    yield from _speeds(request)


def _speeds(request: Json) -> Iterator[Json]:
    from edgeserve import llama
    from edgeserve.amx_guard import judge

    path, n_threads = Path(request["path"]), int(request["n_threads"])
    is_safe = judge(path, n_threads).is_safe
    model = llama.Model(path, n_gpu_layers=request["n_gpu_layers"], use_extra_bufts=is_safe)
    modes = request["flash_attn"]
    for mode in modes:
        bench = _Bench(model, mode, n_threads, request["budget_s"] / len(modes))
        yield from bench.rows()
    model.close()


class _Bench:
    """One model with one kind of attention."""

    def __init__(self, model: Any, flash_attn: FlashAttention, n_threads: int, budget_s: float) -> None:
        self.model, self.flash_attn, self.n_threads = model, flash_attn, n_threads
        self.deadline_s = time.perf_counter() + budget_s

    def rows(self) -> Iterator[Json]:
        most = max(512, min(self.model.n_ctx_train or _LONG + 512, _LONG + 512))
        context = self._context(most, 1)
        yield from self._alone(context, most - 256)
        context.close()
        together = self._context(_NUM_SEQUENCES * 256, _NUM_SEQUENCES)
        yield self._together(together)
        together.close()

    def _context(self, n_ctx: int, n_seq_max: int) -> Any:
        from edgeserve.llama_context import Context

        config = EngineConfig(
            self.model.path,
            n_ctx=n_ctx,
            n_seq_max=n_seq_max,
            n_batch=_N_UBATCH,
            n_ubatch=_N_UBATCH,
            n_threads=self.n_threads,
            n_threads_batch=self.n_threads,
            flash_attn=self.flash_attn,
        )
        return Context(self.model, config)

    def _alone(self, context: Any, most: int) -> Iterator[Json]:
        stream = _Stream(context)
        stream.prompt(_SHORT)
        for _ in range(_WARM_STEPS):
            stream.decode()
        times = self._times(stream.decode)
        yield self._row("decode", times, num_resident=_SHORT + _WARM_STEPS + len(times) // 2)
        n_prompt = min(_N_UBATCH, most)
        times = [stream.restarted().prompt(n_prompt) for _ in range(2)]
        # Whatever else runs here only makes it slower.
        yield self._row("prefill", [min(times)], n_prompt=n_prompt)
        times = [sum(stream.restarted().prompt(_CHUNK) for _ in range(4))]
        yield self._row(CHUNKED, times, n_prompt=4 * _CHUNK)
        yield from self._long(stream.restarted(), most)

    def _long(self, stream: _Stream, most: int) -> Iterator[Json]:
        """Fill the context as far as time allows, then decode."""
        spent_s = 0.0
        while stream.num_resident + _N_UBATCH <= most and time.perf_counter() < self.deadline_s:
            spent_s += stream.prompt(_N_UBATCH)
        if stream.num_resident > _N_UBATCH:
            yield self._row("prefill", [spent_s], n_prompt=stream.num_resident)
        resident = stream.num_resident
        times = self._times(stream.decode)
        yield self._row("decode", times, num_resident=resident + len(times) // 2)

    def _together(self, context: Any) -> Json:
        streams = [_Stream(context, seq_id) for seq_id in range(_NUM_SEQUENCES)]
        for stream in streams:
            stream.prompt(_SHORT)
        for _ in range(_WARM_STEPS):
            _decode_all(context, streams)
        times = self._times(lambda: _decode_all(context, streams))
        resident = _SHORT + _WARM_STEPS + len(times) // 2
        return self._row("decode", times, num_resident=resident, num_sequences=_NUM_SEQUENCES)

    def _times(self, step: Callable[[], float]) -> list[float]:
        """Seconds of a few steps, the more the more time is left."""
        times: list[float] = []
        while len(times) < _DECODE_STEPS:
            if len(times) >= _LEAST_STEPS and time.perf_counter() >= self.deadline_s:
                break
            times.append(step())
        return times

    def _row(
        self,
        kind: str,
        times: Sequence[float],
        *,
        n_prompt: int = 1,
        num_resident: int = 0,
        num_sequences: int = 1,
    ) -> Json:
        return {
            "kind": kind,
            "n_prompt": n_prompt,
            "num_resident": num_resident,
            "num_sequences": num_sequences,
            "n_ubatch": _N_UBATCH,
            "flash_attn": self.flash_attn == "on",
            "seconds": statistics.median(times),
            "count": len(times),
        }


class _Stream:
    """One sequence of made-up tokens in a context."""

    def __init__(self, context: Any, seq_id: int = 0) -> None:
        from edgeserve.llama_context import Batch

        self.context, self.seq_id, self.num_resident = context, seq_id, 0
        self._batch = Batch(_N_UBATCH)

    def restarted(self) -> _Stream:
        self.context.seq_rm(self.seq_id, 0)
        self.num_resident = 0
        return self

    def prompt(self, count: int) -> float:
        """Seconds for `count` further tokens, the logits of the last included."""
        self._batch.clear()
        row = self.add_to(self._batch, count)
        return _timed(lambda: _step(self.context, self._batch, row))

    def decode(self) -> float:
        return self.prompt(1)

    def add_to(self, batch: Any, count: int) -> int:
        tokens = [(self.num_resident + i) * 7919 % self.context.model.n_vocab for i in range(count)]
        row = batch.add(tokens, self.num_resident, self.seq_id, last_logits=True)
        self.num_resident += count
        return int(row)


def _decode_all(context: Any, streams: Sequence[_Stream]) -> float:
    from edgeserve.llama_context import Batch

    batch = Batch(len(streams))
    rows = [stream.add_to(batch, 1) for stream in streams]
    return _timed(lambda: _step(context, batch, rows[-1]))


def _step(context: Any, batch: Any, row: int) -> None:
    code = context.decode(batch)
    if code != 0:
        raise EdgeserveError(f"A decode step failed with code {code} while speed was measured.")
    context.logits(row)  # waits for a GPU to finish


def _timed(work: Callable[[], None]) -> float:
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s


if __name__ == "__main__":
    raise SystemExit(main())
