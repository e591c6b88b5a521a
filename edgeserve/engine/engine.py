"""One step: schedule, run, update. The engine proper, without a thread of its own.

Owns the sequences, their finish rules, their text and their timeline. Knows nothing of asyncio or HTTP.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator

from edgeserve.config import EngineConfig
from edgeserve.engine.admission import Admission, Speeds
from edgeserve.engine.checkpoints import CheckpointKeeper
from edgeserve.engine.decode_alone import DecodeAlone
from edgeserve.engine.detokenizer import Detokenizer
from edgeserve.engine.drafter import Drafter
from edgeserve.engine.kv_cache import CARRY_TOKENS, CARRY_TOKENS_FLASH, KVCache
from edgeserve.engine.model_runner import DecodeFailedError, ModelRunner, SampledToken
from edgeserve.engine.prefix_tiers import prefix_tiers
from edgeserve.engine.request import (
    EngineStats,
    FinishReason,
    Request,
    RequestOutput,
    Sequence,
    SequenceStats,
    TokenLogprob,
)
from edgeserve.engine.scheduler import Chunk, FixedChunk, Scheduler, SchedulerOutput
from edgeserve.engine.step_book import StepBook
from edgeserve.engine.step_cost import IDLE_STEP_S, StepCost
from edgeserve.errors import ContextLengthError, EngineError, QueueFullError, RequestError
from edgeserve.llama import Model
from edgeserve.llama_context import Context


class Engine:
    """Sequences in, outputs out. Everything here runs on one thread, except `check`, which only reads."""

    def __init__(self, model: Model, context: Context, config: EngineConfig) -> None:
        """`config` must be resolved, with `n_ctx` and `n_ctx_seq` as the context reports them."""
        self._model = model
        self._config = config
        self.runner = ModelRunner(context, config.n_batch)
        self.step_cost = StepCost(config.itl_target_ms / 1e3)
        for sample in config.step_samples:
            self.step_cost.observe(*sample)
        # What a model cannot take back must not be computed on a guess.
        can_draft = config.num_draft_rows > 0 and context.can_cut_back
        self._drafter = Drafter(config.num_draft_rows) if can_draft else None
        self.tiers = prefix_tiers(self.runner, model, config)
        sizes = (config.n_seq_max, config.n_ctx, config.n_ctx_seq)
        carry = CARRY_TOKENS if config.flash_attn == "off" else CARRY_TOKENS_FLASH
        cache = KVCache(*sizes, config.kv_unified, context.can_cut, self.tiers, carry)
        self._checkpoints = CheckpointKeeper(self.runner, cache, config.checkpoint_mib << 20)
        self.scheduler = Scheduler(
            cache,
            token_budget=config.n_batch,
            chunk_policy=FixedChunk(config.prefill_chunk) if config.prefill_chunk else self.step_cost,
            drafter=self._drafter,
        )
        self._admission = Admission(
            self.scheduler, config.max_waiting, config.max_waiting_tokens, config.max_queue_s
        )
        self._sequences: dict[str, Sequence] = {}
        self._detokenizers: dict[str, Detokenizer] = {}
        self._totals: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()
        self._book = StepBook()
        self._decode_alone = DecodeAlone()
        self._n_tokens_max = 0

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self.tiers.has_fetched

    # -- commands -------------------------------------------------------------------------------------------

    def check(self, request: Request) -> int:
        """The request's cap on output tokens. Raises ContextLengthError when its prompt leaves no room."""
        room = self._config.n_ctx_seq - len(request.prompt_token_ids)
        if room < 1:
            raise ContextLengthError(len(request.prompt_token_ids), self._config.n_ctx_seq)
        return min(request.sampling.max_tokens or self._config.n_predict, room)

    def add(self, request: Request) -> None:
        """Queue a request. Raises ContextLengthError or QueueFullError: that request's answer."""
        sequence = Sequence(request, self.check(request))
        try:
            self._admission.check(sequence, self._speeds())
        except QueueFullError:
            self._finished["rejected"] += 1
            raise
        self._sequences[request.request_id] = sequence
        self._detokenizers[request.request_id] = Detokenizer(request.sampling.stop)
        if not self.tiers.fetch(sequence, self.scheduler.kv_cache):
            self.scheduler.add(sequence)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request at its client's wish, waiting or running; None when it is over already."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return None
        return self._end(sequence, FinishReason.CANCELLED)

    def abort_all(self, error: RequestError) -> list[RequestOutput]:
        """End every request with the same error."""
        return [self._end(sequence, FinishReason.ERROR, error) for sequence in list(self._sequences.values())]

    def idle(self) -> None:
        """To be called now and then while nothing is asked: work that can wait."""
        self.tiers.idle(self.scheduler.kv_cache)

    def close(self) -> None:
        """Keep what is to be kept, and free the context. Nothing is asked of the engine any more."""
        self.tiers.close(self.scheduler.kv_cache)
        self.runner.close()

    # -- one step -------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Admit, decide, run, update. Returns what is new for each sequence that took part or ended."""
        for sequence in self.tiers.take_fetched():
            self.scheduler.add(sequence)
        outputs = self._give_up(self._admission.past_deadline(time.perf_counter()))
        self.tiers.trim(self.scheduler.kv_cache, self._most_copy_s())
        self._admit()
        if self.scheduler.waiting:
            outputs += self._give_up(self._admission.past_patience(time.perf_counter(), self._speeds()))
        decision = self.scheduler.schedule()
        if not decision.chunks:
            return outputs
        start = time.perf_counter()
        for chunk in decision.chunks:
            if chunk.sequence.first_scheduled_s is None:
                chunk.sequence.first_scheduled_s = start
        sampled, failed = self._run(decision)
        end = time.perf_counter()
        self._account(decision, sampled, start, end)
        outputs += failed
        for result in sampled:
            outputs += self._update(result, end)
        return outputs

    def _give_up(self, late: Iterable[tuple[Sequence, RequestError]]) -> list[RequestOutput]:
        return [self._end(sequence, FinishReason.ERROR, error) for sequence, error in tuple(late)]

    def _admit(self) -> None:
        for sequence, placement in self.scheduler.admit():
            start_s = time.perf_counter()
            self.tiers.save(placement.lost, self._most_copy_s())
            kept = self.runner.prepare(sequence, placement)
            if kept < placement.num_cached_tokens:
                self.scheduler.rewind(sequence, kept)
            self.tiers.placed(sequence, placement, kept)
            self._checkpoints.plan(sequence)
            if kept:
                sequence.restore_s += time.perf_counter() - start_s
            self._totals["prompt"] += sequence.num_prompt_tokens
            self._totals["cached"] += sequence.num_cached_tokens

    def _most_copy_s(self) -> float:
        """How long saving what a newcomer displaces may take: running streams wait for it."""
        decodes = any(sequence.is_decoding for sequence in self.scheduler.running)
        return self.step_cost.target_s if decodes else IDLE_STEP_S

    def _run(self, decision: SchedulerOutput) -> tuple[list[SampledToken], list[RequestOutput]]:
        try:
            return self.runner.execute(decision.chunks), []
        except DecodeFailedError as error:
            return self._run_apart(decision.chunks, error)

    def _run_apart(
        self, chunks: Iterable[Chunk], error: EngineError
    ) -> tuple[list[SampledToken], list[RequestOutput]]:
        """After a failed step: bring every sequence back to what it had before, then run each alone, so that
        only those that fail by themselves end."""
        sampled: list[SampledToken] = []
        failed: list[RequestOutput] = []
        chunks = [chunk for chunk in chunks if self._restore(chunk.sequence)]
        for chunk in chunks:
            try:
                sampled += self.runner.execute([chunk])
            except DecodeFailedError as alone:
                failed.append(self._fail(chunk.sequence, alone))
        return sampled, failed

    def _restore(self, sequence: Sequence) -> bool:
        """Whether a sequence's memory could be cut back to its computed tokens; otherwise it starts over."""
        checkpoints = self.scheduler.kv_cache.slots[sequence.seq_id].checkpoints
        kept = self.runner.cut_back(sequence, sequence.num_computed_tokens, checkpoints)
        if kept == sequence.num_computed_tokens:
            return True
        self.scheduler.rewind(sequence, kept)
        return False

    def _fail(self, sequence: Sequence, error: EngineError) -> RequestOutput:
        self.runner.forget(sequence)
        self.scheduler.rewind(sequence, 0)
        return self._end(sequence, FinishReason.ERROR, error)

    # -- after a step ---------------------------------------------------------------------------------------

    def _update(self, result: SampledToken, now_s: float) -> list[RequestOutput]:
        sequence = result.chunk.sequence
        self.scheduler.computed(result.chunk)
        self._checkpoints.take(sequence)
        if not result.token_ids:
            return [self._output(sequence)]
        sequence.first_token_s = sequence.first_token_s or now_s
        sequence.last_token_s = now_s
        return self._take_all(sequence, result)

    def _take_all(self, sequence: Sequence, result: SampledToken) -> list[RequestOutput]:
        """A step's tokens join their sequence one by one, as if each had had a step of its own, until it
        ends. They make one output, or with log-probabilities one each: those are told apart by their
        texts."""
        outputs: list[RequestOutput] = []
        text, first, last = "", 0, len(result.token_ids) - 1
        for index, token_id in enumerate(result.token_ids):
            if index:
                self.scheduler.accept_draft(sequence)
            text += self._take(sequence, token_id)
            reason = self._reason_to_end(sequence, token_id)
            if reason or index == last:
                self._settle_draft(result, index + 1)
            elif not result.logprobs:
                continue
            new = (text, result.token_ids[first : index + 1], result.logprobs[first : index + 1])
            if reason:
                return [*outputs, self._end(sequence, reason, None, *new)]
            outputs.append(self._output(sequence, *new))
            text, first = "", index + 1
        return outputs

    def _take(self, sequence: Sequence, token_id: int) -> str:
        """A sampled token joins its sequence; returns the text that it brings."""
        self.scheduler.append_token(sequence, token_id)
        self._totals["output"] += 1
        self._n_tokens_max = max(self._n_tokens_max, sequence.num_tokens)
        if token_id in self._model.eog_ids:
            return ""
        detokenizer = self._detokenizers[sequence.request_id]
        text = detokenizer.feed(self._piece(sequence, token_id))
        sequence.stop_string = detokenizer.stop_string
        return text

    def _reason_to_end(self, sequence: Sequence, token_id: int) -> FinishReason | None:
        if token_id in self._model.eog_ids or sequence.stop_string is not None:
            return FinishReason.STOP
        return FinishReason.LENGTH if sequence.num_output_tokens >= sequence.max_tokens else None

    def _settle_draft(self, result: SampledToken, num_taken: int) -> None:
        """Count what became of a draft, and free the cells of what was not taken."""
        sequence, num_drafted = result.chunk.sequence, len(result.chunk.draft_token_ids)
        if not num_drafted:
            return
        sequence.num_draft_tokens += num_drafted
        sequence.num_accepted_tokens += num_taken - 1
        self._totals["drafts"] += 1
        self._totals["drafted"] += num_drafted
        self._totals["accepted"] += num_taken - 1
        if num_taken <= num_drafted:
            self.runner.drop_draft(sequence)

    def _piece(self, sequence: Sequence, token_id: int) -> bytes:
        return self._model.piece(token_id, special=sequence.sampling.special_tokens)

    def _end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        error: RequestError | None = None,
        text: str = "",
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprob, ...] = (),
    ) -> RequestOutput:
        text += self._detokenizers.pop(sequence.request_id).finish()
        if self.tiers.withdraw(sequence):
            sequence.finish(reason)
        else:
            self.scheduler.finish(sequence, reason)
        sequence.error = error
        self.runner.release(sequence)
        del self._sequences[sequence.request_id]
        self._finished[reason.value] += 1
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._totals["answered"] += sequence.num_output_tokens
        return self._output(sequence, text, token_ids, logprobs)

    def _output(
        self,
        sequence: Sequence,
        text: str = "",
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprob, ...] = (),
    ) -> RequestOutput:
        return RequestOutput(
            request_id=sequence.request_id,
            text=text,
            token_ids=token_ids,
            timings=sequence.timings(),
            logprobs=logprobs,
            finish_reason=sequence.finish_reason,
            stop_string=sequence.stop_string,
            error=sequence.error,
            at_s=sequence.last_token_s or 0.0,
        )

    # -- time -----------------------------------------------------------------------------------------------

    def _account(
        self, decision: SchedulerOutput, sampled: list[SampledToken], start_s: float, end_s: float
    ) -> None:
        """Book a step's time: a clock cannot split a mixed step, so what it took longer than its decodes
        usually take alone counts as prefill, and as a stall of those decodes."""
        duration = end_s - start_s
        num_decodes, num_prefill = decision.num_decode_tokens, decision.num_prefill_tokens
        if self._drafter and not num_prefill:
            accepted = {result.chunk.sequence.request_id: result.num_accepted for result in sampled}
            self._drafter.observe(accepted, decision.num_draft_tokens, duration)
            if decision.num_draft_tokens:  # it says nothing of a decode's cost
                self._book.add(start_s, duration, num_decodes, 0, duration, sum(accepted.values()))
                return
        self.step_cost.observe(num_decodes, num_prefill, duration)
        decode_s = min(duration, self._alone_s(decision, duration))
        self._book.add(start_s, duration, num_decodes, num_prefill, decode_s)
        for chunk in decision.decodes:
            chunk.sequence.stalled_s += duration - decode_s

    def _alone_s(self, decision: SchedulerOutput, duration_s: float) -> float:
        """What the step's decodes take without its prompt tokens."""
        depth = sum(chunk.first_pos for chunk in decision.decodes)
        if not decision.num_prefill_tokens:
            self._decode_alone.observe(decision.num_decode_tokens, depth, duration_s)
            return duration_s
        alone_s = self._decode_alone.estimate_s(decision.num_decode_tokens, depth)
        return self.step_cost.decode_s(decision.num_decode_tokens) if alone_s is None else alone_s

    def _speeds(self) -> Speeds:
        """What was measured so far, for looking ahead."""
        num_answers = self._finished[FinishReason.STOP.value] + self._finished[FinishReason.LENGTH.value]
        num_computed = self._totals["prompt"] - self._totals["cached"]
        mean_step_s = (self._book.decode_s + self._book.prefill_s) / max(1, self._book.num_steps)
        return Speeds(
            decode_step_s=self.step_cost.decode_s(max(1, len(self.scheduler.running))) or mean_step_s,
            prompt_token_s=self._book.prefill_s / num_computed if num_computed else 0.0,
            mean_output_tokens=self._totals["answered"] / num_answers if num_answers else None,
        )

    def stats(self) -> EngineStats:
        """The engine as it stands, for observers."""
        cache = self.scheduler.kv_cache
        return EngineStats(
            num_steps=self._book.num_steps,
            running=tuple(_sequence_stats(sequence) for sequence in self.scheduler.running),
            waiting=tuple(self._waiting_stats()),
            num_slots=len(cache.slots),
            n_ctx=cache.n_ctx,
            n_ctx_seq=cache.n_ctx_seq,
            num_used_cells=cache.num_used_cells,
            num_cached_cells=cache.num_cached_cells,
            recent_steps=tuple(self._book.recent),
            num_prompt_tokens_total=self._totals["prompt"],
            num_cached_tokens_total=self._totals["cached"],
            num_output_tokens_total=self._totals["output"],
            prefill_s_total=self._book.prefill_s,
            decode_s_total=self._book.decode_s,
            sample_s_total=self.runner.sample_s,
            steps_total=dict(self._book.count_by_kind),
            step_s_total=dict(self._book.seconds_by_kind),
            num_evicted_tokens_total=cache.num_evicted_tokens,
            prefix_cache=self.tiers.stats(self._checkpoints.holding()),
            n_tokens_max=self._n_tokens_max,
            num_drafts_total=self._totals["drafts"],
            num_draft_tokens_total=self._totals["drafted"],
            num_accepted_tokens_total=self._totals["accepted"],
            finished_total=dict(self._finished),
            heartbeat_s=time.perf_counter(),
        )

    def _waiting_stats(self) -> Iterator[SequenceStats]:
        for sequence in self.scheduler.waiting:
            yield _sequence_stats(sequence, self.scheduler.waits_for(sequence))
        for sequence in self.tiers.fetching:
            yield _sequence_stats(sequence, "its prefix from disk")


def _sequence_stats(sequence: Sequence, waits_for: str = "") -> SequenceStats:
    return SequenceStats(
        sequence.request_id,
        sequence.status,
        sequence.seq_id,
        sequence.timings(),
        sequence.max_tokens,
        waits_for,
    )
