"""The official client accepts every event, parsed strictly by its own types."""

from __future__ import annotations

import json
from collections.abc import Iterator

import openai
import pytest
from live_server import N_CTX_SEQ, Live, sse_documents
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessageParam

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Count from one to ten."}]


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[openai.OpenAI]:
    # Retries would hide refusals.
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def test_whole_answer(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model="any", messages=MESSAGES, max_tokens=5, temperature=0, logprobs=True, top_logprobs=1, n=2
    )
    answer = ChatCompletion.model_validate_json(raw.content, strict=True)
    assert len(answer.choices) == 2
    assert answer.usage is not None and answer.usage.completion_tokens == 10
    assert answer.choices[0].logprobs is not None and answer.choices[0].logprobs.content is not None
    assert len(answer.choices[0].logprobs.content) == 5


def test_each_chunk(live: Live) -> None:
    body = {
        "messages": MESSAGES,
        "max_tokens": 5,
        "stream": True,
        "logprobs": True,
        "stream_options": {"include_usage": True},
        "return_progress": True,
    }
    *documents, done = sse_documents(live.http.post("/v1/chat/completions", json=body).text)
    assert done == "[DONE]"
    chunks = [ChatCompletionChunk.model_validate_json(json.dumps(item), strict=True) for item in documents]
    assert chunks[-1].usage is not None and chunks[-1].choices == []


def test_stream_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="any", messages=MESSAGES, stop=["e"], temperature=0, stream_options={"include_usage": True}
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert kinds.count("content.done") == 1
    assert final.choices[0].message.content
    assert final.choices[0].finish_reason == "stop"
    assert final.usage is not None and final.usage.completion_tokens > 0


def test_completions(client: openai.OpenAI) -> None:
    raw = client.completions.with_raw_response.create(
        model="any", prompt=["a", "b"], max_tokens=3, logprobs=1
    )
    answer = Completion.model_validate_json(raw.content, strict=True)
    assert len(answer.choices) == 2
    pieces = list(client.completions.create(model="any", prompt="a", max_tokens=3, stream=True))
    assert pieces[-1].choices[0].finish_reason == "length"


def test_models(client: openai.OpenAI) -> None:
    [model] = client.models.list().data
    assert Model.model_validate_json(model.model_dump_json(), strict=True).id == model.id
    assert client.models.retrieve(model.id).id == model.id


def test_errors_have_the_clients_types(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model="any", messages=[{"role": "user", "content": "word " * (N_CTX_SEQ + 10)}]
        )
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="any", messages=MESSAGES, temperature=-1)
    assert caught.value.param == "temperature"


def test_leaving_a_stream_early_ends_it(client: openai.OpenAI, live: Live) -> None:
    live.wait_until_idle()
    stream = client.chat.completions.create(
        model="any", messages=MESSAGES, max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
    )
    for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    stream.close()
    live.wait_until_idle()
