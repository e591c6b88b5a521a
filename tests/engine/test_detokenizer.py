"""Text as it comes: whole characters, and nothing of a stop string, however the tokens cut them."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeserve.engine.detokenizer import Detokenizer


def stream(pieces: list[bytes], stop: tuple[str, ...] = ()) -> tuple[list[str], str | None]:
    detokenizer = Detokenizer(stop)
    texts = []
    for piece in pieces:
        texts.append(detokenizer.feed(piece))
        if detokenizer.stop_string is not None:
            break
    texts.append(detokenizer.finish())
    return texts, detokenizer.stop_string


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(at % (len(data) + 1) for at in cuts), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


@given(st.text(), st.lists(st.integers(min_value=0), max_size=8))
def test_any_cut_of_the_bytes_gives_the_same_text(text: str, cuts: list[int]) -> None:
    data = text.encode("utf-8", "replace")
    texts, _ = stream(cut(data, cuts))
    assert "".join(texts) == data.decode("utf-8")
    assert not any("�" in part for part in texts if "�" not in text)


@given(
    st.text(alphabet="abc", max_size=30),
    st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(min_value=0), max_size=8),
)
def test_text_ends_before_the_first_stop_and_none_of_it_leaks(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    texts, hit = stream(cut(text.encode(), cuts), tuple(stops))
    first = min((at for at in (text.find(stop) for stop in stops) if at >= 0), default=None)
    shown = "".join(texts)
    if first is None:
        assert (shown, hit) == (text, None)
    else:
        assert hit in stops
        assert not any(stop in shown for stop in stops)
        assert text.startswith(shown)


def test_half_a_character_is_held_back() -> None:
    texts, _ = stream([b"\xf0\x9f", b"\x98", b"\x80!"])
    assert texts == ["", "", "😀!", ""]


def test_a_character_cut_by_the_end_becomes_the_replacement_character() -> None:
    assert "".join(stream([b"ok \xe4\xbd"])[0]) == "ok �"


def test_invalid_bytes_do_not_hold_back_what_follows() -> None:
    assert stream([b"a\xffb"])[0] == ["a�b", ""]


def test_a_stop_over_three_tokens() -> None:
    assert stream([b"Hello", b" wo", b"rl", b"d and on"], (" world",)) == (
        ["Hello", "", "", "", ""],
        " world",
    )


def test_a_stop_that_did_not_come_is_shown_at_once() -> None:
    assert stream([b"Hello", b" wo", b"n"], (" world",))[0] == ["Hello", "", " won", ""]


@pytest.mark.parametrize("stops", [("ab", "abc"), ("abc", "ab")])
def test_the_stop_that_begins_first_wins(stops: tuple[str, ...]) -> None:
    assert stream([b"x", b"abc"], (*stops, "c"))[1] == "abc"


def test_held_text_comes_out_at_the_end() -> None:
    assert stream([b"almost STO"], ("STOP",))[0] == ["almost ", "STO"]
