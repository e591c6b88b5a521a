"""More than fits: a pool of cells that holds a fraction of what is asked, and a cache full of other people's
prompts. Nobody's answer may change by it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from harness import Result, engine_of, equal_or_close, request, run, step

from edgeserve.engine.engine import Engine
from edgeserve.engine.request import FinishReason
from edgeserve.engine.sampling_params import SamplingParams
from edgeserve.llama import Model

NUM_REQUESTS, NUM_PROMPT, NUM_OUTPUT, POOL = 8, 64, 32, 256
"""The proportions of 8 requests of 500 + 500 tokens in a pool of 2,048 (benchmarks/kv_pressure.py)."""

TOPICS = ("the sea", "a bakery", "an old train", "two foxes", "winter", "a lost key", "the moon", "a market")
CANARIES = (
    "Zorblax",
    "Quimbly",
    "Fendrick",
    "Wuzzle",
    "Jabberon",
    "Mirvane",
    "Tolspan",
    "Krendel",
    "Yosprit",
    "Vantrop",
)


def ids(model: Model, text: str) -> list[int]:
    return model.tokenize(text, add_special=True, parse_special=True)


def question(model: Model, text: str) -> list[int]:
    return ids(model, f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")


def stories(model: Model) -> list[list[int]]:
    texts = [f"A long story about {topic}, told slowly and in detail. Once there was " for topic in TOPICS]
    return [(ids(model, text) * NUM_PROMPT)[:NUM_PROMPT] for text in texts]


def generate(engine: Engine, model: Model, logprobs: int | None = None) -> dict[str, Result]:
    params = SamplingParams(temperature=0, max_tokens=NUM_OUTPUT, ignore_eos=True, logprobs=logprobs)
    asked = [request(str(index), prompt, params) for index, prompt in enumerate(stories(model))]
    results = {item.request_id: Result() for item in asked}
    for item in asked:
        engine.add(item)
    while engine.has_work:
        step(engine, results)
        assert engine.scheduler.kv_cache.num_used_cells <= engine.scheduler.kv_cache.n_ctx
    return results


def test_a_pool_that_is_far_too_small_changes_no_answer_and_fails_nobody(model: Model) -> None:
    with engine_of(model, n_seq_max=NUM_REQUESTS, n_ctx=POOL, kv_unified=True) as engine:
        pressed = generate(engine, model)
        # Two whole lives fit at a time.
        assert engine.stats().num_evicted_tokens_total > POOL
    with engine_of(model, n_seq_max=NUM_REQUESTS, n_ctx=1024, kv_unified=True) as engine:
        free = generate(engine, model, logprobs=2)
    for name, result in pressed.items():
        assert result.error is None
        assert (len(result.token_ids), result.finish_reason) == (NUM_OUTPUT, FinishReason.LENGTH)
        assert equal_or_close(result, free[name])


def test_who_waits_for_cells_is_told_so_and_answers_without_a_cap_do_not_run_one_by_one(model: Model) -> None:
    """A request without max_tokens may make half of an equal share of the pool, not half of the pool."""
    params = SamplingParams(temperature=0, ignore_eos=True)
    with engine_of(model, n_seq_max=4, n_ctx=1024, kv_unified=True) as engine:
        names = [str(index) for index in range(4)]
        results = {name: Result() for name in names}
        for name in names:
            engine.add(request(name, question(model, f"Count to {name}."), params))
        step(engine, results)
        assert [item.max_tokens for item in engine.stats().running] == [128] * 4
        engine.abort("0")
        results["long"] = Result()
        engine.add(request("long", question(model, "Count."), replace(params, max_tokens=900)))
        step(engine, results)
        [waiting] = engine.stats().waiting
        num_reserved = sum(item.max_num_tokens for item in engine.scheduler.running)
        num_needed = engine.scheduler.waiting.head.max_num_tokens
        assert waiting.waits_for == f"{num_reserved + num_needed - 1024} KV cells"
        for name in (*names, "long"):
            engine.abort(name)
        assert engine.stats().num_used_cells == engine.stats().num_cached_cells


@pytest.mark.parametrize("unified", [False, True])
def test_no_foreign_word_appears_after_many_cached_prompts(model: Model, unified: bool) -> None:
    """Thirty cached prompts with a word of their own each, then forty unrelated ones at once: the answers are
    those of an engine that looks nothing up."""
    words = [f"{name}{number}" for name in CANARIES for number in (3, 5, 8)]
    asks = [ids(model, f"{number} plus {number % 7} is") for number in range(20)]
    asks += [ids(model, f"Fruit number {number} is") for number in range(20)]
    with engine_of(model, n_seq_max=8, n_ctx=2048, kv_unified=unified, max_waiting=64) as engine:
        for word in words:
            prompt = ids(model, f"My name is {word}.")
            run(engine, request(word, prompt, SamplingParams(temperature=0, max_tokens=1)))
        warm, cold = (
            run(
                engine,
                *(
                    request(str(index), prompt, params, cache_prompt=cached)
                    for index, prompt in enumerate(asks)
                ),
            )
            for cached, params in (
                (True, SamplingParams(temperature=0, max_tokens=4)),
                (False, SamplingParams(temperature=0, max_tokens=4, logprobs=2)),
            )
        )
    assert len(words) == 30
    assert len(warm) == 40
    for name, result in warm.items():
        assert not any(word.lower() in result.text.lower() for word in (*words, *CANARIES))
        assert equal_or_close(result, cold[name])
    assert any(result.timings.num_cached_tokens for result in warm.values())
    assert not any(result.timings.num_cached_tokens for result in cold.values())


def test_a_prefix_of_another_key_is_never_found(model: Model) -> None:
    """Two keys with the same prompt: each computes it once for itself, and finds its own again."""
    prompt = question(model, "The secret word is Zorblax. Never say it. What is two and two?")
    params = SamplingParams(temperature=0, max_tokens=2)
    with engine_of(model, n_seq_max=4, n_ctx=2048) as engine:
        cached = {
            name: run(engine, request(name, prompt, params, cache_namespace=key))[
                name
            ].timings.num_cached_tokens
            for name, key in (("a", "one"), ("b", "two"), ("c", ""), ("d", "one"), ("e", "two"))
        }
    assert cached == {"a": 0, "b": 0, "c": 0, "d": len(prompt) - 1, "e": len(prompt) - 1}
