"""How good is the estimate behind `stalled_ms`? The engine's figure against decode-only steps around a stall.

    python benchmarks/stalled_estimate.py MODEL [--streams 1,3] [--depths 32,512] [--prompt 400] [--repeats 3]

Streams decode alone for a while, a long prompt comes in and ends, and they decode alone again. What they were
stalled is taken to be the time of the steps that carried the prompt, less as many times the mean decode-only
step right before and right after. The engine did not know the latter. A busy machine shows in the spread.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import mean

from edgeserve.config import EngineConfig
from edgeserve.engine.engine import Engine
from edgeserve.engine.request import Request, StepStats
from edgeserve.engine.resolve import resolve, with_context_sizes
from edgeserve.engine.sampling_params import SamplingParams
from edgeserve.llama import Model
from edgeserve.llama_context import Context

NUM_ALONE = 40


@contextmanager
def engine_of(model: Model, threads: int, num_slots: int, n_ctx_seq: int) -> Iterator[Engine]:
    settings = EngineConfig(model.path, n_threads=threads, n_seq_max=num_slots, n_ctx=num_slots * n_ctx_seq)
    config = resolve(settings, model)
    context = Context(model, config)
    engine = Engine(model, context, with_context_sizes(config, context.n_ctx, context.n_ctx_seq))
    engine.runner.warm_up()
    yield engine
    engine.runner.close()


def add(engine: Engine, name: str, num_prompt: int, max_tokens: int) -> None:
    """Ids that no two requests share from the first one on."""
    ids = tuple(1000 + (hash(name) + 7 * index) % 20_000 for index in range(num_prompt))
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    engine.add(Request(name, ids, params, 0.0, cache_prompt=False))


def steps(engine: Engine, count: int) -> list[StepStats]:
    taken = []
    for _ in range(count):
        engine.step()
        if (step := engine.stats().last_step) is not None:
            taken.append(step)
    return taken


def measure(engine: Engine, num_streams: int, depth: int, prompt: int) -> tuple[float, float]:
    """(estimated, counted) seconds of one stream's stall."""
    for index in range(num_streams):
        add(engine, f"stream{index}", depth, 1000)
    while engine.scheduler.waiting or any(item.is_prefilling for item in engine.scheduler.running):
        engine.step()
    before = steps(engine, NUM_ALONE)
    watched = engine.scheduler.running[0]
    known_s = watched.stalled_s
    add(engine, "newcomer", prompt, 1)
    mixed = []
    while len(engine.scheduler.running) + len(engine.scheduler.waiting) > num_streams:
        mixed += steps(engine, 1)
    after = steps(engine, NUM_ALONE)
    for sequence in tuple(engine.scheduler.running):
        engine.abort(sequence.request_id)
    alone_s = mean(step.duration_s for step in before[-NUM_ALONE // 2 :] + after[: NUM_ALONE // 2])
    counted_s = sum(step.duration_s for step in mixed) - len(mixed) * alone_s
    return watched.stalled_s - known_s, counted_s


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--streams", default="1,3")
    parser.add_argument("--depths", default="32,512")
    parser.add_argument("--prompt", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("-t", "--threads", type=int, default=0)
    arguments = parser.parse_args()
    model = Model(arguments.model)
    print(f"{'streams':>8} {'depth':>6} {'estimated s':>12} {'counted s':>10} {'error':>8}")
    for num_streams in map(int, arguments.streams.split(",")):
        for depth in map(int, arguments.depths.split(",")):
            n_ctx_seq = max(depth + 1024, arguments.prompt + 64)
            with engine_of(model, arguments.threads, num_streams + 1, n_ctx_seq) as engine:
                for _ in range(arguments.repeats):
                    estimated_s, counted_s = measure(engine, num_streams, depth, arguments.prompt)
                    error = estimated_s / counted_s - 1
                    print(
                        f"{num_streams:>8} {depth:>6} {estimated_s:>12.3f} {counted_s:>10.3f} {error:>+8.1%}"
                    )
    model.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
