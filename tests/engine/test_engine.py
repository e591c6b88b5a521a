"""One step after another on the real model: what a request gets, and what a failure costs."""

from __future__ import annotations

import math
import random

import pytest
from harness import Result, engine_of, request, run, step

from edgeserve.engine.engine import Engine
from edgeserve.engine.request import FinishReason
from edgeserve.engine.sampling_params import SamplingParams
from edgeserve.errors import ContextLengthError, EngineError, QueueFullError, QueueTimeoutError
from edgeserve.llama import Model

QUESTION = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"


def tokens(model: Model, text: str = QUESTION) -> list[int]:
    return model.tokenize(text, add_special=True, parse_special=True)


def greedy(**fields: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 16, **fields})


def ask(engine: Engine, model: Model, **fields: object) -> Result:
    return run(engine, request("a", tokens(model), greedy(**fields)))["a"]


@pytest.fixture(scope="module")
def engine(model: Model):
    with engine_of(model, n_seq_max=4, n_ctx=2048) as made:
        yield made


def test_an_answer_ends_by_itself_and_its_parts_add_up(engine: Engine, model: Model) -> None:
    result = ask(engine, model)
    assert result.text == "The capital of France is Paris."
    assert result.finish_reason is FinishReason.STOP
    timings = result.timings
    assert timings.num_prompt_tokens == timings.num_cached_tokens + timings.num_evaluated_tokens
    assert timings.num_output_tokens == len(result.token_ids)
    assert timings.ttft_s == pytest.approx(timings.queue_s + timings.prefill_s)


def test_the_same_prompt_again_evaluates_one_token_and_counts_all(engine: Engine, model: Model) -> None:
    ask(engine, model)
    timings = ask(engine, model).timings
    assert (timings.num_evaluated_tokens, timings.num_cached_tokens) == (1, timings.num_prompt_tokens - 1)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_max_tokens(engine: Engine, model: Model, count: int) -> None:
    result = ask(engine, model, max_tokens=count)
    assert (len(result.token_ids), result.finish_reason) == (count, FinishReason.LENGTH)


def test_ignore_eos_and_min_tokens_go_on_after_the_end(engine: Engine, model: Model) -> None:
    assert len(ask(engine, model, ignore_eos=True, max_tokens=24).token_ids) == 24
    assert len(ask(engine, model, min_tokens=12, max_tokens=14).token_ids) >= 12


def test_a_stop_string_over_token_borders_is_not_shown(engine: Engine, model: Model) -> None:
    result = ask(engine, model, stop=("of France is",))
    assert result.text == "The capital "
    assert (result.finish_reason, result.outputs[-1].stop_string) == (FinishReason.STOP, "of France is")


def test_the_context_end_ends_a_generation(engine: Engine, model: Model) -> None:
    prompt = tokens(model) * 30
    room = engine.scheduler.kv_cache.n_ctx_seq - len(prompt)
    result = run(engine, request("a", prompt, greedy(max_tokens=10_000, ignore_eos=True)))["a"]
    assert (len(result.token_ids), result.finish_reason) == (room, FinishReason.LENGTH)


def test_a_prompt_that_cannot_fit_is_refused_with_both_counts(engine: Engine, model: Model) -> None:
    with pytest.raises(ContextLengthError) as caught:
        engine.add(request("a", [1] * 600))
    assert caught.value.extra == {"n_prompt_tokens": 600, "n_ctx": 512}
    assert not engine.has_work


def test_logit_bias_forbids_and_forces(engine: Engine, model: Model) -> None:
    first = ask(engine, model, max_tokens=1).token_ids[0]
    assert ask(engine, model, max_tokens=1, logit_bias=((first, -math.inf),)).token_ids[0] != first
    forced = tokens(model, " banana")[0]
    assert ask(engine, model, max_tokens=3, logit_bias=((forced, 1000.0),)).token_ids == [forced] * 3


def test_logprobs_of_greedy_tokens_are_the_top_ones(engine: Engine, model: Model) -> None:
    result = ask(engine, model, logprobs=3)
    entries = [entry for output in result.outputs for entry in output.logprobs]
    assert [entry.token_id for entry in entries] == result.token_ids
    for entry in entries:
        assert entry.top[0] == (entry.token_id, entry.logprob)
        assert [logprob for _, logprob in entry.top] == sorted((lp for _, lp in entry.top), reverse=True)
        assert 0 < sum(math.exp(logprob) for _, logprob in entry.top) <= 1 + 1e-6


