"""A step's decision, carried out: chunks -> one llama_decode -> a token for every chunk that samples.

Owns the batch, the samplers and what is physically resident in the context. Knows nothing of queues, stop
rules or text.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgeserve.engine.kv_cache import Placement
from edgeserve.engine.request import Sequence, TokenLogprob
from edgeserve.engine.sampler import Sampler
from edgeserve.engine.saved_prefix import Checkpoint, State
from edgeserve.engine.scheduler import Chunk
from edgeserve.errors import EngineError
from edgeserve.llama_context import Batch, Context


@dataclass(frozen=True, slots=True)
class SampledToken:
    """What one chunk brought: it has run, and if it was its sequence's last a token was drawn, behind as many
    of its drafted tokens as were drawn themselves."""

    chunk: Chunk
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()

    @property
    def num_accepted(self) -> int:
        """Drafted tokens that turned out right."""
        return max(0, len(self.token_ids) - 1)


class DecodeFailedError(EngineError):
    """llama_decode refused a step, or its result could not be sampled."""


class ModelRunner:
    """The one user of the context; lives on the engine's thread."""

    def __init__(self, context: Context, n_batch: int) -> None:
        self._context = context
        self._batch = Batch(n_batch)
        self._samplers: dict[str, Sampler] = {}
        self.sample_s = 0.0
        """Time spent on drawing tokens so far, after steps were computed."""
        self.num_checkpoint_hits = self.num_checkpoint_hit_tokens = 0

    def warm_up(self) -> None:
        """Decode one token and forget it: the weights come off the disk now, not in the first request."""
        self._batch.clear()
        self._batch.add([max(self._context.model.bos_id, 0)], 0, 0, last_logits=True)
        self._context.decode(self._batch, warm_up=True)
        self._context.clear()

    def prepare(self, sequence: Sequence, placement: Placement) -> int:
        """Cut the slot back to the shared prefix; returns how many tokens really stayed resident.

        Fewer than asked for where the model cannot drop a part (recurrent state, a window that has moved on):
        then the slot is emptied and the prompt starts clean.
        """
        if placement.source:
            self._share(placement.source.seq_id, sequence.seq_id, placement.num_cached_tokens)
        for victim in placement.evict:
            self._context.seq_rm(victim.seq_id, 0)
        if placement.saved and not self._context.load_state(sequence.seq_id, placement.saved.state):
            self._context.seq_rm(sequence.seq_id, 0)
        self._samplers[sequence.request_id] = Sampler(
            self._context.model, sequence.sampling, sequence.request.prompt_token_ids
        )
        return self.cut_back(sequence, placement.num_cached_tokens, placement.slot.checkpoints)

    def _share(self, source: int, target: int, num_tokens: int) -> None:
        if self._context.can_share(source, num_tokens):
            self._context.share_prefix(source, target)
            return
        # What cannot be cut has to be replaced by a checkpoint right away: only a real copy can be.
        self._context.seq_rm(target, 0)
        state = self._context.save_state(source)
        if state is None or not self._context.load_state(target, state):
            self._context.seq_rm(target, 0)

    def cut_back(self, sequence: Sequence, num_tokens: int, checkpoints: Iterable[Checkpoint] = ()) -> int:
        """Keep only a sequence's first `num_tokens` tokens; returns how many it kept: fewer where the state
        can only be brought back to one of `checkpoints`, 0 if it had to drop all."""
        seq_id = sequence.seq_id
        if self._context.cut_back(seq_id, num_tokens) and self._holds(seq_id, num_tokens):
            return num_tokens
        for checkpoint in sorted(checkpoints, key=lambda item: -item.num_tokens):
            if checkpoint.num_tokens <= num_tokens and self._go_back(seq_id, checkpoint):
                self.num_checkpoint_hits += 1
                self.num_checkpoint_hit_tokens += checkpoint.num_tokens
                return checkpoint.num_tokens
        self._context.seq_rm(seq_id, 0)
        return 0

    def _go_back(self, seq_id: int, checkpoint: Checkpoint) -> bool:
        return (
            self._context.load_state(seq_id, checkpoint.state, partial=True)
            and self._context.seq_rm(seq_id, checkpoint.num_tokens)
            and self._holds(seq_id, checkpoint.num_tokens)
        )

    def _holds(self, seq_id: int, num_tokens: int) -> bool:
        """Whether so many tokens are really there: a copy or a load before may have fallen short."""
        return num_tokens == 0 or self._context.seq_pos_max(seq_id) == num_tokens - 1

    def save(self, seq_id: int, *, partial: bool = False) -> State | None:
        """A copy of all that a slot holds, or of the part that cannot be cut back; None when there is
        none."""
        return self._context.save_state(seq_id, partial=partial)

    def saved_bytes(self, seq_id: int, *, partial: bool = False) -> int:
        """How large that copy would be."""
        return self._context.state_bytes(seq_id, partial=partial)

    def cut_from(self, num_tokens: int) -> int:
        """The shortest prefix that a copy of so many tokens can be cut back to."""
        return self._context.cut_from(num_tokens)

    def execute(self, chunks: Iterable[Chunk]) -> list[SampledToken]:
        """Run one step. Raises DecodeFailedError; the context may then hold a part of the step.

        Rows go in by ascending seq_id: with split cells llama.cpp takes only consecutive ids into one pass
        over the weights (llama_batch_allocr::split_equal), in the order in which it meets them.
        """
        chunks = tuple(sorted(chunks, key=lambda chunk: chunk.sequence.seq_id))
        rows = self._fill(chunks)
        try:
            code = self._context.decode(self._batch)
        except Exception as error:
            raise DecodeFailedError(f"llama_decode failed: {error}.") from error
        if code != 0:
            raise DecodeFailedError(_explain(code))
        start_s = time.perf_counter()
        logits = self._context.logits_rows(sum(chunk.num_logits for chunk in chunks))
        sampled = []
        for chunk, row in zip(chunks, rows, strict=True):
            sampled.append(self._sample(chunk, row, logits))
            logits = logits[chunk.num_logits :]
        self.sample_s += time.perf_counter() - start_s
        return sampled

    def release(self, sequence: Sequence) -> None:
        """Free a finished sequence's sampler. Its tokens stay resident as prefix cache."""
        if sampler := self._samplers.pop(sequence.request_id, None):
            sampler.close()

    def drop_draft(self, sequence: Sequence) -> None:
        """Take away what a step computed for drafted tokens that the sequence did not take."""
        self._context.seq_rm(sequence.seq_id, sequence.num_computed_tokens)

    def forget(self, sequence: Sequence) -> None:
        """Drop everything that a failed sequence left in memory."""
        self._context.seq_rm(sequence.seq_id, 0)

    def empty(self, seq_id: int) -> None:
        """Drop everything that an idle slot holds."""
        self._context.seq_rm(seq_id, 0)

    def close(self) -> None:
        for sampler in self._samplers.values():
            sampler.close()
        self._samplers.clear()
        self._context.close()

    def _fill(self, chunks: tuple[Chunk, ...]) -> list[int]:
        self._batch.clear()
        return [self._add(chunk) for chunk in chunks]

    def _add(self, chunk: Chunk) -> int:
        """The row of the chunk's own last token; those of its draft follow."""
        seq_id = chunk.sequence.seq_id
        row = self._batch.add(chunk.token_ids, chunk.first_pos, seq_id, last_logits=chunk.samples)
        if chunk.draft_token_ids:
            self._batch.add(chunk.draft_token_ids, chunk.end_pos, seq_id, all_logits=True)
        return row

    def _sample(self, chunk: Chunk, row: int, logits: NDArray[np.float32]) -> SampledToken:
        """Draw token after token, as single steps would, until one is not what was drafted: the rows behind
        were computed from a wrong token."""
        if not chunk.samples:
            return SampledToken(chunk)
        sampler = self._samplers[chunk.sequence.request_id]
        token_ids: list[int] = []
        logprobs: list[TokenLogprob] = []
        for index in range(chunk.num_logits):
            token_id, logprob = sampler.sample(self._context, row + index, logits[index])
            token_ids.append(token_id)
            if logprob:
                logprobs.append(logprob)
            if chunk.draft_token_ids[index : index + 1] != (token_id,):
                break
        return SampledToken(chunk, tuple(token_ids), tuple(logprobs))


def _explain(code: int) -> str:
    reasons = {1: "no free KV cells", 2: "aborted"}
    return f"llama_decode failed: {reasons.get(code, f'error {code}')}."
