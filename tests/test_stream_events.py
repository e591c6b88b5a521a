"""SSE bytes to typed events: every framing that a server may choose, cut at every place."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeserve import stream_events
from edgeserve.stream_events import EventKind, SSEDecoder, StreamBrokenError, StreamEvent, read_event

STREAM = (
    ": ping\n\n"
    'data: {"a": "é 漢 🙂"}\n\n'
    "event: message\r\nid: 7\r\ndata: first\r\ndata: second\r\n\r\n"
    "data:no space\r\r"
    ": another\r\n\r\n"
    "data: [DONE]\n\n"
)
EXPECTED = [
    (True, "ping"),
    (False, '{"a": "é 漢 🙂"}'),
    (False, "first\nsecond"),
    (False, "no space"),
    (True, "another"),
    (False, "[DONE]"),
]


def decode(pieces: list[bytes]) -> list[tuple[bool, str]]:
    decoder = SSEDecoder()
    found = [event for piece in pieces for event in decoder.feed(piece)]
    return [*found, *decoder.flush()]


@given(st.lists(st.integers(min_value=0, max_value=len(STREAM.encode())), max_size=12))
def test_events_do_not_depend_on_where_the_bytes_are_cut(cuts: list[int]) -> None:
    raw = STREAM.encode()
    bounds = [0, *sorted(cuts), len(raw)]
    pieces = [raw[start:end] for start, end in pairwise(bounds)]
    assert decode(pieces) == EXPECTED


def test_one_byte_at_a_time() -> None:
    assert decode([bytes([byte]) for byte in STREAM.encode()]) == EXPECTED


def test_a_last_event_without_its_blank_line_still_counts() -> None:
    assert decode([b"data: tail"]) == [(False, "tail")]
    assert decode([b"data: tail\r"]) == [(False, "tail")]
    assert decode([]) == []


def test_an_event_is_delivered_with_the_bytes_that_complete_it() -> None:
    decoder = SSEDecoder()
    assert list(decoder.feed(b"data: x\n")) == []
    assert list(decoder.feed(b"\n")) == [(False, "x")]


def test_a_line_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_events, "MAX_LINE_CHARS", 100)
    with pytest.raises(StreamBrokenError):
        decode([b"data: " + b"x" * 101])
    with pytest.raises(StreamBrokenError):
        decode([b"data: xxxx\n"] * 21)
    assert decode([b"data: xxxx\n\n"] * 21) == [(False, "xxxx")] * 21


def test_a_long_line_in_many_pieces_is_gone_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, taken = SSEDecoder(), []
    take = decoder._take_rest
    monkeypatch.setattr(decoder, "_take_rest", lambda: taken.append(1) or take())
    pieces = [b"data: ", *[b"x" * 9] * 1000, b"\r", b"\n", b"\r\n"]
    assert [event for piece in pieces for event in decoder.feed(piece)] == [(False, "x" * 9000)]
    assert len(taken) == 3


def events(payload: object) -> list[StreamEvent]:
    return list(read_event(payload if isinstance(payload, str) else json.dumps(payload), 1.5))


@pytest.mark.parametrize("data", ["[" * 200_000, "9" * 5000, "{"])
def test_what_cannot_be_read_is_kept_as_text(data: str) -> None:
    (event,) = read_event(data, 1.5)
    assert (event.kind, event.text) == (EventKind.UNKNOWN, data)


def test_numbers_that_are_none() -> None:
    text = '{"choices": [{"index": 1e999, "delta": {"content": "x"}}], "usage": {"completion_tokens": NaN}}'
    output, usage = read_event(text, 1.5)
    assert (output.choice, output.text) == (0, "x")
    assert usage.usage is not None
    assert usage.usage.completion_tokens == 0
    (timings,) = read_event(
        f'{{"timings": {{"predicted_n": {"9" * 400}, "cache_n": -Infinity, "x": NaN}}}}', 1.5
    )
    assert timings.timings is not None
    assert (timings.timings.predicted_n, timings.timings.cache_n, timings.timings.extra) == (0, None, {})


def test_half_a_character_becomes_one_that_can_be_printed_and_sent() -> None:
    (event,) = events(chat({"content": "a\ud83d"}))
    assert event.text == "a\ufffd"
    (event,) = events(chat({"content": "\U0001f600"}))
    assert event.text == "\U0001f600"


def chat(delta: dict[str, object], **more: object) -> dict[str, object]:
    return {"choices": [{"index": 0, "delta": delta, **more}]}


def test_a_role_chunk_carries_no_token() -> None:
    for content in ("", None):
        (event,) = events(chat({"role": "assistant", "content": content}))
        assert (event.kind, event.is_output, event.at_s) == (EventKind.ROLE, False, 1.5)


def test_role_and_first_token_may_come_together() -> None:
    kinds = [event.kind for event in events(chat({"role": "assistant", "content": "Hi"}))]
    assert kinds == [EventKind.ROLE, EventKind.TEXT]


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_reasoning_is_output_and_not_the_answer(field: str) -> None:
    (event,) = events(chat({field: "hm"}))
    assert (event.kind, event.text, event.is_output) == (EventKind.REASONING, "hm", True)


def test_text_completions_are_read_too() -> None:
    (event,) = events({"choices": [{"index": 0, "text": "abc"}]})
    assert (event.kind, event.text) == (EventKind.TEXT, "abc")


def test_tool_calls() -> None:
    call = {"index": 1, "id": "c1", "function": {"name": "look", "arguments": '{"a"'}}
    (event,) = events(chat({"tool_calls": [call]}))
    assert event.is_output
    (delta,) = event.tool_calls
    assert (delta.index, delta.id, delta.name, delta.arguments) == (1, "c1", "look", '{"a"')


def test_finish_usage_and_timings_in_one_chunk() -> None:
    payload = chat({}, finish_reason="length") | {
        "usage": {
            "prompt_tokens": 12,
            "completion_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 8},
            "completion_tokens_details": {"reasoning_tokens": 2},
        },
        "timings": {
            "cache_n": 8,
            "prompt_n": 4,
            "prompt_ms": 20.5,
            "predicted_n": 5,
            "predicted_ms": 60,
            "predicted_per_second": 83.3,
        },
    }
    finish, usage, timings = events(payload)
    assert (finish.kind, finish.text) == (EventKind.FINISH, "length")
    assert usage.usage == stream_events.Usage(12, 5, cached_tokens=8, reasoning_tokens=2)
    assert timings.timings is not None
    assert (timings.timings.prompt_n, timings.timings.cache_n, timings.timings.prompt_ms) == (4, 8, 20.5)
    assert timings.timings.extra == {"predicted_per_second": 83.3}


def test_usage_that_does_not_say_what_was_cached_is_not_taken_for_zero() -> None:
    (event,) = events({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 1}})
    assert event.usage is not None
    assert event.usage.cached_tokens is None
    assert events({"choices": [], "usage": None}) == []


def test_prompt_progress() -> None:
    payload = chat({}) | {"prompt_progress": {"total": 100, "cache": 10, "processed": 60, "time_ms": 40}}
    (event,) = events(payload)
    assert event.progress == stream_events.PromptProgress(100, 10, 60, 40.0)


def test_errors_inside_a_stream() -> None:
    (event,) = events({"error": {"message": "out of cells", "type": "server_error", "code": 500}})
    assert event.kind is EventKind.ERROR
    assert event.error is not None
    assert (event.error.message, event.error.status, event.error.type) == (
        "out of cells",
        500,
        "server_error",
    )
    (plain,) = events({"error": "broken"})
    assert plain.error is not None
    assert plain.error.message == "broken"


def test_the_old_error_field_is_an_error_too() -> None:
    ((is_comment, data),) = decode([b'error: {"message": "bad", "code": 400}\n\n'])
    assert not is_comment
    (event,) = events(data)
    assert event.error is not None
    assert (event.error.message, event.error.status) == ("bad", 400)


@pytest.mark.parametrize("data", ["not json", "[1, 2]", "17", '"text"'])
def test_data_that_is_no_chunk_is_kept_and_not_fatal(data: str) -> None:
    (event,) = events(data)
    assert (event.kind, event.text) == (EventKind.UNKNOWN, data)


@pytest.mark.parametrize(
    "payload", [{"choices": "x"}, {"choices": [None, 3, {"delta": []}]}, {"usage": [1]}, {}]
)
def test_odd_shapes_are_no_events(payload: object) -> None:
    assert events(payload) == []


def test_done() -> None:
    assert [event.kind for event in events("[DONE]")] == [EventKind.DONE]
