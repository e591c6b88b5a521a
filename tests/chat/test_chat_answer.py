from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from edgeserve.chat.answer import Answer, Figures, TokenTime, figures_of
from edgeserve.chat.figures import Totals, figures_lines, progress_text, token_time_lines
from edgeserve.ink import Ink, without_colour
from edgeserve.stream_events import EventKind, PromptProgress, StreamEvent, Timings, Usage

PLAIN = Ink(False)


def timings(n: int, ms: float, **extra: int) -> StreamEvent:
    fields = {"cache_n": 290, "prompt_n": 28, **extra}
    return StreamEvent(
        EventKind.TIMINGS,
        0.0,
        timings=Timings(prompt_ms=212.0, predicted_n=n, predicted_ms=ms, extra={}, **fields),
    )


def text(at_s: float, piece: str) -> StreamEvent:
    return StreamEvent(EventKind.TEXT, at_s, text=piece)


def answer_of(*events: StreamEvent) -> Answer:
    answer = Answer(sent_s=10.0)
    for event in events:
        answer.take(event)
    answer.finish()
    return answer


def line(answer: Answer, n_ctx: int | None = 4096, columns: int = 200) -> list[str]:
    return figures_lines(figures_of(answer), n_ctx, PLAIN, columns)


@pytest.mark.parametrize("cuts", [(), (3, 10, 18, 19), range(40)])
def test_reasoning_that_a_server_leaves_in_its_text_is_split_off(cuts) -> None:
    whole = "<think>\nLet me see.\n</think>\n\nIt is 4."
    edges = [0, *(cut for cut in cuts if 0 < cut < len(whole)), len(whole)]
    answer = answer_of(*(text(10.1, whole[start:end]) for start, end in pairwise(edges)))
    assert (answer.reasoning, answer.text) == ("Let me see.", "It is 4.")


def test_reasoning_that_a_server_has_split_off_stays_so() -> None:
    reasoning = StreamEvent(EventKind.REASONING, 10.1, text="Hm, <think>?")
    answer = answer_of(reasoning, text(10.2, "\n\n"), text(10.3, "Four, by <think>."))
    assert (answer.reasoning, answer.text) == ("Hm, <think>?", "Four, by <think>.")


def test_a_stopped_answer_keeps_what_was_held_back() -> None:
    assert answer_of(text(10.1, "<thi")).text == "<thi"
    assert answer_of(text(10.1, "<think>never clo</th")).reasoning == "never clo</th"


def test_the_servers_figures_and_the_clients_ttft() -> None:
    answer = answer_of(text(10.25, "a"), text(10.3, "b"), timings(93, 92 * 13.4, prompt_n=318, cache_n=0))
    assert line(answer) == [
        "prompt 318   ttft 250 ms   prefill 1,500 tok/s   "
        "decode 13.4 ms/token  74.6 tok/s   context 411/4,096"
    ]


def test_decode_time_is_per_token_after_the_first() -> None:
    assert figures_of(answer_of(text(10.1, "a"), timings(5, 40.0))).tpot_s == pytest.approx(0.010)
    assert figures_of(answer_of(text(10.1, "a"), timings(1, 0.0))).tpot_s is None


def test_waiting_for_others_shows_once_it_is_felt() -> None:
    waits = {"queue_ms": 1240.0, "stalled_ms": 400.0}
    extra = Timings(0, 20, 100.0, 10, 900.0, extra=waits)
    event = StreamEvent(EventKind.TIMINGS, 0.0, timings=extra)
    (shown,) = line(answer_of(text(11.4, "a"), event))
    assert "   queued 1,240 ms   stalled 400 ms   context" in shown
    short = replace(extra, extra={"queue_ms": 20.0, "stalled_ms": 3.0})
    (shown,) = line(answer_of(text(11.4, "a"), replace(event, timings=short)))
    assert "queued" not in shown and "stalled" not in shown


def test_one_evaluated_token_has_no_rate() -> None:
    (shown,) = line(answer_of(text(10.015, "a"), timings(1, 0.0, cache_n=14, prompt_n=1)), None)
    assert shown == "prompt 15 (14 cached)   ttft 15.0 ms   prefill 1 evaluated   decode n/a   context 16"


