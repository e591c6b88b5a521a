"""/v1/completions and llama.cpp's native /completion, and the text tools, against the real small model."""

from __future__ import annotations

from typing import Any

import pytest
from live_server import N_CTX_SEQ, Live, sse_documents

PATH = "/v1/completions"
PROMPT = "Once upon a time"


def complete(live: Live, **body: Any) -> Any:
    return live.post(PATH, **{"prompt": PROMPT, "max_tokens": 6, "temperature": 0, **body})


def texts(answer: Any) -> list[str]:
    return [choice["text"] for choice in answer["choices"]]


def test_whole_answer(live: Live) -> None:
    answer = complete(live)
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    [choice] = answer["choices"]
    assert choice["text"]
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
    assert answer["usage"]["completion_tokens"] == answer["timings"]["predicted_n"] == 6


def test_all_forms_of_prompt_agree(live: Live) -> None:
    ids = live.post("/tokenize", content=PROMPT)["tokens"]
    expected = texts(complete(live))
    assert texts(complete(live, prompt=[PROMPT])) == expected
    assert texts(complete(live, prompt=ids)) == expected
    assert texts(complete(live, prompt=[ids])) == expected


def test_many_prompts_times_many_choices(live: Live) -> None:
    answer = complete(live, prompt=[PROMPT, "The capital of France is"], n=2)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    first, second, third, fourth = texts(answer)
    assert first == second
    assert third == fourth
    assert " Paris" in third
    single = complete(live)["usage"]["prompt_tokens"]
    other = complete(live, prompt="The capital of France is")["usage"]["prompt_tokens"]
    assert answer["usage"]["prompt_tokens"] == single + other
    assert answer["usage"]["completion_tokens"] == 24
    assert "timings" not in answer


def test_stream(live: Live) -> None:
    response = live.http.post(
        PATH,
        json={
            "prompt": PROMPT,
            "max_tokens": 6,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    )
    *chunks, usage, done = sse_documents(response.text)
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == texts(complete(live))[0]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + [
        "length"
    ]
    assert chunks[-1]["choices"][0]["text"] == ""
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 6


def test_echo(live: Live) -> None:
    plain = texts(complete(live))[0]
    assert texts(complete(live, echo=True)) == [PROMPT + plain]
    ids = live.post("/tokenize", content=PROMPT)["tokens"]
    assert texts(complete(live, echo=True, prompt=ids)) == [PROMPT + plain]
    body = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "echo": True, "stream": True}
    chunks = sse_documents(live.http.post(PATH, json=body).text)[:-1]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == PROMPT + plain


def test_logprobs_in_the_legacy_shape(live: Live) -> None:
    answer = complete(live, logprobs=2)
    [choice] = answer["choices"]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"]) == 6
    for token, logprob, top, offset in zip(
        logprobs["tokens"],
        logprobs["token_logprobs"],
        logprobs["top_logprobs"],
        logprobs["text_offset"],
        strict=True,
    ):
        assert top[token] == logprob == max(top.values())
        assert choice["text"][offset:].startswith(token)
    body = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "logprobs": 2, "stream": True}
    chunks = sse_documents(live.http.post(PATH, json=body).text)[:-1]
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
    for name in ("tokens", "token_logprobs", "text_offset"):
        assert [item for part in parts for item in part[name]] == logprobs[name]


def test_ignore_eos_and_min_tokens(live: Live) -> None:
    [end] = live.post("/tokenize", content="<|im_end|>")["tokens"]
    forced = {"logit_bias": {str(end): 100}, "max_tokens": 5}
    assert complete(live, **forced)["choices"][0]["finish_reason"] == "stop"
    assert complete(live, **forced, ignore_eos=True)["usage"]["completion_tokens"] == 5
    assert complete(live, **forced, min_tokens=3)["usage"]["completion_tokens"] >= 3


