"""Drive an engine step by step, without a thread."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from edgeserve.config import EngineConfig
from edgeserve.engine.engine import Engine
from edgeserve.engine.request import FinishReason, Request, RequestOutput, RequestTimings
from edgeserve.engine.resolve import resolve, with_context_sizes
from edgeserve.engine.sampling_params import SamplingParams
from edgeserve.errors import RequestError
from edgeserve.llama import Model
from edgeserve.llama_context import Context

GREEDY = SamplingParams(temperature=0, max_tokens=16)


@dataclass
class Result:
    """Everything one request brought."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    outputs: list[RequestOutput] = field(default_factory=list)

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.outputs[-1].finish_reason

    @property
    def timings(self) -> RequestTimings:
        return self.outputs[-1].timings

    @property
    def error(self) -> RequestError | None:
        return self.outputs[-1].error

    def take(self, output: RequestOutput) -> None:
        self.text += output.text
        self.token_ids += output.token_ids
        self.logprobs += [entry.logprob for entry in output.logprobs]
        self.outputs.append(output)


@contextmanager
def engine_of(model: Model, **settings: object) -> Iterator[Engine]:
    """An engine with a context of its own on a shared model; one thread unless told otherwise."""
    config = resolve(EngineConfig(model.path, **{"n_threads": 1, "n_ctx": 2048, **settings}), model)
    context = Context(model, config)
    engine = Engine(model, context, with_context_sizes(config, context.n_ctx, context.n_ctx_seq))
    yield engine
    engine.close()


def request(name: str, prompt: Sequence[int], params: SamplingParams = GREEDY, **fields: object) -> Request:
    return Request(name, tuple(prompt), params, time.perf_counter(), **fields)


def run(engine: Engine, *requests: Request) -> dict[str, Result]:
    """Add all requests at once and step until the engine has nothing left to do."""
    results = {item.request_id: Result() for item in requests}
    for item in requests:
        engine.add(item)
    while engine.has_work or engine.tiers.fetching:
        step(engine, results)
    return results


def step(engine: Engine, results: dict[str, Result]) -> None:
    for output in engine.step():
        results[output.request_id].take(output)


def equal_or_close(got: Result, want: Result, close: float = 0.5) -> bool:
    """Whether two greedy answers are the same, or first differ where `want` (made with logprobs=2) had two
    tokens whose log-probabilities are less than `close` apart: batches of another shape add floats in another
    order."""
    entries = [entry for output in want.outputs for entry in output.logprobs]
    for index, (a, b) in enumerate(zip(got.token_ids, want.token_ids, strict=False)):
        if a != b:
            (_, first), (_, second) = entries[index].top
            return first - second < close
    return True
