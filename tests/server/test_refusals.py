"""Requests that must not be served in part: clear refusals instead of silent changes, and giants early."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest
from conftest import Serve, ServeApart
from live_server import N_CTX_SEQ, Live, raw_request

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?<=x)y"}}}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "response_format"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "strict": True, "schema": SCHEMA},
                }
            },
            "response_format",
        ),
        ({"response_format": {"type": "no such type"}}, "response_format"),
        ({"json_schema": SCHEMA}, "json_schema"),
        ({"grammar": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000}, "grammar"),
        ({"grammar": "this is no grammar"}, "grammar"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_constraints_are_refused_rather_than_dropped(
    live: Live, body: dict[str, Any], param: str, stream: bool
) -> None:
    """An answer that ignores a schema looks like one that obeys it, so there is none."""
    error = live.error(CHAT, 400, messages=HI, stream=stream, **body)
    assert error["param"] == param
    assert error["code"] == "unsupported_parameter"
    assert not live.state.num_active


def test_plain_text_is_no_constraint(live: Live) -> None:
    assert live.post(CHAT, messages=HI, max_tokens=1, response_format={"type": "text"})


def test_constraints_are_refused_on_the_other_endpoints_too(live: Live) -> None:
    for path, name in (("/v1/completions", "response_format"), ("/completion", "json_schema")):
        error = live.error(path, 400, prompt="a", **{name: {"type": "json_object"}})
        assert error["param"] == name


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", value) for value in (-0.1, 100.1, 1e6)),
        *(("top_p", value) for value in (-1, 1.1)),
        *(("min_p", value) for value in (-0.1, 1.1)),
        *(("repeat_penalty", value) for value in (0, -1, 1e9)),
        *(("presence_penalty", value) for value in (-101, 1e30)),
        *(("frequency_penalty", value) for value in (-101, 1e30)),
        *(("top_k", value) for value in (-2, 1e30)),
        *(("seed", value) for value in (-2, 2**70)),
        *(("min_tokens", value) for value in (-1,)),
        *(("repeat_last_n", value) for value in (-2,)),
        *(("max_queue_ms", value) for value in (-1, 1e12)),
        *(("deadline_ms", value) for value in (-0.5, 1e12)),
    ],
)
def test_numbers_out_of_range_name_their_range(live: Live, field: str, value: float) -> None:
    error = live.error(CHAT, 400, messages=HI, **{field: value})
    assert error["param"] == field
    assert any(word in error["message"] for word in ("between", "at least", "integer"))


@pytest.mark.parametrize("value", ["urgent", 3, True])
def test_an_unknown_priority_is_refused(live: Live, value: object) -> None:
    error = live.error(CHAT, 400, messages=HI, priority=value)
    assert error["param"] == "priority"


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
@pytest.mark.parametrize("field", ["temperature", "top_p", "repeat_penalty"])
def test_numbers_that_are_none_are_no_json(live: Live, field: str, value: str) -> None:
    raw = f'{{"{field}": {value}, "messages": [{{"role": "user", "content": "Hi"}}]}}'
    response = live.http.post(CHAT, content=raw, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_json"


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_parts_of_text_are_joined_in_every_role(live: Live, role: str) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    extra = {"tool_call_id": "c"} if role == "tool" else {}
    prompt = live.post("/apply-template", messages=[*HI, {"role": role, "content": parts, **extra}, *HI])[
        "prompt"
    ]
    assert f"<|im_start|>{role}\none\ntwo<|im_end|>" in prompt


def test_optional_fields_of_messages_may_be_null(live: Live) -> None:
    nulls = {"id": None, "name": None, "tool_call_id": None, "tool_calls": None, "reasoning_content": None}
    messages = [
        {"role": "system", "content": "S", **nulls},
        {"role": "user", "content": "U", **nulls},
        {"role": "assistant", "content": None, **nulls},
        {"role": "user", "content": "V", **nulls},
    ]
    assert live.post(CHAT, messages=messages, max_tokens=1)


def test_a_null_cap_is_the_default_and_a_huge_one_is_cut(serve: Serve) -> None:
    live = serve(request_defaults={"max_tokens": 2})
    bias = {"2644": 100}
    for caps in ({"max_tokens": None}, {"max_tokens": None, "max_completion_tokens": None}, {}):
        assert live.post(CHAT, messages=HI, logit_bias=bias, **caps)["usage"]["completion_tokens"] == 2
    assert live.post(CHAT, messages=HI, stop=["cat"], logit_bias=bias, max_tokens=10**9)


STOPS: list[tuple[Any, str, str]] = [
    (["cat c"], " ", "stop"),
    (["t cat ca"], " ca", "stop"),
    (["at cat cat"], " c", "stop"),
    ([" cat cat cat cat"], "", "stop"),
    (["cat!", "t c"], " ca", "stop"),
    (["cat cat", "cat"], " ", "stop"),
    (["nothing", "cat cax"], " cat" * 6, "length"),
    (" cat cat", "", "stop"),
    ([], " cat" * 6, "length"),
]


@pytest.mark.parametrize(("stop", "text", "reason"), STOPS)
def test_nothing_of_a_stop_leaks_wherever_it_begins(live: Live, stop: Any, text: str, reason: str) -> None:
    body = {"prompt": "a", "stop": stop, "max_tokens": 6, "logit_bias": {"2644": 100}}
    [choice] = live.post("/v1/completions", **body)["choices"]
    assert (choice["text"], choice["finish_reason"]) == (text, reason)
    lines = live.http.post("/v1/completions", json={**body, "stream": True}).text.split("\n\n")
    pieces = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
    assert "".join(piece["text"] for piece in pieces) == text
    assert pieces[-1]["text"] == ""
    assert pieces[-1]["finish_reason"] == reason
    assert all(piece["text"] for piece in pieces[:-1])


# -- giants -------------------------------------------------------------------------------------------------


def test_200_megabytes_are_refused_before_they_are_read(live: Live) -> None:
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {200 << 20}\r\nConnection: close\r\n\r\n"
    )
    answer = raw_request(live, head)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "payload_too_large"


def test_an_endless_body_is_cut_off(live: Live) -> None:
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        "Transfer-Encoding: chunked\r\n\r\n"
    )
    piece = b"100000\r\n" + b" " * 0x100000 + b"\r\n"
    received = b""
    with socket.create_connection(("127.0.0.1", live.port), timeout=60) as sock:
        sock.sendall(head.encode())
        try:
            for _ in range(40):
                sock.sendall(piece)
            received = sock.recv(65536)
        except OSError:
            # The server answered and closed while this was still sending.
            received = received or b"HTTP/1.1 413 "
    assert received.startswith(b"HTTP/1.1 413 ")
    assert live.http.get("/health").status_code == 200


def test_endless_headers_are_cut_off(live: Live) -> None:
    try:
        answer = raw_request(live, "GET /health HTTP/1.1\r\nHost: localhost\r\nX-Long: " + "a" * 200_000)
    except ConnectionError:
        # The server answered and closed while this was still sending.
        answer = b"HTTP/1.1 400 "
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert live.http.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "a" * (12 << 20)}]}),
        (CHAT, {"messages": [{"role": "user", "content": " " * (12 << 20)}]}),
        ("/v1/completions", {"prompt": "\n" * (6 << 20)}),
        ("/completion", {"prompt": "á" * (5 << 20)}),
        ("/v1/completions", {"prompt": [1] * (2 << 20)}),
    ],
    ids=["letters", "spaces", "lines", "native", "ids"],
)
def test_a_giant_prompt_is_refused_without_being_tokenized(
    live: Live, path: str, body: dict[str, Any]
) -> None:
    error = live.error(path, 400, **body)
    assert error["code"] == "context_length_exceeded"
    assert error["n_prompt_tokens"] > error["n_ctx"] == N_CTX_SEQ
    assert error["param"] == ("messages" if path == CHAT else "prompt")
    assert not live.state.num_active


def test_what_just_fits_is_served_and_one_token_more_is_refused(serve_apart: ServeApart) -> None:
    """The server cuts nothing off: a fact at the beginning is either read or the request refused."""
    live = serve_apart(n_ctx=256, n_ctx_seq=128, n_seq_max=1)
    ids = [26843] * 127
    answer = live.post("/v1/completions", prompt=ids, max_tokens=5)
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (127, 1)
    error = live.error("/v1/completions", 400, prompt=[*ids, 1])
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (128, 128)


def test_hundreds_of_thousands_of_biases_prompts_and_choices_are_refused(live: Live) -> None:
    bias = {str(token): 1 for token in range(200_000)}
    assert live.error(CHAT, 400, messages=HI, logit_bias=bias)["param"] == "logit_bias"
    assert live.error(CHAT, 400, messages=HI, n=10**6)["param"] == "n"
    assert live.error("/v1/completions", 400, prompt=["a"] * 200_000)["param"] == "prompt"