def test_the_same_seed_is_the_same_text(live: Live) -> None:
    one, again = (complete(live, temperature=1.2, seed=11, max_tokens=8) for _ in range(2))
    assert texts(one) == texts(again)
    assert texts(one) != texts(complete(live, temperature=1.2, seed=12, max_tokens=8))


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": []}, "prompt", "string"),
        ({"prompt": [1, "a"]}, "prompt", "strings or lists"),
        ({"prompt": [49152]}, "prompt", "vocabulary"),
        ({"prompt": [-1]}, "prompt", "vocabulary"),
        ({"prompt": [1.5]}, "prompt", "lists of token ids"),
        ({"prompt": ["a"] * 100}, "prompt", "at most"),
        ({"echo": True, "logprobs": 1}, "logprobs", "echo"),
        ({"logprobs": 100}, "logprobs", "between"),
        ({"suffix": "x"}, "suffix", "not support"),
        ({"best_of": 3}, "best_of", "not support"),
    ],
)
def test_what_cannot_be_is_refused_by_name(live: Live, body: dict[str, Any], param: str, words: str) -> None:
    error = live.error(PATH, 400, **{"prompt": PROMPT, **body})
    assert error["param"] == param
    assert words in error["message"]


def test_a_missing_prompt_is_named(live: Live) -> None:
    assert live.error(PATH, 400, max_tokens=1)["message"] == "prompt is missing."


def test_too_long_a_prompt_names_its_own_field(live: Live) -> None:
    error = live.error(PATH, 400, prompt="word " * (N_CTX_SEQ + 10))
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")


def test_native_whole(live: Live) -> None:
    answer = live.post("/completion", prompt=PROMPT, n_predict=6, temperature=0, n_probs=1)
    assert answer["content"] == texts(complete(live))[0]
    assert (answer["stop"], answer["stop_type"], answer["truncated"]) == (True, "limit", False)
    assert answer["tokens_predicted"] == 6
    assert len(answer["completion_probabilities"]) == 6


def test_native_stream(live: Live) -> None:
    body = {"prompt": PROMPT, "n_predict": 6, "temperature": 0, "stream": True, "stop": [" there"]}
    documents = sse_documents(live.http.post("/completion", json=body).text)
    assert "[DONE]" not in documents
    assert [document["stop"] for document in documents] == [False] * (len(documents) - 1) + [True]
    full = texts(complete(live))[0]
    stopped = " there" in full
    assert "".join(document["content"] for document in documents) == full.split(" there")[0]
    assert documents[-1]["stop_type"] == ("word" if stopped else "limit")
    assert documents[-1]["stopping_word"] == (" there" if stopped else "")


def test_native_unlimited_is_the_servers_cap(live: Live) -> None:
    answer = live.post("/completion", prompt=PROMPT, n_predict=-1, stop=["e"])
    assert answer["stop_type"] == "word"


def test_tokenize_and_back(live: Live) -> None:
    text = "Grüße, 世界 👋 <|im_end|>"
    ids = live.post("/tokenize", content=text)["tokens"]
    assert live.post("/detokenize", tokens=ids)["content"] == text
    as_text = live.post("/tokenize", content=text, parse_special=False)["tokens"]
    assert len(as_text) > len(ids)
    assert live.post("/detokenize", tokens=as_text)["content"] == text
    assert live.post("/tokenize", content="")["tokens"] == []


def test_tokenize_with_pieces_and_in_vllms_words(live: Live) -> None:
    pieces = live.post("/tokenize", content="hi 👋", with_pieces=True)["tokens"]
    assert pieces[0]["piece"] == "hi"
    assert any(isinstance(item["piece"], list) for item in pieces)
    answer = live.post("/tokenize", prompt="hi there")
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == N_CTX_SEQ


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "content"),
        ("/tokenize", {"content": 5}, "content"),
        ("/detokenize", {"tokens": [999999]}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/apply-template", {"messages": []}, "messages"),
    ],
)
def test_text_tools_refuse_by_name(live: Live, path: str, body: dict[str, Any], param: str) -> None:
    assert live.error(path, 400, **body)["param"] == param


def test_counting_a_chats_tokens(live: Live) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    counted = live.post("/v1/chat/completions/input_tokens", messages=messages)["input_tokens"]
    answer = live.post("/v1/chat/completions", messages=messages, max_tokens=1)
    assert counted == answer["usage"]["prompt_tokens"]
