"""The engine's three nouns: what was asked (Request), one generation in progress (Sequence), and what comes
out of a step for it (RequestOutput).

Owns the arithmetic on a sequence's counters and its timeline. Knows nothing of batches, cells or text
rendering.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum

from edgeserve.engine.sampling_params import SamplingParams
from edgeserve.engine.saved_prefix import PrefixCacheStats
from edgeserve.errors import RequestError


class FinishReason(StrEnum):
    """Why a generation ended, in OpenAI's words; CANCELLED and ERROR never reach a client as a
    finish_reason."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


class SequenceStatus(StrEnum):
    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


class Priority(StrEnum):
    """INTERACTIVE goes first; BATCH waits for it, but not without bound (waiting_queue.py)."""

    INTERACTIVE = "interactive"
    BATCH = "batch"


@dataclass(frozen=True, slots=True)
class Urgency:
    """How a request wants to be treated while others want the machine too. Seconds; None: no own limit.

    `max_queue_s` counts from the handing over and ends with the first step, `deadline_s` from the arrival and
    ends with the last token.
    """

    priority: Priority = Priority.INTERACTIVE
    max_queue_s: float | None = None
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """What a client asked. Immutable.

    `prompt_token_ids` is never empty. `arrival_s` is the clock of `time.perf_counter()` when the request's
    last byte was received; everything later is measured from it. `front_end_s` is what the front end took
    from there until it handed the request over: template, tokenizing, waking a sleeping model. Only prefixes
    made under the same `cache_namespace` are reused; `cache_prompt` False computes every prompt token anew.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    arrival_s: float
    cache_namespace: str = ""
    cache_prompt: bool = True
    front_end_s: float = 0.0
    urgency: Urgency = Urgency()

    def __post_init__(self) -> None:
        assert self.prompt_token_ids, "the front end refuses empty prompts"

    @property
    def queued_s(self) -> float:
        """The clock when the front end handed it over."""
        return self.arrival_s + self.front_end_s


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's log-probability (natural log) and the best alternatives, the chosen one not excluded."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class RequestTimings:
    """Where one request's time went. Seconds; None where it has not happened yet.

    The parts add up: front end + queue + restore + prefill = time to the first token, and with decode and
    delivery = end to end. `queue_s` runs from the handing over to the first step that the sequence took part
    in, less `restore_s`, the copying or loading of cached state; `prefill_s` from there to its first sampled
    token, and `decode_s` to the last one. `stalled_s` is the part of `decode_s` that steps took longer
    because they also carried other sequences' prompts: an estimate, since one mixed step cannot be split by a
    clock. `delivery_s` and `e2e_s` are the front end's to fill in, when it has the end.
    """

    num_prompt_tokens: int
    num_cached_tokens: int
    num_evaluated_tokens: int
    num_output_tokens: int
    num_draft_tokens: int = 0
    """Tokens that were guessed and verified several at once; of them the next field's many were right."""
    num_accepted_tokens: int = 0
    front_end_s: float = 0.0
    queue_s: float | None = None
    restore_s: float = 0.0
    prefill_s: float | None = None
    decode_s: float | None = None
    stalled_s: float = 0.0
    ttft_s: float | None = None
    delivery_s: float | None = None
    e2e_s: float | None = None

    @property
    def own_decode_s(self) -> float | None:
        return None if self.decode_s is None else self.decode_s - self.stalled_s

    @property
    def known_s(self) -> float:
        """The parts added up, as far as they have happened."""
        parts = (self.queue_s, self.prefill_s, self.decode_s, self.delivery_s)
        return self.front_end_s + self.restore_s + sum(part or 0.0 for part in parts)

    def delivered(self, delivery_s: float, e2e_s: float) -> RequestTimings:
        """The whole timeline: the front end has the last token, so long after its step's end, and so long
        after the request's arrival."""
        return replace(self, delivery_s=delivery_s, e2e_s=e2e_s)

    def cut_off(self, e2e_s: float) -> RequestTimings:
        """The timeline of a request that ended without its last token: the part that it was in lasts until
        then. After the first token that is the delivery: nothing more was heard."""
        rest_s = max(0.0, e2e_s - self.known_s)
        if self.queue_s is None:
            return replace(self, queue_s=rest_s, e2e_s=e2e_s)
        if self.prefill_s is None:
            return replace(self, prefill_s=rest_s, e2e_s=e2e_s)
        return replace(self, delivery_s=rest_s, e2e_s=e2e_s)


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What one step brought a request. `text` and `token_ids` are what is new since the last output.

    `text` may be empty while a half character or a possible stop string is held back. The last output has
    `finish_reason` set; when that is ERROR, `error` says why. Before the first token, outputs without tokens
    report prefill progress by `timings.num_evaluated_tokens`. `at_s` is the clock of `time.perf_counter()` at
    the latest token, or 0.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    timings: RequestTimings
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_string: str | None = None
    error: RequestError | None = None
    at_s: float = 0.0

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True, eq=False)
class Sequence:
    """One generation in progress: the engine's only mutable noun.

    There is no prefill phase: `num_computed_tokens` catches up with `num_tokens`, first by chunks of the
    prompt, then one sampled token at a time.
    """

    request: Request
    max_tokens: int
    token_ids: list[int] = field(default_factory=list)
    status: SequenceStatus = SequenceStatus.WAITING
    seq_id: int = -1
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    checkpoints_at: tuple[int, ...] = ()
    """Where in the prompt a chunk has to end, for a checkpoint of the state there."""
    finish_reason: FinishReason | None = None
    stop_string: str | None = None
    error: RequestError | None = None
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    restore_s: float = 0.0
    stalled_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.token_ids:
            self.token_ids = list(self.request.prompt_token_ids)

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def sampling(self) -> SamplingParams:
        return self.request.sampling

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens whose KV is still to be computed; 1 while decoding."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def num_tokens_to_stop(self) -> int:
        """Uncomputed tokens up to the next checkpoint, or all of them."""
        ahead = (at for at in self.checkpoints_at if at > self.num_computed_tokens)
        return min(ahead, default=self.num_tokens) - self.num_computed_tokens

    @property
    def is_prefilling(self) -> bool:
        return self.status is SequenceStatus.PREFILL

    @property
    def is_decoding(self) -> bool:
        return self.status is SequenceStatus.DECODE

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    @property
    def max_num_tokens(self) -> int:
        """The most tokens it can come to hold: what admission reserves cells for."""
        return self.num_prompt_tokens + self.max_tokens

    def finish(self, reason: FinishReason, error: RequestError | None = None) -> None:
        self.status = SequenceStatus.FINISHED
        self.finish_reason = reason
        self.error = error

    def timings(self) -> RequestTimings:
        arrival, start, first, last = (
            self.request.arrival_s,
            self.first_scheduled_s,
            self.first_token_s,
            self.last_token_s,
        )
        return RequestTimings(
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_evaluated_tokens=min(self.num_computed_tokens, self.num_prompt_tokens)
            - self.num_cached_tokens,
            num_output_tokens=self.num_output_tokens,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
            front_end_s=self.request.front_end_s,
            queue_s=None if start is None else start - arrival - self.request.front_end_s - self.restore_s,
            restore_s=self.restore_s,
            prefill_s=None if start is None or first is None else first - start,
            decode_s=None if first is None or last is None else last - first,
            stalled_s=self.stalled_s,
            ttft_s=None if first is None else first - arrival,
        )


