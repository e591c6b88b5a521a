"""/v1/chat/completions against the real small model."""

from __future__ import annotations

import json
from typing import Any

import pytest
from live_server import N_CTX_SEQ, Live, sse_documents

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "Count from one to ten."}]


def chat(live: Live, **body: Any) -> Any:
    return live.post(CHAT, **{"messages": HI, "max_tokens": 4, "temperature": 0, **body})


def stream(live: Live, **body: Any) -> list[Any]:
    response = live.http.post(
        CHAT, json={"messages": HI, "max_tokens": 4, "temperature": 0, "stream": True, **body}
    )
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return sse_documents(response.text)


def text_of(documents: list[Any], name: str = "content") -> str:
    deltas = [choice["delta"] for document in documents[:-1] for choice in document["choices"]]
    return "".join(delta.get(name) or "" for delta in deltas)


def test_whole_answer(live: Live) -> None:
    answer = chat(live, model="whatever")
    choice = answer["choices"][0]
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert "SmolLM2" in answer["model"]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"]
    assert choice["finish_reason"] == "length"
    usage, timings = answer["usage"], answer["timings"]
    assert usage["completion_tokens"] == timings["predicted_n"] == 4
    assert usage["total_tokens"] == usage["prompt_tokens"] + 4
    assert timings["cache_n"] + timings["prompt_n"] == usage["prompt_tokens"]
    assert timings["decode_ms"] + timings["stalled_ms"] == pytest.approx(timings["predicted_ms"], abs=0.01)


def test_stream_order(live: Live) -> None:
    *chunks, done = stream(live)
    assert done == "[DONE]"
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert all(set(delta) == {"content"} and delta["content"] for delta in deltas[1:-1])
    assert deltas[-1] == {}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + [
        "length"
    ]
    assert "timings" in chunks[-1]
    assert not any("usage" in chunk for chunk in chunks)


def test_the_role_arrives_with_the_first_token(live: Live) -> None:
    body = {"messages": HI, "max_tokens": 2, "temperature": 0, "stream": True}
    with live.http.stream("POST", CHAT, json=body) as response:
        first = next(piece for piece in response.iter_raw() if piece.startswith(b"data:"))
    assert b'"role":"assistant"' in first
    assert first.count(b"data:") >= 2


@pytest.mark.parametrize("wanted", [True, False, None])
def test_usage_chunk_only_when_asked_for(live: Live, wanted: bool | None) -> None:
    options = None if wanted is None else {"include_usage": wanted}
    chunks = stream(live, stream_options=options)[:-1]
    with_usage = [chunk for chunk in chunks if "usage" in chunk]
    assert len(with_usage) == (1 if wanted else 0)
    if wanted:
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["completion_tokens"] == 4
        assert "timings" in chunks[-1]


def test_stream_and_whole_say_the_same(live: Live) -> None:
    assert text_of(stream(live)) == chat(live)["choices"][0]["message"]["content"]


def test_timings_per_token(live: Live) -> None:
    chunks = stream(live, timings_per_token=True)[:-1]
    counts = [chunk["timings"]["predicted_n"] for chunk in chunks if "timings" in chunk]
    assert counts[-1] == 4
    assert counts == sorted(counts)


def test_a_repeated_prompt_is_cached_and_counted_once(live: Live) -> None:
    messages = [{"role": "user", "content": "A prompt of its own for the cache."}]
    first, again = chat(live, messages=messages), chat(live, messages=messages)
    assert first["usage"]["prompt_tokens"] == again["usage"]["prompt_tokens"]
    cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == again["usage"]["prompt_tokens"] - 1
    assert again["timings"]["cache_n"] == cached
    assert again["timings"]["prompt_n"] == 1


def test_nulls_are_absent_fields(live: Live) -> None:
    names = [
        "max_completion_tokens", "top_p", "top_k", "min_p", "seed", "stop", "n", "presence_penalty", "tools",
        "frequency_penalty", "logit_bias", "logprobs", "top_logprobs", "response_format", "stream", "user",
        "stream_options", "tool_choice", "reasoning_effort", "chat_template_kwargs", "model", "ignore_eos",
    ]  # fmt: skip
    message = {"role": "user", "content": "Hi", "name": None, "tool_calls": None, "tool_call_id": None}
    answer = chat(live, messages=[message], **dict.fromkeys(names))
    assert answer["choices"][0]["message"]["content"]


def test_unknown_fields_are_ignored(live: Live) -> None:
    assert chat(live, metadata={"a": [1]}, service_tier="auto", store=True, never_heard_of=1)


