"""What is looked up in a sequence's own tokens, and how odds follow what happened."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edgeserve.engine.prompt_lookup import MIN_MATCH, PromptLookup


def lookup(tokens: list[int]) -> PromptLookup:
    made = PromptLookup()
    made.follow(tokens)
    return made


def test_what_followed_the_latest_occurrence() -> None:
    tokens = [1, 2, 3, 4, 5, 9, 1, 2, 3, 6, 7, 8, 1, 2, 3]
    assert lookup(tokens).draft(3) == (6, 7, 8)


def test_a_longer_match_is_worth_more_than_a_later_one() -> None:
    start = [11, 12, 13, 1, 2, 3]
    tokens = [*start, 4, 5, 9, 1, 2, 3, 6, 7, *start]
    assert lookup(tokens).draft(2) == (4, 5)


def test_nothing_without_a_match() -> None:
    made = lookup(list(range(50)))
    assert not made.is_matched
    assert made.draft(4) == ()
    assert made.expected(2) == [0.0, 0.0, 0.0]


def test_a_repetition_goes_on_beyond_what_is_there() -> None:
    assert lookup([7, 8] * 5).draft(5) == (7, 8, 7, 8, 7)


def test_tokens_whose_bytes_only_look_alike_do_not_match() -> None:
    # Little-endian: the middle bytes of these three read as those of the last three, one byte further.
    last = [0x00000001, 0x00000001, 0x00000001]
    shifted = [0x00000100, 0x00000100, 0x00000100, 0x00000100]
    assert not lookup([*shifted, 5, 6, 7, *last]).is_matched


def test_odds_follow_what_happened() -> None:
    tokens = list(range(100, 160))
    good, bad = lookup(tokens[:3]), lookup(tokens[:3])
    repeated = tokens * 3
    for end in range(4, len(repeated)):
        good.follow(repeated[:end])
    assert good.expected(8)[8] > 6
    grown = [1, 2, 3]
    for other in range(200, 260):
        grown += [other, 1, 2, 3]
        bad.follow(list(grown))
    assert bad.is_matched
    assert bad.expected(8)[8] < 0.3


def test_expected_counts_grow_with_the_draft_and_stay_below_it() -> None:
    sums = lookup([1, 2, 3, 4, 5, 6] * 2).expected(10)
    assert sums == sorted(sums)
    assert all(total <= count for count, total in enumerate(sums))


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 8))
def test_a_draft_is_always_a_continuation_found_in_the_text(tokens: list[int], count: int) -> None:
    """However the sequence grew, in whatever pieces."""
    made = PromptLookup()
    for end in range(1, len(tokens) + 1, 1 + len(tokens) % 3):
        made.follow(tokens[:end])
    made.follow(tokens)
    draft = made.draft(count)
    if draft:
        tail = tokens[-MIN_MATCH:]
        starts = [i for i in range(len(tokens) - MIN_MATCH) if tokens[i : i + MIN_MATCH] == tail]
        assert any(tokens[i + MIN_MATCH] == draft[0] for i in starts)
    assert len(draft) in (0, count)
