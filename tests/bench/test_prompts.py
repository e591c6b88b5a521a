"""Prompts: cold from their first character, of the wanted length, shared exactly as far as asked."""

from __future__ import annotations

from bench_mock import common

from edgeserve.bench.prompts import Calibration, PromptMaker, with_answer
from edgeserve.bench.workload import Planned


def text(maker: PromptMaker, planned: Planned) -> list[str]:
    return " ".join(message["content"] for message in maker.messages(planned)).split()


def test_no_two_prompts_share_their_beginning() -> None:
    maker, other_run = PromptMaker(0, "run1"), PromptMaker(0, "run2")
    plans = [Planned(index, 50, 4) for index in range(20)]
    prompts = [text(made_by, plan) for made_by in (maker, other_run) for plan in plans]
    assert len({prompt[0] for prompt in prompts}) == 40
    # Not even a few characters: behind a common start, tokens could be reused.
    assert len({prompt[0][:6] for prompt in prompts}) == 40


def test_the_same_seed_asks_the_same_words_in_every_run() -> None:
    plan = Planned(3, 50, 4)
    one, other = text(PromptMaker(0, "run1"), plan), text(PromptMaker(0, "run2"), plan)
    assert one[1:] == other[1:]
    assert text(PromptMaker(1, "run1"), plan)[1:] != one[1:]


def test_a_shared_prefix_is_shared_to_its_end_and_no_further() -> None:
    maker = PromptMaker(0, "salt")
    one, other = (text(maker, Planned(index, 140, 4, shared_prefix_tokens=100)) for index in (0, 1))
    assert 100 <= common(one, other) <= 103
    assert len(one) - common(one, other) >= 40


def test_blocks_of_a_trace_are_shared_by_their_ids() -> None:
    maker = PromptMaker(0, "salt")
    one = text(maker, Planned(0, 1500, 4, block_ids=(7, 8, 9)))
    other = text(maker, Planned(1, 1500, 4, block_ids=(7, 8, 10)))
    assert 1024 <= common(one, other) <= 1030
    assert len(one) == len(other) == 1501


def test_length_follows_the_servers_own_count() -> None:
    calibration = Calibration.from_counts((20, 50), (220, 350))
    assert (calibration.tokens_per_word, calibration.overhead_tokens) == (1.5, 20)
    words = calibration.num_words(320)
    assert words == 200
    prompt = text(PromptMaker(0, "s", calibration), Planned(0, 320, 4))
    assert len(prompt) == words + 1


def test_a_server_that_counts_nothing_leaves_one_token_a_word() -> None:
    assert Calibration.from_counts((20, 0), (220, 0)) == Calibration()
    assert Calibration().num_words(0) == 1


def test_a_template_without_a_system_role_gets_none() -> None:
    messages = PromptMaker(0, "s", has_system_role=False).messages(Planned(0, 30, 4))
    assert [message["role"] for message in messages] == ["user"]


def test_the_next_turn_begins_with_everything_before_it() -> None:
    first = PromptMaker(0, "s").messages(Planned(0, 30, 4))
    second = with_answer(first, "an answer", "a question")
    assert second[: len(first)] == first
    assert [message["role"] for message in second[len(first) :]] == ["assistant", "user"]
