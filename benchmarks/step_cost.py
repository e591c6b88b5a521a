"""What edgeserve itself costs in a step: the time of a step outside llama_decode, part by part.

    python benchmarks/step_cost.py MODEL.gguf [--rows 1,4,8] [--tokens 120] [--threads 2] [--temp 0.8]

Sequences decode together through the engine's own thread with asyncio consumers, as under the server, without
HTTP. Parts are timed by wrapping the functions that do them; each wrapped call costs about 0.3 us itself. The
event loop's share is the processor time of its thread, which competes with the engine for the interpreter.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from edgeserve.config import EngineConfig
from edgeserve.engine.async_engine import AsyncEngine
from edgeserve.engine.request import Request
from edgeserve.engine.sampling_params import SamplingParams
from edgeserve.llama import Model

PROMPT_TOKENS = 32
PARTS = ("decide", "fill", "library", "sample", "update", "book", "publish", "deliver")


@dataclass
class Clock:
    """Seconds by part, of the step in progress and of every finished step that only decoded."""

    now: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    steps: list[dict[str, float]] = field(default_factory=list)

    def wrap(self, holder: Any, name: str, part: str, then: Callable[[], None] = lambda: None) -> None:
        """Time every call of a method; `then` is called after it, off the clock."""
        function: Callable[..., Any] = getattr(holder, name)

        def timed(*args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                self.now[part] += time.perf_counter() - start
                then()

        setattr(holder, name, timed)

    def end_step(self) -> None:
        self.steps.append(dict(self.now))
        self.now.clear()


def instrument(engine: AsyncEngine, clock: Clock) -> None:
    inner = engine._engine
    context = inner.runner._context
    for holder, name, part in (
        (inner.scheduler, "schedule", "decide"),
        (inner._admission, "past_deadline", "decide"),
        (inner.tiers, "trim", "decide"),
        (inner, "_admit", "decide"),
        (inner.runner, "_fill", "fill"),
        (context, "decode", "library"),
        (context, "synchronize", "library"),
        (inner.runner, "_sample", "sample"),
        (inner, "_update", "update"),
        (inner, "_account", "book"),
        (engine, "_publish", "publish"),
        (engine, "_step", "step"),
    ):
        clock.wrap(holder, name, part)
    clock.wrap(engine, "_deliver", "deliver", then=clock.end_step)


async def consume(engine: AsyncEngine, request: Request) -> None:
    async for _ in engine.generate(request):
        pass


async def run(engine: AsyncEngine, num_rows: int, num_tokens: int, temperature: float) -> float:
    """Seconds of this thread's processor time while all rows decode."""
    start = time.thread_time()
    params = SamplingParams(temperature=temperature, max_tokens=num_tokens, ignore_eos=True, seed=1)
    requests = [
        Request(
            f"r{row}",
            tuple(range(100 + 31 * row, 100 + 31 * row + PROMPT_TOKENS)),
            params,
            time.perf_counter(),
        )
        for row in range(num_rows)
    ]
    await asyncio.gather(*(consume(engine, request) for request in requests))
    return time.thread_time() - start


def measure(
    model: Model, num_rows: int, num_tokens: int, n_threads: int, temperature: float
) -> dict[str, float]:
    """Medians over the steps in which all rows decoded, in microseconds."""
    clock = Clock()
    config = EngineConfig(model.path, n_ctx=num_rows * 1024, n_seq_max=num_rows, n_threads=n_threads)
    engine = AsyncEngine(model, config)
    instrument(engine, clock)
    engine.start()
    try:
        loop_s = asyncio.run(run(engine, num_rows, num_tokens, temperature))
    finally:
        engine.stop()
    steps = [step for step in clock.steps if step.get("library")]
    steps = steps[len(steps) // 8 : -2]
    found = {part: 1e6 * median(step.get(part, 0.0) for step in steps) for part in PARTS}
    totals = [step["step"] + step["publish"] + step["deliver"] for step in steps]
    own = [total - step["library"] for total, step in zip(totals, steps, strict=True)]
    found |= {"step": 1e6 * median(totals), "own": 1e6 * median(own), "loop": 1e6 * loop_s / len(clock.steps)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("model")
    parser.add_argument("--rows", default="1,4,8")
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--temp", type=float, default=0.8)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    model = Model(options.model)
    rows = {
        int(count): measure(model, int(count), options.tokens, options.threads, options.temp)
        for count in options.rows.split(",")
    }
    if options.json:
        print(json.dumps(rows, indent=1))
        return
    names = ("step", *PARTS, "own", "loop")
    print("us a step (medians)  " + "".join(f"{name:>10}" for name in names))
    for count, found in rows.items():
        print(f"{count:>9} rows       " + "".join(f"{found[name]:>10.0f}" for name in names))


if __name__ == "__main__":
    main()