def test_content_parts_are_text(live: Live) -> None:
    parts = [{"type": "text", "text": "Count from"}, {"type": "text", "text": "one to ten."}]
    joined = [{"role": "user", "content": "Count from\none to ten."}]
    prompts = [
        live.post("/apply-template", messages=[{"role": "user", "content": parts}]),
        live.post("/apply-template", messages=joined),
    ]
    assert prompts[0] == prompts[1]


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:1/x.png", "http://169.254.169.254/", "data:image/png;base64,"]
)
def test_images_are_refused_and_never_fetched(live: Live, url: str) -> None:
    part = {"type": "image_url", "image_url": {"url": url}}
    error = live.error(CHAT, 400, messages=[{"role": "user", "content": [part]}])
    assert error["param"] == "messages[0].content"
    assert "text only" in error["message"]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"temperature": -1}, "temperature", "between 0 and 100"),
        ({"temperature": 1e6}, "temperature", "between 0 and 100"),
        ({"temperature": "0.5"}, "temperature", "number"),
        ({"top_p": -1}, "top_p", "between 0 and 1"),
        ({"min_p": 2}, "min_p", "between 0 and 1"),
        ({"top_k": 1.5}, "top_k", "integer"),
        ({"repeat_penalty": 0}, "repeat_penalty", "between"),
        ({"max_tokens": 0}, "max_tokens", "between 1"),
        ({"max_tokens": -1}, "max_tokens", "between 1"),
        ({"max_tokens": "5"}, "max_tokens", "integer"),
        ({"max_tokens": True}, "max_tokens", "integer"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens", "differ"),
        ({"n": 0}, "n", "between 1 and"),
        ({"n": 10**6}, "n", "between 1 and"),
        ({"seed": -5}, "seed", "between 0"),
        ({"stop": [""]}, "stop", "empty"),
        ({"stop": ["x"] * 1000}, "stop", "at most"),
        ({"stop": 5}, "stop", "string or a list"),
        ({"logit_bias": {"abc": 1}}, "logit_bias", "token ids"),
        ({"logit_bias": {"99999999": 1}}, "logit_bias", "vocabulary"),
        ({"logit_bias": {str(i): 1 for i in range(2000)}}, "logit_bias", "at most"),
        ({"top_logprobs": 3}, "top_logprobs", "needs logprobs"),
        ({"logprobs": True, "top_logprobs": 50}, "logprobs", "between"),
        ({"messages": []}, "messages", "empty"),
        ({"messages": "hi"}, "messages", "list"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role", "'user'"),
        ({"messages": [{"role": "user", "content": [{"type": "tune"}]}]}, "messages[0].content", "not known"),
        ({"messages": [{"role": "user", "content": "x"}] * 10_000}, "messages", "at most"),
        ({"continue_final_message": True}, "continue_final_message", "role assistant"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "not support"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not support"),
        ({"grammar": "root ::= x"}, "grammar", "not support"),
    ],
)
def test_what_cannot_be_is_refused_by_name(live: Live, body: dict[str, Any], param: str, words: str) -> None:
    error = live.error(CHAT, 400, **{"messages": HI, **body})
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert words in error["message"]


def test_both_names_of_the_cap(live: Live) -> None:
    assert chat(live, max_tokens=None, max_completion_tokens=3)["usage"]["completion_tokens"] == 3
    assert chat(live, max_tokens=3, max_completion_tokens=3)["usage"]["completion_tokens"] == 3


def test_a_huge_cap_is_cut_to_what_fits(live: Live) -> None:
    answer = chat(live, max_tokens=1e9, stop=["cat"], logit_bias={"2644": 100})
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_too_long_a_prompt_is_refused_with_both_counts(live: Live) -> None:
    messages = [{"role": "user", "content": "word " * (N_CTX_SEQ + 100)}]
    for stream in (False, True):
        error = live.error(CHAT, 400, messages=messages, stream=stream)
        assert error["code"] == "context_length_exceeded"
        assert error["n_ctx"] == N_CTX_SEQ
        assert error["n_prompt_tokens"] > N_CTX_SEQ


def test_several_choices(live: Live) -> None:
    answer = chat(live, n=2, temperature=1.5, seed=7, max_tokens=12)
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert texts[0] != texts[1]
    assert answer["usage"]["completion_tokens"] <= 24
    single = chat(live, n=1, temperature=1.5, seed=7, max_tokens=12)
    assert answer["usage"]["prompt_tokens"] == single["usage"]["prompt_tokens"]


def test_several_choices_streamed(live: Live) -> None:
    chunks = stream(live, n=2)[:-1]
    for index in (0, 1):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert [choice["finish_reason"] for choice in mine if choice["finish_reason"]] == ["length"]


def test_logprobs_stream_and_whole(live: Live) -> None:
    answer = chat(live, logprobs=True, top_logprobs=2)
    entries = answer["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == answer["choices"][0]["message"]["content"]
    for entry in entries:
        assert entry["token"] == entry["top_logprobs"][0]["token"]
        assert entry["logprob"] <= 0
        assert bytes(entry["bytes"]).decode() == entry["token"]
        assert len(entry["top_logprobs"]) == 2
    chunks = stream(live, logprobs=True, top_logprobs=2)[:-1]
    streamed = [
        entry
        for chunk in chunks
        if chunk["choices"][0]["logprobs"]
        for entry in chunk["choices"][0]["logprobs"]["content"]
    ]
    assert [entry["id"] for entry in streamed] == [entry["id"] for entry in entries]
    assert chunks[-1]["choices"][0]["logprobs"] is None


def test_logprobs_only_when_asked_for(live: Live) -> None:
    assert chat(live)["choices"][0]["logprobs"] is None


def test_logit_bias_forces_a_token(live: Live) -> None:
    [token] = live.post("/tokenize", content=" cat")["tokens"]
    for bias in ({str(token): 100}, [[token, 100]]):
        assert chat(live, logit_bias=bias, max_tokens=3)["choices"][0]["message"]["content"] == " cat cat cat"


def test_an_answer_begun_is_continued(live: Live) -> None:
    messages = [*HI, {"role": "assistant", "content": "one, two, three,"}]
    prompt = live.post("/apply-template", messages=messages)["prompt"]
    assert prompt.endswith("<|im_start|>assistant\none, two, three,")
    content = chat(live, messages=messages)["choices"][0]["message"]["content"]
    assert content.startswith(" four")


def test_an_answer_begun_is_left_alone_on_request(live: Live) -> None:
    messages = [*HI, {"role": "assistant", "content": "one,"}]
    prompt = live.post("/apply-template", messages=messages, continue_final_message=False)["prompt"]
    assert prompt.endswith("one,<|im_end|>\n<|im_start|>assistant\n")


def test_developer_is_another_word_for_system(live: Live) -> None:
    prompts = [
        live.post("/apply-template", messages=[{"role": role, "content": "Be brief."}, *HI])["prompt"]
        for role in ("system", "developer")
    ]
    assert prompts[0] == prompts[1]
    assert "Be brief." in prompts[0]


def test_reasoning_stands_apart(live: Live) -> None:
    messages = [*HI, {"role": "assistant", "content": "<think>\nLet me count: one, two,"}]
    message = chat(live, messages=messages)["choices"][0]["message"]
    assert message["content"] == ""
    assert message["reasoning_content"]
    documents = stream(live, messages=messages)
    assert text_of(documents, "reasoning_content") == message["reasoning_content"]
    assert text_of(documents) == ""


def test_reasoning_inline_on_request(live: Live) -> None:
    messages = [*HI, {"role": "assistant", "content": "<think>\nLet me count: one, two,"}]
    message = chat(live, messages=messages, reasoning_format="none")["choices"][0]["message"]
    assert message["content"]
    assert "reasoning_content" not in message


def test_reasoning_tokens_are_counted(live: Live) -> None:
    messages = [*HI, {"role": "assistant", "content": "<think>\nLet me count: one, two,"}]
    usage = chat(live, messages=messages)["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == usage["completion_tokens"] == 4


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5])
def test_cut_characters_are_still_valid_json(live: Live, max_tokens: int) -> None:
    # Token 229 and its like are single bytes of longer characters.
    raw = [token for token in range(49152) if is_half(live, token)][:6]
    bias = {str(token): 50 for token in raw}
    answer = chat(live, logit_bias=bias, max_tokens=max_tokens, temperature=1, seed=1, logprobs=True)
    assert answer["usage"]["completion_tokens"] == max_tokens
    assert json.dumps(answer)
    documents = stream(live, logit_bias=bias, max_tokens=max_tokens, temperature=1, seed=1)
    assert text_of(documents) == answer["choices"][0]["message"]["content"]


def is_half(live: Live, token: int) -> bool:
    assert live.state.serving is not None
    raw = live.state.serving.model.piece(token)
    return len(raw) == 1 and raw[0] >= 0xC0


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b'{"temperature": NaN, "messages": []}',
        b'{"temperature": Infinity, "messages": []}',
        b"[" * 100_000,
        b'{"messages": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"messages": "\xff"}',
        b'{"messages": "\\ud800"}',
        b'{"seed": ' + b"9" * 10_000 + b"}",
    ],
)
def test_bodies_that_are_not_json(live: Live, raw: bytes) -> None:
    response = live.http.post(CHAT, content=raw, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["code"] == "invalid_json"


def test_infinity_by_overflow_is_out_of_range(live: Live) -> None:
    raw = b'{"temperature": 1e999, "messages": [{"role": "user", "content": "x"}]}'
    response = live.http.post(CHAT, content=raw, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "temperature"


def test_aliases_without_a_version(live: Live) -> None:
    assert live.post("/chat/completions", messages=HI, max_tokens=1)["object"] == "chat.completion"
