"""Drafts from a sequence's own text, through the real model: the answer stays what it is, in fewer steps."""

from __future__ import annotations

import pytest
from harness import Result, engine_of, equal_or_close, request, run

from edgeserve.engine.drafter import Drafter
from edgeserve.engine.engine import Engine
from edgeserve.engine.request import FinishReason
from edgeserve.engine.sampling_params import SamplingParams
from edgeserve.llama import Model

DRAFTING = {"spec_type": "ngram-simple", "n_draft_max": 6}
ROWS = "\n".join(f"row {n}: the quick brown fox jumps over the lazy dog" for n in range(1, 7))


class Eager(Drafter):
    """Drafts whenever there is something to draft, whatever it costs here."""

    def _is_plain_due(self, num_decodes: int) -> bool:
        return False

    def _best_size(self, accounts, limits, room: int) -> int:
        return min(6, room // len(accounts))


def make_eager(engine: Engine) -> None:
    engine._drafter = engine.scheduler._drafter = Eager(engine._config.num_draft_rows)


def prompt(model: Model, text: str = ROWS) -> list[int]:
    return model.tokenize(text + "\nrow 7:", add_special=True, parse_special=True)


def greedy(**fields: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 30, "logprobs": 2, "ignore_eos": True, **fields})


@pytest.fixture(scope="module")
def eager(model: Model):
    with engine_of(model, n_seq_max=3, n_ctx=3072, **DRAFTING) as engine:
        make_eager(engine)
        yield engine


@pytest.fixture(scope="module")
def plain(model: Model):
    with engine_of(model, n_seq_max=3, n_ctx=3072) as engine:
        yield engine


def ask(engine: Engine, tokens: list[int], params: SamplingParams) -> Result:
    return run(engine, request("a", tokens, params, cache_prompt=False))["a"]


def test_repetitive_text_takes_fewer_steps_and_stays_the_same(
    eager: Engine, plain: Engine, model: Model
) -> None:
    before = eager.stats().num_steps
    got, want = ask(eager, prompt(model), greedy()), ask(plain, prompt(model), greedy())
    assert equal_or_close(got, want)
    assert len(got.token_ids) == 30
    assert eager.stats().num_steps - before < 22
    assert all(len(output.token_ids) == len(output.logprobs) <= 1 for output in got.outputs)
    assert got.text == model.detokenize(got.token_ids).decode()


def test_the_tokens_of_a_step_come_as_one_output(eager: Engine, model: Model) -> None:
    got = ask(eager, prompt(model), greedy(logprobs=None))
    assert max(len(output.token_ids) for output in got.outputs) > 3
    assert got.text == model.detokenize(got.token_ids).decode()
    assert len(got.token_ids) == 30


def test_logprobs_are_those_of_the_tokens_themselves(eager: Engine, plain: Engine, model: Model) -> None:
    got, want = ask(eager, prompt(model), greedy()), ask(plain, prompt(model), greedy())
    entries = [entry for output in got.outputs for entry in output.logprobs]
    assert [entry.token_id for entry in entries] == got.token_ids
    same = sum(1 for a, b in zip(got.token_ids, want.token_ids, strict=True) if a == b)
    assert same == 30 or equal_or_close(got, want)
    for a, b in list(zip(got.logprobs, want.logprobs, strict=True))[:same]:
        assert a == pytest.approx(b, abs=0.2)


@pytest.mark.parametrize("count", [1, 2, 5, 11])
def test_the_cap_holds_inside_a_draft(eager: Engine, model: Model, count: int) -> None:
    result = ask(eager, prompt(model), greedy(max_tokens=count))
    assert (len(result.token_ids), result.finish_reason) == (count, FinishReason.LENGTH)
    assert_tidy(eager)


def test_a_stop_string_inside_a_draft_ends_it_there(eager: Engine, model: Model) -> None:
    result = ask(eager, prompt(model), greedy(stop=("fox jumps",)))
    assert (result.finish_reason, result.outputs[-1].stop_string) == (FinishReason.STOP, "fox jumps")
    assert result.text.endswith("brown ")
    assert result.timings.num_accepted_tokens > 0
    assert_tidy(eager)


