from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeserve.chat.markdown import MAX_HELD_ROW_CHARS, MAX_HELD_ROWS, MarkdownStyler
from edgeserve.chat.table import lay_out_table
from edgeserve.ink import RESET, Ink, without_colour

BOLD, ITALIC, DIM, CODE = "\x1b[1m", "\x1b[3m", "\x1b[2m", "\x1b[38;5;67m"


def styled(text: str, columns: int = 80, colour: bool = True) -> str:
    styler = MarkdownStyler(Ink(colour), columns)
    return styler.feed(text) + styler.finish()


def in_pieces(text: str, cuts: list[int]) -> str:
    styler = MarkdownStyler(Ink(True), 80)
    bounds = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in pairwise(bounds)]
    return "".join(map(styler.feed, pieces)) + styler.finish()


MARKDOWN = st.text(alphabet="ab *_`#->|\n\\1.~:中", max_size=120)


@given(MARKDOWN, st.lists(st.integers(0, 1000), max_size=8))
def test_where_the_stream_is_cut_changes_nothing(text: str, cuts: list[int]) -> None:
    assert in_pieces(text, cuts) == styled(text)


@given(MARKDOWN.filter(lambda text: "|" not in text))
def test_every_character_stays_in_its_place(text: str) -> None:
    assert without_colour(styled(text)) == text


@given(MARKDOWN)
def test_without_colour_there_are_no_codes_and_the_text_is_the_same(text: str) -> None:
    assert styled(text, colour=False) == without_colour(styled(text))


@given(MARKDOWN)
def test_every_line_ends_without_a_style_left_open(text: str) -> None:
    for line in styled(text).splitlines():
        assert "\x1b[" not in line or line.rindex(RESET) > line.rfind("\x1b[", 0, line.rindex(RESET))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("**b**", f"{DIM}**{RESET}{BOLD}b{RESET}{DIM}**{RESET}"),
        ("*i*", f"{DIM}*{RESET}{ITALIC}i{RESET}{DIM}*{RESET}"),
        ("`c`", f"{DIM}`{RESET}{CODE}c{RESET}{DIM}`{RESET}"),
        ("# T", f"{DIM}#{RESET}{BOLD} T{RESET}"),
        ("> q", f"{DIM}>{RESET} q"),
        ("`**`", f"{DIM}`{RESET}{CODE}**{RESET}{DIM}`{RESET}"),
        ("**open\nnext", f"{DIM}**{RESET}{BOLD}open{RESET}\nnext"),
    ],
)
def test_spans_and_lines_are_styled(text: str, expected: str) -> None:
    assert styled(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "2 * 3 * 4",
        "snake_case_name",
        "x**2 + y**2",
        "* item",
        "- item",
        "12. item",
        "\\*not\\*",
        "#hashtag",
        "---",
        "***",
        "a | b",
        "",
    ],
)
def test_what_only_looks_like_a_mark_is_left_alone(text: str) -> None:
    assert styled(text) == text


def test_a_code_block_is_code_until_its_own_fence() -> None:
    shown = styled("````py\n# no heading\n```\n**no bold**\n````\n**b**\n")
    assert shown == (
        f"{DIM}````py{RESET}\n{CODE}# no heading{RESET}\n{CODE}```{RESET}\n{CODE}**no bold**{RESET}\n"
        f"{DIM}````{RESET}\n{DIM}**{RESET}{BOLD}b{RESET}{DIM}**{RESET}\n"
    )


def test_code_is_shown_while_it_streams() -> None:
    styler = MarkdownStyler(Ink(False))
    assert styler.feed("```py\nx") == "```py\nx"
    assert styler.feed(" = 1") == " = 1"


def test_backticks_around_a_line_of_code_open_no_block() -> None:
    assert styled("```x```\n**b**").endswith(f"{BOLD}b{RESET}{DIM}**{RESET}")


TABLE = "| a | long name |\n|:-:|---:|\n| 中文 | 1 |\n| x\\|y | `c` |\n"
LAID_OUT = "|  a   | long name |\n| :--: | --------: |\n| 中文 |         1 |\n| x\\|y |       `c` |\n"


def test_a_table_is_padded_once_it_ends() -> None:
    styler = MarkdownStyler(Ink(False))
    assert styler.feed(TABLE) == ""
    assert styler.num_held_rows == 4
    assert styler.feed("after") == LAID_OUT + "after"
    assert styler.num_held_rows == 0


def test_a_table_at_the_very_end_is_padded_too() -> None:
    assert styled(TABLE, colour=False) == LAID_OUT
    assert styled(TABLE.removesuffix("\n"), colour=False) == LAID_OUT


@pytest.mark.parametrize(
    ("text", "columns"),
    [
        (TABLE, 19),  # padding would wrap every row
        ("| not a table |\nafter", 80),
        ("| a | b |\n|---|---|\n| 1 | 2 | 3 |\n", 80),  # more cells than columns
        ("| " + "x" * (MAX_HELD_ROW_CHARS + 5), 80),
    ],
)
def test_what_cannot_be_laid_out_is_shown_as_it_came(text: str, columns: int) -> None:
    assert styled(text, columns, colour=False) == text


def test_an_endless_table_is_not_held_for_ever() -> None:
    styler = MarkdownStyler(Ink(False))
    shown = styler.feed("| a |\n|---|\n" + "| 1 |\n" * (MAX_HELD_ROWS - 2))
    assert shown.count("\n") == MAX_HELD_ROWS


def test_laying_out_twice_changes_nothing() -> None:
    assert lay_out_table(LAID_OUT.splitlines(keepends=True), 80) == LAID_OUT.splitlines(keepends=True)
