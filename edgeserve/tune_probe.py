"""One context to time steps on, at no depth and behind a context of some depth that nobody had to compute.

Owns the context and the clock around its steps. Does not know which settings are compared (tune.py).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from edgeserve.config import EngineConfig, FlashAttention
from edgeserve.errors import EngineError
from edgeserve.llama import Model
from edgeserve.llama_context import Batch, Context

SEED_TOKENS = 64
DEPTH = 1024
"""Tokens behind which decoding is measured: what a few turns of a chat come to."""

STREAM_TOKENS = 4
"""Tokens that each of several streams holds: few, since a first start has no time to compute many. Every
length up to the padding of the cells (256) takes the same time."""

_LARGEST = 512
_NUM_COPIES = DEPTH // SEED_TOKENS


class Probe:
    """Steps of one sequence. Every step leaves the context as it was."""

    def __init__(self, model: Model, base: EngineConfig, flash_attn: FlashAttention, n_ubatch: int) -> None:
        """Raises OutOfMemoryError or ModelError when these settings cannot be had."""
        # Unified cells with a seq_id a copy: that is how a depth is made out of a few computed tokens.
        config = replace(
            base,
            n_ctx=DEPTH + _LARGEST,
            n_seq_max=_NUM_COPIES + 1,
            n_batch=_LARGEST,
            n_ubatch=min(n_ubatch, _LARGEST),
            flash_attn=flash_attn,
            kv_unified=True,
            spec_type="none",
        )
        self.context = Context(model, config)
        self._batch = Batch(_LARGEST)
        self._n_vocab = model.n_vocab
        self.depth = 0

    def step(self, num_tokens: int, n_threads: int) -> float:
        """Seconds of a step of so many tokens, which are forgotten again."""
        self.context.set_threads(n_threads, n_threads)
        duration_s = self._run(num_tokens)
        self.context.seq_rm(0, self.depth)
        return duration_s

    def deepen(self) -> None:
        """Put DEPTH tokens before the following steps; fewer where the model's memory cannot be copied: what
        can be computed in a moment."""
        self.context.clear()
        self.depth = 0
        seed_s = self._extend(SEED_TOKENS)
        if self.context.repeat_prefix(SEED_TOKENS, _NUM_COPIES):
            self.depth = DEPTH
            return
        self.context.clear()
        self.depth = 0
        num_parts = max(1, min(_NUM_COPIES, int(2.0 / max(seed_s, 1e-3))))
        for _ in range(num_parts):
            self._extend(SEED_TOKENS)

    def close(self) -> None:
        self.context.close()

    def _extend(self, num_tokens: int) -> float:
        duration_s = self._run(num_tokens)
        self.depth += num_tokens
        return duration_s

    def _run(self, num_tokens: int) -> float:
        self._batch.clear()
        tokens = spread_tokens(self.depth, num_tokens, self._n_vocab)
        self._batch.add(tokens, self.depth, 0, last_logits=True)
        return timed_step(self.context, self._batch)


class Streams:
    """A few sequences that decode together, in one cell layout."""

    def __init__(
        self,
        model: Model,
        base: EngineConfig,
        num_streams: int,
        num_tokens: int = STREAM_TOKENS,
        *,
        unified: bool,
    ) -> None:
        """`num_tokens` of its own for each, at most SEED_TOKENS. Raises OutOfMemoryError or ModelError when
        these settings cannot be had."""
        self.depth = num_tokens
        self._num_streams = num_streams
        config = replace(
            base,
            n_ctx=num_streams * 2 * SEED_TOKENS,
            n_seq_max=num_streams,
            n_batch=_LARGEST,
            n_ubatch=_LARGEST,
            kv_unified=unified,
            spec_type="none",
        )
        self.context = Context(model, config)
        self._batch = Batch(_LARGEST)
        self._n_vocab = model.n_vocab
        for seq_id in range(num_streams):
            self._batch.add(spread_tokens(seq_id, num_tokens, self._n_vocab), 0, seq_id, last_logits=True)
        timed_step(self.context, self._batch)

    def step(self, n_threads: int) -> float:
        """Seconds of one decode of all of them, which is forgotten again."""
        self.context.set_threads(n_threads, n_threads)
        self._batch.clear()
        for seq_id in range(self._num_streams):
            self._batch.add(spread_tokens(seq_id, 1, self._n_vocab), self.depth, seq_id, last_logits=True)
        duration_s = timed_step(self.context, self._batch)
        for seq_id in range(self._num_streams):
            self.context.seq_rm(seq_id, self.depth)
        return duration_s

    def close(self) -> None:
        self.context.close()


def spread_tokens(first: int, count: int, n_vocab: int) -> Sequence[int]:
    """Spread over the vocabulary: a mixture of experts should not always take the same ones."""
    return [(first + index) * 7919 % n_vocab for index in range(count)]


def timed_step(context: Context, batch: Batch) -> float:
    start_s = time.perf_counter()
    code = context.decode(batch)
    context.synchronize()
    duration_s = time.perf_counter() - start_s
    if code:
        raise EngineError(f"A step of the measurement failed with code {code}.")
    return duration_s
