"""What drafting from the text itself is worth: the same requests with and without it, in turns.

    python benchmarks/draft.py MODEL.gguf [--repeats 7] [--tokens 160] [--streams 1] [--threads 2] [--max 16]

Three kinds of text: sampled prose (nothing to look up but chance), a text to be copied, and a list whose
rows repeat. Speeds are those of the decode, from the first token to the last, each a median over the repeats;
the ratio is that of the medians. Both engines live in one process and one of them computes at a time.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from statistics import median

from edgeserve.config import EngineConfig
from edgeserve.engine.engine import Engine
from edgeserve.engine.request import Request, RequestTimings
from edgeserve.engine.resolve import resolve, with_context_sizes
from edgeserve.engine.sampling_params import SamplingParams
from edgeserve.llama import Model
from edgeserve.llama_context import Context

PARAGRAPH = (
    "The harbour wakes before the town does. Ropes creak, a lamp goes out on the last boat, and the gulls "
    "begin to argue over yesterday's nets. By the time the baker opens her door the tide has turned, and the "
    "ferry that was late on Monday is late again."
)
PROSE = (
    "<|im_start|>user\nTell a story about a clockmaker who cannot sleep.<|im_end|>\n<|im_start|>assistant\n"
)
COPY = f"{PARAGRAPH}\n\nThe same text once more, word for word:\n\n{PARAGRAPH}\n\nAnd once more:\n\n"
ROWS = (
    "\n".join(f"<row><id>{n}</id><name>item {n}</name><state>ready</state></row>" for n in range(1, 9)) + "\n"
)

TEXTS = {"prose, sampled": (PROSE, 1.0), "copied text": (COPY, 0.0), "rows of a list": (ROWS, 0.0)}


def make_engine(model: Model, spec_type: str, options: argparse.Namespace) -> Engine:
    config = resolve(
        EngineConfig(
            model.path,
            n_ctx=1024 * options.streams,
            n_seq_max=options.streams,
            n_threads=options.threads,
            spec_type=spec_type,
            n_draft_max=options.max,
        ),
        model,
    )
    context = Context(model, config)
    return Engine(model, context, with_context_sizes(config, context.n_ctx, context.n_ctx_seq))


def run(engine: Engine, prompt: list[int], params: SamplingParams, num_streams: int) -> list[RequestTimings]:
    for number in range(num_streams):
        engine.add(Request(f"r{number}", tuple(prompt), params, time.perf_counter()))
    ends = []
    while engine.has_work:
        ends += [output.timings for output in engine.step() if output.is_finished]
    return ends


def token_ms(timings: RequestTimings) -> float:
    return 1e3 * (timings.decode_s or 0.0) / max(1, timings.num_output_tokens - 1)


def measure(model: Model, options: argparse.Namespace) -> list[dict[str, object]]:
    engines = {kind: make_engine(model, kind, options) for kind in ("none", "ngram-simple")}
    found: dict[tuple[str, str], list[RequestTimings]] = defaultdict(list)
    for repeat in range(options.repeats + 1):
        for name, (text, temperature) in TEXTS.items():
            prompt = model.tokenize(text, add_special=True, parse_special=True)
            params = SamplingParams(
                temperature=temperature, seed=repeat, max_tokens=options.tokens, ignore_eos=True
            )
            order = list(engines) if repeat % 2 else list(engines)[::-1]
            for kind in order:
                ends = run(engines[kind], prompt, params, options.streams)
                found[name, kind] += ends if repeat else []  # the first touches memory and fills the cache
    return [row(name, found[name, "none"], found[name, "ngram-simple"]) for name in TEXTS]


def row(name: str, off: list[RequestTimings], on: list[RequestTimings]) -> dict[str, object]:
    off_ms, on_ms = median(map(token_ms, off)), median(map(token_ms, on))
    drafted = sum(item.num_draft_tokens for item in on)
    accepted = sum(item.num_accepted_tokens for item in on)
    return {
        "text": name,
        "off_ms": round(off_ms, 2),
        "on_ms": round(on_ms, 2),
        "speed_ratio": round(off_ms / on_ms, 3),
        "drafted": drafted,
        "accepted": accepted,
        "tokens": sum(item.num_output_tokens for item in on),
        "repeats": len(off),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("model")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--max", type=int, default=16)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = measure(Model(options.model), options)
    if options.json:
        print(json.dumps(rows, indent=1))
        return
    names = ("text", "off_ms", "on_ms", "speed_ratio", "drafted", "accepted", "tokens", "repeats")
    print("  ".join(f"{name:>14}" for name in names))
    for item in rows:
        print("  ".join(f"{item[name]:>14}" for name in names))


if __name__ == "__main__":
    main()
