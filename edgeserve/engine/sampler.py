"""SamplingParams to a token: greedy by numpy, everything else by llama.cpp's sampler chain.

Owns one sequence's sampler. Knows nothing of batches or text.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeserve.engine.request import TokenLogprob
from edgeserve.engine.sampling_params import MAX_SEED, SamplingParams
from edgeserve.llama import Model, load_library
from edgeserve.llama_context import Context


class Sampler:
    """Draws one sequence's tokens. The chain's order is llama-server's: bias, penalties, top-k, top-p, min-p,
    temperature, draw."""

    def __init__(self, model: Model, params: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        self._params = params
        self._library = load_library()
        self._eog_ids = np.array(sorted(model.eog_ids), np.int64)
        biases = [(token, bias) for token, bias in params.logit_bias if 0 <= token < model.n_vocab]
        self._bias_ids = np.array([token for token, _ in biases], np.int64)
        self._biases = np.array([bias for _, bias in biases], np.float32)
        self._num_sampled = 0
        self._chain: Any = None
        if not params.is_greedy or params.has_penalties:
            self._chain = self._make_chain(model, self._last_tokens(prompt_token_ids))

    def sample(
        self, context: Context, row: int, logits: NDArray[np.float32]
    ) -> tuple[int, TokenLogprob | None]:
        """Draw from a row of the batch; `logits`, shape (n_vocab,), are its own, in the context's memory. The
        log-probabilities are those of the logits with biases applied."""
        self._apply_biases(logits)
        if self._chain is None:
            token_id = int(logits.argmax())
        else:
            token_id = int(self._library.llama_sampler_sample(self._chain, context.handle, row))
        self._num_sampled += 1
        if self._params.logprobs is None:
            return token_id, None
        return token_id, token_logprob(logits, token_id, self._params.logprobs)

    def close(self) -> None:
        """Free the chain."""
        if self._chain is not None:
            self._library.llama_sampler_free(self._chain)
            self._chain = None

    def _apply_biases(self, logits: NDArray[np.float32]) -> None:
        # In place: llama.cpp's chain reads the same memory as numpy does, so one code path serves both.
        if self._bias_ids.size:
            logits[self._bias_ids] += self._biases
        if self._params.ignore_eos or self._num_sampled < self._params.min_tokens:
            logits[self._eog_ids] = -np.inf

    def _last_tokens(self, prompt_token_ids: Sequence[int]) -> Sequence[int]:
        """The prompt tokens that penalties look back on."""
        if not self._params.has_penalties:
            return ()
        if self._params.repeat_last_n < 0:
            return prompt_token_ids
        return prompt_token_ids[-self._params.repeat_last_n :]

    def _make_chain(self, model: Model, last_tokens: Sequence[int]) -> Any:
        library = self._library
        chain = library.llama_sampler_chain_init(library.llama_sampler_chain_default_params())
        for sampler in self._chain_parts(model):
            library.llama_sampler_chain_add(chain, sampler)
        for token_id in last_tokens:
            library.llama_sampler_accept(chain, token_id)
        return chain

    def _chain_parts(self, model: Model) -> Iterator[Any]:
        library, params = self._library, self._params
        if params.has_penalties:
            last_n = params.repeat_last_n if params.repeat_last_n >= 0 else model.n_ctx_train
            yield library.llama_sampler_init_penalties(
                model.n_vocab,
                last_n,
                params.repeat_penalty,
                params.frequency_penalty,
                params.presence_penalty,
            )
        if params.is_greedy:
            yield library.llama_sampler_init_greedy()
            return
        if params.top_k > 0:
            yield library.llama_sampler_init_top_k(params.top_k)
        if params.top_p < 1:
            yield library.llama_sampler_init_top_p(params.top_p, 1)
        if params.min_p > 0:
            yield library.llama_sampler_init_min_p(params.min_p, 1)
        yield library.llama_sampler_init_temp(params.temperature)
        seed = secrets.randbelow(MAX_SEED) if params.seed is None else params.seed
        yield library.llama_sampler_init_dist(seed)


def token_logprob(logits: NDArray[np.float32], token_id: int, num_top: int) -> TokenLogprob:
    """The chosen token's log-probability and the `num_top` best ones, from a row of logits, shape
    (n_vocab,)."""
    highest = float(logits.max())
    log_sum = highest + float(np.log(np.exp(logits.astype(np.float64) - highest).sum()))
    top: tuple[tuple[int, float], ...] = ()
    if num_top:
        best = np.argpartition(logits, -num_top)[-num_top:]
        best = best[np.argsort(-logits[best], kind="stable")]
        top = tuple((int(token), float(logits[token]) - log_sum) for token in best)
    return TokenLogprob(token_id, float(logits[token_id]) - log_sum, top)