@dataclass(frozen=True, slots=True)
class SequenceStats:
    """One slot or waiting request as an observer sees it; no text, no tokens."""

    request_id: str
    status: SequenceStatus
    seq_id: int
    timings: RequestTimings
    max_tokens: int
    waits_for: str = ""


@dataclass(frozen=True, slots=True)
class StepStats:
    """One llama_decode call: what it carried and how long it took."""

    step: int
    start_s: float
    duration_s: float
    num_decode_tokens: int
    num_prefill_tokens: int
    num_accepted_tokens: int = 0
    """Drafted tokens that it brought beyond those decodes."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine after a step, published as one immutable object and read by any thread."""

    num_steps: int = 0
    running: tuple[SequenceStats, ...] = ()
    waiting: tuple[SequenceStats, ...] = ()
    num_slots: int = 0
    n_ctx: int = 0
    n_ctx_seq: int = 0
    num_used_cells: int = 0
    num_cached_cells: int = 0
    """Of the used cells, those of idle sequences, kept only for reuse."""
    recent_steps: tuple[StepStats, ...] = ()
    """The latest steps, oldest first."""
    num_prompt_tokens_total: int = 0
    num_cached_tokens_total: int = 0
    num_output_tokens_total: int = 0
    prefill_s_total: float = 0.0
    decode_s_total: float = 0.0
    sample_s_total: float = 0.0
    """Drawing tokens; a part of the two above. On a GPU it includes waiting for the step's result."""
    steps_total: dict[str, int] = field(default_factory=dict)
    """Steps by what they carried: decode, prefill, or mixed."""
    step_s_total: dict[str, float] = field(default_factory=dict)
    num_evicted_tokens_total: int = 0
    """Cached tokens given up to make room."""
    prefix_cache: PrefixCacheStats = field(default_factory=PrefixCacheStats)
    num_drafts_total: int = 0
    """Steps of a sequence that verified drafted tokens, and below these tokens and the accepted ones."""
    num_draft_tokens_total: int = 0
    num_accepted_tokens_total: int = 0
    n_tokens_max: int = 0
    """The longest that any sequence became."""
    finished_total: dict[str, int] = field(default_factory=dict)
    heartbeat_s: float = 0.0
    """Clock of the engine thread's last sign of life; compare with time.perf_counter()."""

    @property
    def last_step(self) -> StepStats | None:
        return self.recent_steps[-1] if self.recent_steps else None
