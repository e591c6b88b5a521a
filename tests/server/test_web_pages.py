"""A page on another site, or behind a name that was made to point here, gets nothing: byte by byte as a
browser sends it."""

from __future__ import annotations

import json

import pytest
from live_server import Live, raw_request

CHAT = "/v1/chat/completions"
BODY = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1})
EVIL = "Origin: https://evil.example"


def ask(live: Live, method: str, path: str, *headers: str, host: str = "localhost", body: str = "") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", *headers]
    if body:
        lines.append(f"Content-Length: {len(body)}")
    return raw_request(live, "\r\n".join([*lines, "Connection: close", "", body]))


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def assert_nothing(live: Live, answer: bytes, expected: int = 403) -> None:
    """Refused, readable by no page, and nothing of it reached the engine."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert status(answer) == expected
    assert b"access-control-" not in head.lower()
    assert b"x-content-type-options: nosniff" in head.lower()
    assert set(json.loads(body)) == {"error"}
    assert not live.state.num_active


@pytest.mark.parametrize(
    "headers",
    [
        pytest.param((EVIL,), id="fetch"),
        pytest.param(("ORIGIN: HTTPS://EVIL.EXAMPLE",), id="upper case"),
        pytest.param(("Origin: null",), id="sandboxed frame or file"),
        pytest.param(("Origin: ",), id="empty"),
        pytest.param(("Origin: http://localhost.evil.example",), id="localhost as a prefix"),
        pytest.param(("Origin: http://localhost@evil.example",), id="localhost as a user"),
        pytest.param(("Origin: http://127.0.0.1.evil.example:8080",), id="address as a prefix"),
        pytest.param(("Origin: http://evil.example:127.0.0.1",), id="address as a port"),
        pytest.param(("Origin: http://[2001:db8::1]:8080",), id="foreign IPv6"),
        pytest.param(("Origin: http://[::1",), id="half an IPv6 address"),
        pytest.param(("Origin: http://[::1]evil.example",), id="IPv6 and more"),
        pytest.param(("Origin: http://localhost/evil",), id="a path"),
        pytest.param(("Origin: http://localhost http://evil.example",), id="two in one"),
        pytest.param(("Origin: chrome-extension://abc",), id="extension"),
        pytest.param(("Origin: //localhost",), id="no scheme"),
        pytest.param(("Origin: http://loc\xe4lhost",), id="not ASCII"),
        pytest.param(("Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: no-cors"), id="picture or script"),
        pytest.param(
            ("Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: navigate", "Sec-Fetch-Dest: iframe"), id="frame"
        ),
    ],
)
def test_another_site_gets_nothing(live: Live, headers: tuple[str, ...]) -> None:
    for path in ("/v1/models", "/health", "/slots", "/no/such/path"):
        assert_nothing(live, ask(live, "GET", path, *headers))
    for kind in ("application/json", "text/plain", "application/x-www-form-urlencoded"):
        assert_nothing(live, ask(live, "POST", CHAT, *headers, f"Content-Type: {kind}", body=BODY))
    assert_nothing(
        live,
        ask(
            live,
            "OPTIONS",
            CHAT,
            *headers,
            "Access-Control-Request-Method: POST",
            "Access-Control-Request-Headers: content-type",
            "Access-Control-Request-Private-Network: true",
        ),
    )


def test_a_second_origin_does_not_hide_behind_the_first(live: Live) -> None:
    for headers in ((EVIL, "Origin: http://localhost"), ("Origin: http://localhost", EVIL)):
        assert_nothing(live, ask(live, "GET", "/v1/models", *headers))


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8080",
        "EVIL.EXAMPLE",
        "evil.example.",
        "localhost.evil.example",
        "evil-localhost",
        "127.0.0.1.evil.example",
        "127.0.0.1.nip.io",
        "[2001:db8::1]",
        "[::ffff:10.0.0.1]:8080",
        "[::]",
        "0.0.0.0",
        "2130706433",
        "0x7f000001",
        "127.1",
        "localhost:80:80",
        "[::1]x",
        "[::1",
        "::1",
        "localhost,evil.example",
        "loc\xe4lhost",
        "",
    ],
)
def test_a_rebound_name_gets_nothing(live: Live, host: str) -> None:
    for path in ("/", "/v1/models", "/health"):
        assert_nothing(live, ask(live, "GET", path, host=host))
    assert_nothing(live, ask(live, "POST", CHAT, "Content-Type: application/json", host=host, body=BODY))
    # The page's own origin is then the rebound name: no reason to trust it.
    assert_nothing(live, ask(live, "GET", "/v1/models", f"Origin: http://{host}", host=host))
    assert_nothing(
        live,
        ask(
            live, "OPTIONS", CHAT, f"Origin: http://{host}", "Access-Control-Request-Method: POST", host=host
        ),
    )


def test_a_missing_host_gets_nothing(live: Live) -> None:
    assert_nothing(live, raw_request(live, "GET /v1/models HTTP/1.0\r\n\r\n"))
    assert status(raw_request(live, "GET /v1/models HTTP/1.1\r\nConnection: close\r\n\r\n")) == 400


def test_an_absolute_target_does_not_replace_the_host(live: Live) -> None:
    answer = ask(live, "GET", "http://localhost/v1/models", host="evil.example")
    assert_nothing(live, answer)


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:1", "localhost.", "127.0.0.1:8080", "[::1]:8080", "[0:0:0:0:0:0:0:1]"]
)
def test_local_names_in_all_spellings_are_answered(live: Live, host: str) -> None:
    assert status(ask(live, "GET", "/v1/models", host=host)) == 200


def test_a_form_is_no_json_even_without_an_origin(live: Live) -> None:
    """What an old browser posts across sites without asking."""
    for kind in ("text/plain", "text/plain; application/json", "application/x-www-form-urlencoded"):
        assert_nothing(live, ask(live, "POST", CHAT, f"Content-Type: {kind}", body=BODY), 415)
    assert_nothing(live, ask(live, "POST", CHAT, body=BODY), 415)


def test_a_link_that_somebody_follows_is_answered(live: Live) -> None:
    headers = ("Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: navigate", "Sec-Fetch-Dest: document")
    assert status(ask(live, "GET", "/health", *headers)) == 200


def test_a_local_page_that_names_itself_is_answered(live: Live) -> None:
    """Its browser calls 127.0.0.1 and localhost two sites; the Origin says that both are local."""
    headers = ("Origin: http://127.0.0.1:3000", "Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: cors")
    answer = ask(live, "GET", "/health", *headers)
    assert status(answer) == 200
    assert b"access-control-allow-origin: http://127.0.0.1:3000" in answer.lower()
    assert b"access-control-allow-credentials" not in answer.lower()


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "..%2f..%2fetc%2fpasswd", "/etc/passwd", "%00", "a\\b", ".ssh"]
)
def test_a_model_name_is_no_path(live: Live, name: str) -> None:
    """The one loaded model answers to every name; none is ever looked up, on disk or elsewhere."""
    answer = ask(live, "GET", f"/v1/models/{name}")
    assert status(answer) in (200, 404)
    assert b"root:" not in answer
    body = live.post(CHAT, model=name, messages=[{"role": "user", "content": "Hi"}], max_tokens=1)
    assert "SmolLM2" in body["model"]