def test_a_seed_repeats_and_another_seed_differs(engine: Engine, model: Model) -> None:
    draws = [
        run(
            engine,
            request("a", tokens(model), SamplingParams(temperature=1.5, seed=seed, max_tokens=20, top_k=0)),
        )["a"].token_ids
        for seed in (7, 7, 8)
    ]
    assert draws[0] == draws[1] != draws[2]


def test_penalties_change_a_repetitive_answer(engine: Engine, model: Model) -> None:
    prompt = tokens(model, "one two one two one two one two one two")
    plain = run(engine, request("a", prompt, greedy()))["a"].token_ids
    penalised = run(engine, request("a", prompt, greedy(repeat_penalty=2.0)))["a"].token_ids
    assert plain != penalised


def test_max_tokens_in_the_middle_of_a_character(engine: Engine, model: Model) -> None:
    emoji = tokens(model, "😀")
    assert len(emoji) > 1
    bias = tuple((token, 1000.0) for token in emoji[:1])
    result = ask(engine, model, max_tokens=1, logit_bias=bias)
    assert result.text == "�"


def test_more_requests_than_slots_all_finish_in_order(engine: Engine, model: Model) -> None:
    # Of one length, and without a common prefix that would make some of them shorter.
    requests = [request(f"r{i}", [1000 + i] * 12, greedy(max_tokens=3, ignore_eos=True)) for i in range(20)]
    results = run(engine, *requests)
    assert all(len(result.token_ids) == 3 for result in results.values())
    assert not engine.has_work
    spans = [results[item.request_id].timings for item in requests]
    starts = [
        round(item.arrival_s + span.queue_s + span.restore_s, 6)
        for item, span in zip(requests, spans, strict=True)
    ]
    assert starts == sorted(starts)


def test_cancel_while_waiting_prefilling_and_decoding(model: Model) -> None:
    with engine_of(model, n_seq_max=1, n_ctx=1024, prefill_chunk=64) as engine:
        results = {name: Result() for name in "abc"}
        for name in "abc":
            engine.add(request(name, tokens(model) * 10, greedy(max_tokens=50, ignore_eos=True)))
        step(engine, results)
        assert results["a"].timings.num_evaluated_tokens == 64
        assert engine.abort("b").finish_reason is FinishReason.CANCELLED
        assert engine.abort("a").finish_reason is FinishReason.CANCELLED
        while not results["c"].token_ids:
            step(engine, results)
        assert results["c"].timings.num_cached_tokens == 64
        assert engine.abort("c").finish_reason is FinishReason.CANCELLED
        assert not engine.has_work
        assert engine.abort("a") is None
        assert engine.stats().running == ()
        assert not results["b"].outputs


def test_the_queue_is_bounded(model: Model) -> None:
    with engine_of(model, n_seq_max=1, n_ctx=512, max_waiting=2) as engine:
        for name in ("first", "a", "b"):  # the first takes the free sequence at the next step
            engine.add(request(name, tokens(model)))
        with pytest.raises(QueueFullError) as caught:
            engine.add(request("c", tokens(model)))
        assert caught.value.retry_after_s >= 1
        assert engine.stats().finished_total == {"rejected": 1}


def test_waiting_has_a_limit(model: Model) -> None:
    with engine_of(model, n_seq_max=1, n_ctx=512, max_queue_s=5) as engine:
        results = {"a": Result(), "late": Result()}
        engine.add(request("a", tokens(model), greedy(max_tokens=2)))
        step(engine, results)
        engine.add(request("late", tokens(model)))
        object.__setattr__(engine.scheduler.waiting.head.request, "arrival_s", -100.0)
        step(engine, results)
        error = results["late"].error
        assert isinstance(error, QueueTimeoutError)
        assert "5000 ms" in error.message
        assert "a free sequence" in error.message


class FailingContext:
    """The real context, except that chosen decodes fail."""

    def __init__(self, context, fails) -> None:
        self._context, self._fails = context, fails

    def __getattr__(self, name: str):
        return getattr(self._context, name)

    def decode(self, batch, **options):
        outcome = self._fails(batch)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome or self._context.decode(batch, **options)


def poison(engine: Engine, fails) -> None:
    engine.runner._context = FailingContext(engine.runner._context, fails)


