"""Models that cannot drop a part of their memory: how much of a prompt they compute anew, and that the answer
is the one of a run without any cache."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import Result, engine_of, equal_or_close, request, run
from zoo import write_model

from edgeserve.engine.checkpoints import OPENING_TOKENS
from edgeserve.engine.engine import Engine
from edgeserve.engine.sampling_params import SamplingParams
from edgeserve.llama import Model

GREEDY = SamplingParams(temperature=0, max_tokens=8, logprobs=2, ignore_eos=True)
MODELS = {
    "recurrent": "rwkv7",
    "hybrid": "granitehybrid",
    "hybrid in each layer": "plamo2",
    "gated delta": "qwen3next-moe",
    "hybrid with windows": "lfm2",
    "windows": "gemma3",
}
SYSTEM = "You are a helpful assistant who answers questions briefly. " * 4


@pytest.fixture(scope="module", params=MODELS)
def stateful(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    name = MODELS[request.param]
    made = Model(write_model(name, tmp_path_factory.mktemp("stateful") / f"{name}.gguf"))
    yield made
    made.close()


def tokens(model: Model, text: str) -> list[int]:
    return model.tokenize(text, add_special=True, parse_special=True)


def ask(engine: Engine, token_ids: list[int], **fields: object) -> Result:
    return run(engine, request("a", token_ids, GREEDY, **fields))["a"]


def settings(**fields: object) -> dict[str, object]:
    return {"n_seq_max": 2, "n_ctx": 2048, "swa_full": False, "n_ubatch": 64, "prefill_chunk": 64, **fields}


def clean(model: Model, token_ids: list[int], **fields: object) -> Result:
    with engine_of(model, **settings(**fields)) as engine:
        result = ask(engine, token_ids, cache_prompt=False)
    assert not any(math.isnan(logprob) for logprob in result.logprobs)
    return result


@pytest.mark.parametrize("unified", [False, True])
def test_a_chat_whose_answers_are_told_differently_computes_only_what_is_new(
    stateful: Model, unified: bool
) -> None:
    """As with models whose thoughts are left out of the history: each prompt parts from what is resident
    where the answer began."""
    opening = tokens(stateful, "answer:")
    with engine_of(stateful, **settings(kv_unified=unified)) as engine:
        history = tokens(stateful, SYSTEM + "First question?")
        ask(engine, history + opening)
        for n in range(3):
            history_before = len(history)
            history = history + opening + tokens(stateful, f"In short, {n}. Question {n}?")
            result = ask(engine, history + opening)
            new = len(history) + len(opening) - history_before
            assert result.timings.num_evaluated_tokens <= new + OPENING_TOKENS
            assert equal_or_close(result, clean(stateful, history + opening, kv_unified=unified))
        stats = engine.stats().prefix_cache
        # A window that has not moved far can still be cut.
        assert stats.hits_total.get("checkpoint") == 3 or not stateful.keeps_state
        assert 0 < stats.checkpoints.num_bytes <= stats.checkpoints.limit_bytes


def test_a_chat_that_only_grows_computes_only_what_is_new(stateful: Model) -> None:
    with engine_of(stateful, **settings()) as engine:
        chat = tokens(stateful, SYSTEM + "First question?")
        for _ in range(3):
            first = ask(engine, chat)
            known = len(chat) + len(first.token_ids) - 1
            chat = [*chat, *first.token_ids[:-1], *tokens(stateful, "And then?")]
            result = ask(engine, chat)
            assert result.timings.num_cached_tokens == known


@pytest.mark.parametrize("unified", [False, True])
def test_the_same_prompt_again_goes_back_to_the_checkpoint(stateful: Model, unified: bool) -> None:
    asked = tokens(stateful, SYSTEM + "First question?")
    with engine_of(stateful, **settings(kv_unified=unified)) as engine:
        first = ask(engine, asked)
        again = ask(engine, asked)
        assert again.timings.num_evaluated_tokens <= OPENING_TOKENS
        assert equal_or_close(again, first)


@pytest.mark.parametrize("unified", [False, True])
def test_a_third_chat_starts_where_the_first_two_parted(stateful: Model, unified: bool) -> None:
    system = len(tokens(stateful, SYSTEM))
    with engine_of(stateful, **settings(kv_unified=unified, n_seq_max=3)) as engine:
        for question in ("Alpha alpha alpha?", "Beta beta beta?"):
            ask(engine, tokens(stateful, SYSTEM + question))
        third = tokens(stateful, SYSTEM + "Gamma gamma gamma?")
        result = ask(engine, third)
        assert result.timings.num_cached_tokens >= system
        assert equal_or_close(result, clean(stateful, third, kv_unified=unified))


def test_long_prompts_have_checkpoints_on_their_way(stateful: Model) -> None:
    long = tokens(stateful, SYSTEM * 6)
    assert len(long) > 1200
    with engine_of(stateful, **settings(n_ctx=4096)) as engine:
        ask(engine, long)
        edited = [*long[:1100], *reversed(long[1100:])]
        result = ask(engine, edited)
        assert result.timings.num_cached_tokens == 1024
        assert equal_or_close(result, clean(stateful, edited, n_ctx=4096))


def test_without_a_budget_such_a_prompt_starts_clean(stateful: Model) -> None:
    long = tokens(stateful, SYSTEM * 3)
    with engine_of(stateful, **settings(checkpoint_mib=0)) as engine:
        ask(engine, long)
        edited = [*long[:200], *reversed(long[200:])]
        result = ask(engine, edited)
        assert result.timings.num_cached_tokens == 0
        assert equal_or_close(result, clean(stateful, edited))
        assert engine.stats().prefix_cache.checkpoints.num_items == 0


def test_checkpoints_keep_to_their_budget(stateful: Model) -> None:
    with engine_of(stateful, **settings(checkpoint_mib=1)) as engine:
        chat: list[int] = []
        for n in range(8):
            chat = chat + tokens(stateful, f"Question {n} is this, and it is a long one: what is {n}? ")
            ask(engine, chat)
            assert engine.stats().prefix_cache.checkpoints.num_bytes <= 1 << 20
        assert engine.stats().prefix_cache.checkpoints.num_items >= 1


@pytest.mark.parametrize("unified", [False, True])
def test_checkpoints_survive_in_ram_and_on_disk(stateful: Model, tmp_path: Path, unified: bool) -> None:
    mine = tokens(stateful, SYSTEM + "First question?")
    other = tokens(stateful, "Something else altogether, which needs the only slot for itself.")
    told = [*mine[:-OPENING_TOKENS], *tokens(stateful, "told differently")]
    with engine_of(stateful, **settings(n_seq_max=1, cache_ram_mib=16, kv_unified=unified)) as engine:
        ask(engine, mine)
        ask(engine, other)
        from_ram = ask(engine, told)
        assert from_ram.timings.num_cached_tokens == len(mine) - OPENING_TOKENS
        assert engine.stats().prefix_cache.hits_total["ram"] == 1
    disk = settings(n_seq_max=1, cache_disk=str(tmp_path / "cache"), kv_unified=unified)
    with engine_of(stateful, **disk) as engine:
        ask(engine, mine)
    with engine_of(stateful, **disk) as engine:
        from_disk = ask(engine, told)
        assert from_disk.timings.num_cached_tokens == len(mine) - OPENING_TOKENS
    want = clean(stateful, told, kv_unified=unified)
    assert equal_or_close(from_ram, want)
    assert equal_or_close(from_disk, want)
