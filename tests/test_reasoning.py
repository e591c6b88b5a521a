"""Reasoning and answer come out the same, however the text is cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeserve.reasoning import (
    CHANNELS,
    THINK,
    ReasoningStyle,
    Splitter,
    held_suffix,
    splitter_of_any,
    style_of,
)

HARMONY_START = "<|start|>assistant"


def split(splitter: Splitter, pieces: list[str]) -> tuple[str, str]:
    parts = [part for piece in pieces for part in splitter.feed(piece)] + splitter.flush()
    reasoning = "".join(part.text for part in parts if part.is_reasoning)
    return reasoning, "".join(part.text for part in parts if not part.is_reasoning)


CASES = [
    ("<think>\nLet me see. \n</think>\n\nIt is 4.", "", "Let me see.", "It is 4."),
    ("  \n<think>a</think>b", "", "a", "b"),
    ("No reasoning <think>here</think>.", "", "", "No reasoning <think>here</think>."),
    ("<thin", "", "", "<thin"),
    ("hm </think> yes </think> no", "<|im_start|>assistant\n<think>\n", "hm", "yes </think> no"),
    ("answer", "<think>\n\n</think>\n\n", "", "answer"),
    ("<think>never closed  ", "", "never closed", ""),
    ("<think>a < b </thin b</think>c", "", "a < b </thin b", "c"),
    ("", "", "", ""),
]


@pytest.mark.parametrize(("text", "prompt_end", "reasoning", "answer"), CASES)
def test_tags(text: str, prompt_end: str, reasoning: str, answer: str) -> None:
    assert split(THINK.splitter(prompt_end), [text]) == (reasoning, answer)
    assert split(THINK.splitter(prompt_end), list(text)) == (reasoning, answer)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>a < b</think>\n\nanswer", ("a < b", "answer")),
        ("\n<think>\nhm</think>answer", ("hm", "answer")),
        ("[THINK]hm[/THINK]answer", ("hm", "answer")),
        ("<thinking>hm </think> on</thinking>answer", ("hm </think> on", "answer")),
        ("<seed:think>hm</seed:think>answer", ("hm", "answer")),
        ("<|START_THINKING|>hm<|END_THINKING|>answer", ("hm", "answer")),
        ("<think></think>answer", ("", "answer")),
        ("<think>never closed", ("never closed", "")),
        ("say <think> aloud", ("", "say <think> aloud")),
        ("opened by the prompt</think>answer", ("", "opened by the prompt</think>answer")),
        ("<thin", ("", "<thin")),
        ("<b>bold</b>", ("", "<b>bold</b>")),
        ("  indented", ("", "  indented")),
        (" \n", ("", " \n")),
    ],
)
def test_where_the_template_is_not_known_the_text_tells(text: str, expected: tuple[str, str]) -> None:
    assert split(splitter_of_any(), [text]) == expected
    assert split(splitter_of_any(), list(text)) == expected
    for cut in range(len(text)):
        assert split(splitter_of_any(), [text[:cut], text[cut:]]) == expected


CHANNEL_CASES = [
    (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Four.<|return|>",
        "Hm.",
        "Four.",
    ),
    ("<|channel|>final<|message|>Just so <|a|>.", "", "Just so <|a|>."),
    ("<|channel|>analysis<|message|>cut off", "cut off", ""),
    ("no header at all", "", "no header at all"),
]


@pytest.mark.parametrize(("text", "reasoning", "answer"), CHANNEL_CASES)
def test_channels(text: str, reasoning: str, answer: str) -> None:
    assert split(CHANNELS.splitter(HARMONY_START), [text]) == (reasoning, answer)
    assert split(CHANNELS.splitter(HARMONY_START), list(text)) == (reasoning, answer)


def test_channels_know_a_prompt_that_has_chosen_one() -> None:
    splitter = CHANNELS.splitter("<|start|>assistant<|channel|>final<|message|>")
    assert split(splitter, ["Four."]) == ("", "Four.")


@given(
    text=st.text(alphabet="<>/think \na", max_size=60).map(lambda text: text.replace("a", "</think>")),
    cuts=st.lists(st.integers(0, 400), max_size=12),
    starts_open=st.booleans(),
)
def test_cuts_do_not_matter(text: str, cuts: list[int], starts_open: bool) -> None:
    prompt_end = "<think>" if starts_open else ""
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[start:end] for start, end in pairwise(edges)]
    assert split(THINK.splitter(prompt_end), pieces) == split(THINK.splitter(prompt_end), [text])
    assert split(splitter_of_any(), pieces) == split(splitter_of_any(), [text])


@pytest.mark.parametrize(
    ("template", "style"),
    [
        ("... <|channel|>analysis<|message|> ...", CHANNELS),
        ("... [THINK]{{ reasoning }}[/THINK]", ReasoningStyle("[THINK]", "[/THINK]")),
        ("{{ content.split('</think>')[-1] }}", THINK),
        ("{{ messages }}", THINK),
    ],
)
def test_the_template_tells_the_style(template: str, style: ReasoningStyle) -> None:
    assert style_of(template) == style


@pytest.mark.parametrize(
    ("text", "held"), [("abc<", 1), ("abc</thi", 5), ("abc</think>", 0), ("", 0), ("x", 0)]
)
def test_held_suffix(text: str, held: int) -> None:
    assert held_suffix(text, ("</think>",)) == held
