"""Eight requests of 500 + 500 tokens in a pool of 2,048 cells: does anybody fail, and does any answer change?

    python benchmarks/kv_pressure.py MODEL [-c 2048] [-np 8] [--requests 8] [--prompt 500] [--output 500]

The same greedy requests run in a pool that is far too small for them and in one that holds them all. A
different answer is counted as near where the two tokens at its first difference were about equally likely
(log-probabilities less than 0.5 apart, as in tests/engine/test_parity.py), and as wrong otherwise. The exit
code is 1 when an answer is wrong or a request failed.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "engine"))

from harness import Result, engine_of, equal_or_close, request, run

from edgeserve.engine.request import FinishReason
from edgeserve.engine.sampling_params import SamplingParams
from edgeserve.llama import Model

TEXT = "A long story about {}, told slowly and in detail. Once there was "
TOPICS = ("the sea", "a bakery", "an old train", "two foxes", "winter", "a lost key", "the moon", "a market")


def prompts(model: Model, count: int, num_tokens: int) -> list[list[int]]:
    texts = [TEXT.format(f"{TOPICS[index % len(TOPICS)]}, part {index}") for index in range(count)]
    return [
        (model.tokenize(text, add_special=True, parse_special=True) * num_tokens)[:num_tokens]
        for text in texts
    ]


def generate(
    model: Model, arguments: argparse.Namespace, n_ctx: int, logprobs: int | None = None
) -> dict[str, Result]:
    params = SamplingParams(temperature=0, max_tokens=arguments.output, ignore_eos=True, logprobs=logprobs)
    asked = [
        request(str(index), prompt, params)
        for index, prompt in enumerate(prompts(model, arguments.requests, arguments.prompt))
    ]
    with engine_of(
        model,
        n_seq_max=arguments.parallel,
        n_ctx=n_ctx,
        kv_unified=True,
        n_threads=arguments.threads,
        max_waiting=arguments.requests,
    ) as engine:
        start_s = time.perf_counter()
        results = run(engine, *asked)
        stats = engine.stats()
    seconds = time.perf_counter() - start_s
    whole = sum(result.finish_reason is FinishReason.LENGTH for result in results.values())
    print(
        f"pool {n_ctx:>6}: {whole} of {len(results)} whole, {seconds:.1f} s,"
        f" {stats.num_evicted_tokens_total} cached tokens given up",
        flush=True,
    )
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("-c", "--pool", type=int, default=2048)
    parser.add_argument("-np", "--parallel", type=int, default=8)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=500)
    parser.add_argument("--output", type=int, default=500)
    parser.add_argument("-t", "--threads", type=int, default=1)
    arguments = parser.parse_args()
    model = Model(arguments.model)
    pressed = generate(model, arguments, arguments.pool)
    free = generate(model, arguments, arguments.requests * (arguments.prompt + arguments.output), logprobs=2)
    failed = [name for name, result in pressed.items() if result.finish_reason is not FinishReason.LENGTH]
    different = [name for name, result in pressed.items() if result.token_ids != free[name].token_ids]
    wrong = [name for name in different if not equal_or_close(pressed[name], free[name])]
    print(f"{len(failed)} failed; {len(different)} answers differ, {len(wrong)} of them wrong")
    model.close()
    return 1 if failed or wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
