"""Every event of every protocol, to the letter, and by the official client's own strict types."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest
from conftest import Serve
from live_server import Live
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel
from transcripts import Reply, Transcript, differences, load, perform, sse

STRICT_TYPES: dict[str, type[BaseModel]] = {
    "chat.completion": ChatCompletion,
    "chat.completion.chunk": ChatCompletionChunk,
    "text_completion": Completion,
    "model": Model,
}


def cases(*names: str) -> list[Any]:
    return [pytest.param(item, id=f"{name}: {item.name}") for name in names for item in load(name)]


def parse_strictly(reply: Reply) -> None:
    """Every document that openai-python has a type for, by that type, without any leniency."""
    for document in reply.documents:
        if isinstance(document, dict) and (kind := STRICT_TYPES.get(document.get("object", ""))):
            if kind is Completion:
                document = _with_finish_reasons(document)
            kind.model_validate_json(json.dumps(document), strict=True)


def _with_finish_reasons(document: dict[str, Any]) -> dict[str, Any]:
    """The client's type has no room for the null that OpenAI's own pieces of a text completion carry."""
    choices = [
        {**choice, "finish_reason": choice["finish_reason"] or "stop"} for choice in document["choices"]
    ]
    return {**document, "choices": choices}


@pytest.mark.parametrize("transcript", cases("chat", "completions", "native", "errors", "info"))
def test_transcript(live: Live, transcript: Transcript) -> None:
    live.wait_until_idle()
    reply = perform(live.http, transcript)
    assert differences(transcript, reply) == []
    parse_strictly(reply)


def test_transcripts_of_a_server_with_a_key(serve: Serve) -> None:
    locked = serve(api_keys=("secret",))
    for transcript in load("auth"):
        assert (transcript.name, differences(transcript, perform(locked.http, transcript))) == (
            transcript.name,
            [],
        )


def test_a_cached_prompt_is_told_as_such(live: Live) -> None:
    """Cached tokens are a part of the prompt's in usage and stand apart in timings."""
    body = {"messages": [{"role": "user", "content": "Only here."}], "max_tokens": 1, "temperature": 0}
    live.post("/v1/chat/completions", **body)
    again = live.post("/v1/chat/completions", **body)
    usage, timings = again["usage"], again["timings"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == timings["cache_n"] == usage["prompt_tokens"] - 1
    assert timings["prompt_n"] == 1
    assert usage["total_tokens"] == usage["prompt_tokens"] + 1


def test_framing_is_checked_strictly() -> None:
    """The reader that the transcripts rely on does not let a sloppy stream pass."""
    assert list(sse(b': ping\n\ndata: {"a":1}\n\ndata: [DONE]\n\n')) == [{"a": 1}, "[DONE]"]
    for broken in (b"data: {}\n", b"data: {}\r\n\r\n", b"event: x\ndata: {}\n\n", b"data: {}\ndata: {}\n\n"):
        with pytest.raises(AssertionError):
            list(sse(broken))


@pytest.mark.parametrize(
    ("want", "got", "place"),
    [
        ({"a": 1}, {"a": True}, "body.a"),
        ({"a": "<id>"}, {"a": 5}, "body.a"),
        ({"a": ["<id>", "<id>"]}, {"a": ["x", "y"]}, "body.a[1]"),
        ({"a": 1}, {"a": 1, "b": 2}, "body.b"),
        ({"a": 1, "b": 2}, {"a": 1}, "body.b"),
        ({"a": []}, {"a": [1]}, "body.a"),
        ({"t": "<timings>"}, {"t": {"cache_n": 0}}, "body.t.prompt_n"),
    ],
)
def test_differences_are_found(want: Any, got: Any, place: str) -> None:
    transcript = Transcript("x", "", {}, body=want)
    [first, *_] = differences(transcript, Reply(200, httpx2.Headers(), [got]))
    assert first.startswith(f"{place}:")