def test_an_end_of_turn_inside_a_draft_ends_it_there(eager: Engine, model: Model) -> None:
    turn = "<|im_start|>user\nSay yes.<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n"
    tokens = model.tokenize(turn * 4 + "<|im_start|>user\nSay yes.<|im_end|>\n<|im_start|>assistant\n",
                            add_special=True, parse_special=True)  # fmt: skip
    result = ask(eager, tokens, greedy(ignore_eos=False))
    assert result.finish_reason is FinishReason.STOP
    assert result.text == "Yes."
    assert result.token_ids[-1] in model.eog_ids
    assert_tidy(eager)


def assert_tidy(engine: Engine) -> None:
    """The context holds what the book-keeping says, and no rejected draft beside it."""
    for slot in engine.scheduler.kv_cache.slots:
        assert engine.runner._context.seq_pos_max(slot.seq_id) == len(slot.token_ids) - 1


def test_the_next_turn_finds_the_drafted_tokens_resident(eager: Engine, plain: Engine, model: Model) -> None:
    first = run(eager, request("a", prompt(model), greedy()))["a"]
    longer = prompt(model) + first.token_ids + model.tokenize("\nrow", add_special=False, parse_special=False)
    got = run(eager, request("b", longer, greedy(max_tokens=12)))["b"]
    assert got.timings.num_cached_tokens >= len(prompt(model)) + 29
    assert equal_or_close(got, ask(plain, longer, greedy(max_tokens=12)))


def test_sampling_with_a_seed_draws_the_same_tokens(eager: Engine, plain: Engine, model: Model) -> None:
    """One draw a token and in its turn: the seed's random numbers fall on the same places."""
    params = SamplingParams(temperature=0.5, seed=11, max_tokens=30, logprobs=2, ignore_eos=True)
    got, want = ask(eager, prompt(model), params), ask(plain, prompt(model), params)
    assert got.token_ids[:12] == want.token_ids[:12]
    assert got.timings.num_draft_tokens > 0


def test_penalties_see_accepted_tokens_one_by_one(eager: Engine, plain: Engine, model: Model) -> None:
    params = greedy(repeat_penalty=1.05, repeat_last_n=16)
    assert equal_or_close(ask(eager, prompt(model), params), ask(plain, prompt(model), params))


def test_several_sequences_draft_in_one_step(eager: Engine, plain: Engine, model: Model) -> None:
    texts = [ROWS, ROWS.replace("fox", "cat").replace("dog", "mouse"), ROWS.replace("row", "line")]
    asked = [
        request(str(n), prompt(model, text), greedy(), cache_prompt=False) for n, text in enumerate(texts)
    ]
    got, want = run(eager, *asked), run(plain, *asked)
    assert all(equal_or_close(got[name], want[name]) for name in want)
    assert all(result.timings.num_draft_tokens > 0 for result in got.values())


def test_drafts_are_counted(model: Model) -> None:
    with engine_of(model, n_seq_max=1, n_ctx=1024, **DRAFTING) as engine:
        make_eager(engine)
        timings = ask(engine, prompt(model), greedy()).timings
        stats = engine.stats()
    assert 0 < timings.num_accepted_tokens <= timings.num_draft_tokens
    assert stats.num_draft_tokens_total == timings.num_draft_tokens
    assert stats.num_accepted_tokens_total == timings.num_accepted_tokens
    assert timings.num_output_tokens == 30


def test_a_failed_step_with_drafts_changes_no_answer(model: Model, plain: Engine) -> None:
    with engine_of(model, n_seq_max=1, n_ctx=1024, **DRAFTING) as engine:
        make_eager(engine)
        context, calls = engine.runner._context, iter(range(1000))
        decode = context.decode
        context.decode = lambda batch, **options: (
            2 if 1 < batch.num_tokens < 8 and next(calls) % 2 == 0 else decode(batch, **options)
        )
        got = ask(engine, prompt(model), greedy())
    assert equal_or_close(got, ask(plain, prompt(model), greedy()))


def test_nothing_is_drafted_without_the_setting(plain: Engine, model: Model) -> None:
    assert ask(plain, prompt(model), greedy()).timings.num_draft_tokens == 0