def test_usage_alone_gives_what_the_client_saw() -> None:
    usage = StreamEvent(EventKind.USAGE, 11.0, usage=Usage(100, 11))
    answer = answer_of(*(text(10.5 + 0.02 * index, "w") for index in range(11)), usage)
    assert line(answer) == [
        "prompt 100   ttft 500 ms   prefill n/a   decode 20.0 ms/token  50.0 tok/s   context 111/4,096"
    ]


def test_all_output_in_one_piece_has_no_decode_time() -> None:
    usage = StreamEvent(EventKind.USAGE, 11.0, usage=Usage(100, 11))
    assert figures_of(answer_of(text(10.5, "all of it"), usage)).tpot_s is None


def test_a_stopped_prefill_knows_only_its_prompt() -> None:
    progress = StreamEvent(EventKind.PROGRESS, 10.1, progress=PromptProgress(3120, 120, 620, 500.0))
    assert figures_of(answer_of(progress)) == Figures(None, 3120, 120, 3000)
    assert figures_of(answer_of()) == Figures()


def test_a_narrow_terminal_breaks_between_figures() -> None:
    lines = line(answer_of(text(10.25, "a"), timings(93, 92 * 13.4)), columns=60)
    assert len(lines) == 2 and max(map(len, lines)) <= 60
    assert lines[1].startswith("decode")


def test_colours_change_no_word() -> None:
    answer = answer_of(text(10.25, "a"), timings(93, 92 * 13.4))
    coloured = figures_lines(figures_of(answer), 4096, Ink(True), 200)
    assert [without_colour(shown) for shown in coloured] == line(answer)
    assert "\x1b[38;5;136mprefill" in coloured[0] and "\x1b[38;5;30mdecode" in coloured[0]
    assert "\x1b[2;38;5;136m (290 cached)" in coloured[0]


def test_each_tokens_time_is_the_servers_where_it_says() -> None:
    answer = answer_of(
        text(10.2, "The"),
        timings(1, 0.0),
        text(10.3, " quick\n"),
        timings(2, 13.0),
        text(10.4, "中文"),
        timings(4, 40.0),
    )
    assert answer.server_times == [
        TokenTime("The", 1, 0.0),
        TokenTime(" quick\n", 1, pytest.approx(0.013)),
        TokenTime("中文", 2, pytest.approx(0.027)),
    ]
    shown = token_time_lines(answer.server_times, 0.2, "server", PLAIN, 80)
    assert shown[1:] == [
        "  200 ms The              13.0 ·quick↵          27.0 ×2 中文",
        "n 1   p50 13.0 ms   p90 13.0 ms   longest 27.0 ms (number 3)",
    ]
    assert [round(time.time_s, 3) for time in answer.client_times] == [0.2, 0.1, 0.1]


def test_nothing_to_list_is_no_list() -> None:
    assert token_time_lines([], None, "client", PLAIN, 80) == []


@pytest.mark.parametrize(
    ("progress", "age_s", "shown"),
    [
        ((3120, 0, 1240, 4000.0), 0.0, "prefill 1,240 of 3,120 tokens (40 %), 6 s left"),
        ((3120, 0, 1240, 4000.0), 3.0, "prefill 1,240 of 3,120 tokens (40 %), 3 s left"),
        ((3120, 0, 1240, 4000.0), 60.0, "prefill 1,240 of 3,120 tokens (40 %)"),
        ((3120, 1240, 1240, 1.0), 0.0, "prefill 1,240 of 3,120 tokens (40 %)"),  # nothing measured yet
        ((3120, 24, 24, 0.0), 3.2, "prefill 24 of 3,120 tokens (1 %), for 3 s"),
        ((0, 0, 0, 0.0), 0.0, "prefill 0 of 0 tokens (100 %)"),
    ],
)
def test_progress_in_words(progress: tuple[int, int, int, float], age_s: float, shown: str) -> None:
    assert progress_text(PromptProgress(*progress), age_s) == shown


def test_totals_of_a_chat() -> None:
    totals = Totals()
    assert totals.lines(PLAIN) == ["No answer yet."]
    for _ in range(2):
        totals.add(figures_of(answer_of(text(10.2, "a"), timings(11, 100.0))))
    assert totals.lines(PLAIN) == [
        "answers   2",
        "prefill   56 tokens evaluated, 580 cached   424 ms   132 tok/s",
        "decode    22 tokens   200 ms   100 tok/s",
        "time      68 % prefill, 32 % decode",
    ]