@pytest.mark.parametrize("failure", [-1, 1, 2, RuntimeError("boom")])
def test_a_failed_decode_costs_only_the_request_that_fails_alone(model: Model, failure: object) -> None:
    with engine_of(model, n_seq_max=3, n_ctx=1536) as engine:
        poison(engine, lambda batch: failure if 0 in batch._token[: batch.num_tokens] else 0)
        results = run(
            engine,
            request("good", tokens(model), greedy()),
            request("bad", [0, 5, 6], greedy()),
            request("fine", tokens(model), greedy()),
        )
        assert isinstance(results["bad"].error, EngineError)
        assert results["bad"].finish_reason is FinishReason.ERROR
        assert results["good"].text == results["fine"].text == "The capital of France is Paris."
        assert engine.scheduler.kv_cache.slots[1].token_ids == []
        assert run(engine, request("next", tokens(model), greedy()))["next"].text == results["good"].text


@pytest.mark.parametrize("seed", range(3))
def test_decodes_that_fail_at_random_leave_nothing_behind(model: Model, seed: int) -> None:
    """Every request gets an answer or an error of its own, all cells come back, and the next one works."""
    rng = random.Random(seed)
    with engine_of(model, n_seq_max=3, n_ctx=1536) as engine:
        real = engine.runner._context
        failures = (-1, 1, 2, RuntimeError("boom"))
        poison(engine, lambda batch: rng.choice(failures) if rng.random() < 0.4 else 0)
        asked = [request(str(index), tokens(model), greedy(max_tokens=6)) for index in range(9)]
        results = run(engine, *asked)
        engine.runner._context = real
        for result in results.values():
            if result.error is None:
                assert "The capital of France is Paris.".startswith(result.text)
                assert len(result.token_ids) == 6
            else:
                assert isinstance(result.error, EngineError)
        cache = engine.scheduler.kv_cache
        assert cache.num_used_cells == cache.num_cached_cells
        assert run(engine, request("next", tokens(model), greedy()))["next"].text == (
            "The capital of France is Paris."
        )


def test_a_failure_in_the_middle_of_a_decode_changes_no_answer(model: Model) -> None:
    with engine_of(model, n_seq_max=2, n_ctx=1024) as engine:
        calls = iter(range(1000))
        poison(engine, lambda batch: 2 if batch.num_tokens == 2 and next(calls) % 2 == 0 else 0)
        results = run(engine, *(request(name, tokens(model), greedy()) for name in "ab"))
        assert {result.text for result in results.values()} == {"The capital of France is Paris."}


def test_statistics_count_what_happened(model: Model) -> None:
    with engine_of(model, n_seq_max=2, n_ctx=1024) as engine:
        results = run(engine, *(request(str(i), tokens(model), greedy(max_tokens=4)) for i in range(4)))
        stats = engine.stats()
        assert stats.num_prompt_tokens_total == 4 * len(tokens(model))
        assert stats.num_cached_tokens_total == sum(r.timings.num_cached_tokens for r in results.values())
        assert stats.num_output_tokens_total == 16
        assert stats.finished_total == {"length": 4}
        assert stats.num_used_cells == stats.num_cached_cells > 0
        steps = stats.recent_steps
        assert sum(item.num_decode_tokens for item in steps) == 12
        total_s = sum(item.duration_s for item in steps)
        assert stats.prefill_s_total + stats.decode_s_total == pytest.approx(total_s)


@pytest.mark.parametrize("unified", [False, True])
def test_a_shared_system_prompt_is_computed_once(model: Model, unified: bool) -> None:
    """Two chats with one system prompt: the second takes the prefix over from the first, while it still
    runs."""
    system = (
        "<|im_start|>system\n"
        + "You are a helpful assistant who answers questions briefly. " * 8
        + "<|im_end|>\n"
    )
    first = tokens(model, system + "<|im_start|>user\nSay hello.<|im_end|>\n<|im_start|>assistant\n")
    second = tokens(model, system + QUESTION)
    with engine_of(model, n_seq_max=3, n_ctx=3072, kv_unified=unified) as engine:
        alone = run(engine, request("alone", second, greedy(), cache_prompt=False))["alone"]
        engine.scheduler.kv_cache.slots[0].token_ids.clear()
        engine.runner._context.clear()
        results = {"first": Result(), "second": Result()}
        engine.add(request("first", first, greedy(ignore_eos=True, max_tokens=30)))
        while not results["first"].token_ids:
            step(engine, results)
        engine.add(request("second", second, greedy()))
        while engine.has_work:
            step(engine, results)
        cached = results["second"].timings.num_cached_tokens
        assert cached >= len(tokens(model, system)) - 1
        assert results["second"].text == alone.text
        assert len(results["first"].token_ids) == 30
