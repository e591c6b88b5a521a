"""Child process of `edgeserve doctor`: starts the runtime and says what it finds, one JSON line at a time.

    python -m edgeserve.doctor.probe [--model FILE] [--threads N] [--no-repack]

Each line is written before the next risk is taken: {"stage": ...} names what comes now, so that the parent
knows where a child died of an illegal instruction. Owns no judgement; the parent draws the conclusions.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict

from edgeserve.config import EngineConfig
from edgeserve.doctor.hardware import build_features, cpu_flags, missing_features
from edgeserve.errors import EdgeserveError

_PROMPT = "The quick brown fox jumps over the lazy dog."

Say = Callable[[dict[str, object]], None]


def main() -> int:
    """Exit code 0 when everything asked for ran; an error that has a sentence is a line and exit code 1."""
    parser = argparse.ArgumentParser(prog="edgeserve.doctor.probe")
    parser.add_argument("--model", help="a GGUF file for the test decode")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--no-repack", action="store_true", help="no rearranged weights, no AMX")
    options = parser.parse_args()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever the library prints must not get between

    def say(line: dict[str, object]) -> None:
        print(json.dumps(line), file=answers, flush=True)

    try:
        info = _probe_runtime(say)
        if options.model:
            # Loading AMX buffers where the kernel has none is certain death, and no news.
            is_safe = not options.no_repack and "AMX_INT8" not in missing_features(
                build_features(info), cpu_flags()
            )
            _probe_decode(say, options.model, options.threads, use_extra_bufts=is_safe)
    except EdgeserveError as error:
        say({"error": error.message, "hint": error.hint})
        return 1
    return 0


def _probe_runtime(say: Say) -> str:
    """Start the runtime; returns its own account of the instructions it uses."""
    say({"stage": "import"})
    from edgeserve import ggml, llama

    llama.load_library().llama_backend_init()
    info = ggml.system_info()
    say({"system_info": info, "supports_gpu_offload": ggml.supports_gpu_offload()})
    say({"stage": "devices"})
    say({"devices": [asdict(device) for device in ggml.devices()]})
    return info


def _probe_decode(say: Say, path: str, n_threads: int, *, use_extra_bufts: bool) -> None:
    """The time of one decode of one token, after one of a short prompt that warms everything up."""
    from edgeserve import llama, llama_context

    say({"stage": "load"})
    model = llama.Model(path, use_extra_bufts=use_extra_bufts)
    say({"stage": "decode"})
    config = EngineConfig(
        path, n_ctx=64, n_seq_max=1, n_batch=32, n_ubatch=32, n_threads=n_threads, n_threads_batch=n_threads
    )
    context = llama_context.Context(model, config)
    tokens = model.tokenize(_PROMPT, add_special=True, parse_special=False)[:31]
    batch = llama_context.Batch(32)
    batch.add(tokens, 0, 0, last_logits=True)
    codes = [context.decode(batch)]
    token = int(context.logits(len(tokens) - 1).argmax()) if codes == [0] else 0
    batch.clear()
    batch.add([token], len(tokens), 0, last_logits=True)
    start_s = time.perf_counter()
    codes.append(context.decode(batch))
    context.logits(0)  # waits for a GPU to finish
    say({"decode_ms": (time.perf_counter() - start_s) * 1000, "codes": codes})
    context.close()
    model.close()


if __name__ == "__main__":
    raise SystemExit(main())
