"""Which drafts are chosen, on machines whose step costs are known."""

from __future__ import annotations

import random

import pytest

from edgeserve.engine.drafter import Drafter
from edgeserve.engine.request import Request, Sequence
from edgeserve.engine.sampling_params import SamplingParams

REPEATED = list(range(100, 140))


def sequence(name: str, tokens: list[int], max_tokens: int = 5000) -> Sequence:
    return Sequence(Request(name, tuple(tokens), SamplingParams(), 0.0), max_tokens)


def play(
    drafter: Drafter,
    texts: dict[str, list[int]],
    num_steps: int,
    row_cost: float,
    noise: random.Random | None = None,
) -> tuple[float, dict[str, int]]:
    """Steps in which sequences come to hold the given texts; returns the time in plain steps, and how many
    tokens each got."""
    sequences = {name: sequence(name, text[:40]) for name, text in texts.items()}
    total, start = 0.0, dict.fromkeys(texts, 40)
    for _ in range(num_steps):
        drafts = drafter.propose(list(sequences.values()), 64)
        accepted = {}
        for name, item in sequences.items():
            rest = texts[name][item.num_tokens :]
            draft = drafts.get(name, ())
            right = 0
            while right < len(draft) and draft[right] == rest[right]:
                right += 1
            item.token_ids += rest[: right + 1]
            accepted[name] = right
        num_drafted = sum(map(len, drafts.values()))
        duration = 1 + row_cost * num_drafted
        if noise:
            duration *= noise.choice((0.9, 1.0, 1.0, 1.0, 1.1, 1.6))
        drafter.observe(accepted, num_drafted, duration)
        total += duration
    return total, {name: item.num_tokens - start[name] for name, item in sequences.items()}


def unrepeated(seed: int, length: int = 20_000) -> list[int]:
    """Text in which short runs do come back, as in prose, but what follows them is another thing."""
    rng = random.Random(seed)
    return [rng.choice((1, 2, 3, rng.randrange(4, 400))) for _ in range(length)]


@pytest.mark.parametrize("row_cost", [0.02, 0.1, 0.3])
def test_repetitive_text_is_faster_where_rows_are_cheap(row_cost: float) -> None:
    total, got = play(Drafter(16), {"a": REPEATED * 500}, 400, row_cost)
    assert got["a"] / total > {0.02: 6, 0.1: 3, 0.3: 2}[row_cost]


def test_rows_that_cost_as_much_as_steps_are_given_up() -> None:
    total, got = play(Drafter(16), {"a": REPEATED * 500}, 400, row_cost=1.1)
    assert got["a"] / total > 0.97


@pytest.mark.parametrize("row_cost", [0.02, 0.2, 0.6, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_text_without_repetition_loses_at_most_three_percent(row_cost: float, seed: int) -> None:
    total, got = play(Drafter(16), {"a": unrepeated(seed)}, 400, row_cost, random.Random(seed))
    plain, plain_got = play(Drafter(0), {"a": unrepeated(seed)}, 400, row_cost, random.Random(seed))
    assert (got["a"] / total) / (plain_got["a"] / plain) > 0.97


def test_a_neighbour_without_drafts_loses_next_to_nothing() -> None:
    texts = {"a": REPEATED * 500, "b": unrepeated(1)}
    total, got = play(Drafter(16), texts, 400, row_cost=0.3)
    assert got["b"] / total > 0.96
    total, got = play(Drafter(16), texts, 400, row_cost=0.002)
    assert got["a"] / total > 2
    assert got["b"] / total > 0.96


def test_drafts_stay_within_the_cap_and_the_room() -> None:
    drafter = Drafter(16)
    item = sequence("a", REPEATED * 3, max_tokens=4)
    drafter.observe({"a": 0}, 0, 1.0)
    draft = drafter.propose([item], 64)["a"]
    assert draft == tuple(REPEATED[: len(draft)])
    assert 1 <= len(draft) <= 3
    assert all(len(draft) <= 2 for draft in drafter.propose([item], 2).values())
    assert drafter.propose([item], 0) == {}
    item.token_ids += REPEATED[:3]
    assert drafter.propose([item], 64) == {}


def test_a_plain_step_comes_first_and_now_and_then() -> None:
    drafter = Drafter(16)
    item = sequence("a", REPEATED * 3)
    assert drafter.propose([item], 64) == {}
    kinds = []
    for _ in range(100):
        drafts = drafter.propose([item], 64)
        size = len(drafts.get("a", ()))
        text = REPEATED * 3
        item.token_ids += [text[item.num_tokens % 40 + i] for i in range(size + 1)]
        drafter.observe({"a": size}, size, 1 + 0.05 * size)
        kinds.append(size > 0)
    assert 90 <= sum(kinds) < 100


def test_what_has_ended_is_forgotten() -> None:
    drafter = Drafter(16)
    item = sequence("a", REPEATED * 3)
    drafter.propose([item], 64)
    drafter.forget(item)
    assert not drafter._accounts
