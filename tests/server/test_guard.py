"""Who gets an answer: Host, Origin and API key."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from conftest import Serve
from live_server import Live, attached, get, post_bytes, raw_request

from edgeserve.config import ServerConfig
from edgeserve.engine.async_engine import AsyncEngine
from edgeserve.errors import UsageError
from edgeserve.server.security import check_exposure, host_name, is_exposed, is_loopback

HI = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST:8080",
        "localhost.",
        "app.localhost:1",
        "127.0.0.1",
        "127.9.9.9:80",
        "[::1]:8080",
        "[::ffff:127.0.0.1]",
    ],
)
def test_local_hosts_are_answered(live: Live, host: str) -> None:
    assert status(raw_request(live, get("/health", host=host))) == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8080",
        "evil.example.",
        "localhost.evil.example",
        "127.0.0.1.nip.io",
        "192.168.1.5:8080",
        "[2001:db8::1]:8080",
        "[::ffff:192.168.1.5]",
        "0.0.0.0",
        "localhost:8080@evil.example",
        "localhost evil",
        "",
    ],
)
def test_other_hosts_are_refused(live: Live, host: str) -> None:
    for path in ("/health", "/v1/models"):
        answer = raw_request(live, get(path, host=host))
        assert status(answer) == 403
        assert b"host_not_allowed" in answer


def test_a_missing_host_is_refused(live: Live) -> None:
    assert status(raw_request(live, "GET /health HTTP/1.0\r\n\r\n")) == 403
    assert status(raw_request(live, get("/health", host=None))) == 400


def test_two_hosts_are_refused(live: Live) -> None:
    assert status(raw_request(live, get("/health", "Host: evil.example"))) in (400, 403)


def test_listed_hosts_are_answered(serve: Serve) -> None:
    live = serve(allowed_hosts=("box.lan", "[fd00::1]"))
    for host, expected in (("box.lan:8080", 200), ("BOX.lan.", 200), ("[fd00::1]", 200), ("other.lan", 403)):
        assert status(raw_request(live, get("/health", host=host))) == expected


def test_a_wildcard_bind_answers_to_addresses_but_not_to_names(serve: Serve) -> None:
    live = serve(host="0.0.0.0", api_keys=("k",))
    assert status(raw_request(live, get("/health", host="192.168.1.5:8080"))) == 200
    assert status(raw_request(live, get("/health", host="evil.example"))) == 403


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://localhost.evil.example", "file://", "x"]
)
def test_foreign_origins_are_refused_without_cors_headers(live: Live, origin: str) -> None:
    headers = {"Origin": origin}
    answers = [
        live.http.get("/v1/models", headers=headers),
        live.http.post("/v1/chat/completions", json=HI, headers=headers),
        live.http.post(
            "/v1/chat/completions", content="x", headers={**headers, "Content-Type": "text/plain"}
        ),
        live.http.request(
            "OPTIONS", "/v1/chat/completions", headers={**headers, "Access-Control-Request-Method": "POST"}
        ),
    ]
    for answer in answers:
        assert answer.status_code == 403
        assert answer.json()["error"]["type"] == "permission_error"
        assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize("origin", ["http://localhost:3000", "https://127.0.0.1", "http://[::1]:5173"])
def test_local_origins_are_reflected(live: Live, origin: str) -> None:
    answer = live.http.get("/v1/models", headers={"Origin": origin})
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == origin
    assert answer.headers["vary"] == "Origin"
    assert "access-control-allow-credentials" not in answer.headers


def test_listed_origins_and_the_servers_own_are_reflected(serve: Serve) -> None:
    live = serve(allowed_origins=("https://chat.example/",), allowed_hosts=("box.lan",))
    ok = live.http.get("/health", headers={"Origin": "https://chat.example"})
    assert ok.headers["access-control-allow-origin"] == "https://chat.example"
    own = raw_request(live, get("/health", "Origin: http://box.lan:8080", host="box.lan:8080"))
    assert status(own) == 200
    other_port = raw_request(live, get("/health", "Origin: http://box.lan:9", host="box.lan:8080"))
    assert status(other_port) == 403


def test_preflight_needs_no_key(serve: Serve) -> None:
    live = serve(api_keys=("secret",))
    answer = live.http.request(
        "OPTIONS",
        "/v1/chat/completions",
        headers={
            "Origin": "http://localhost:3000",
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type",
        },
    )
    assert answer.status_code == 204
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert answer.headers["access-control-allow-headers"] == "authorization,content-type"


@pytest.fixture(scope="module")
def locked(engine: AsyncEngine) -> Iterator[Live]:
    with attached(engine, ServerConfig(api_keys=("first-key", "sécond"))) as live:
        yield live


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Basic first-key"},
        {"Authorization": "Bearer first-key2"},
        {"X-Api-Key": "first-ke"},
    ],
)
def test_without_the_key_nothing_but_health(locked: Live, headers: dict[str, str]) -> None:
    for path in ("/v1/models", "/slots", "/metrics", "/events", "/props", "/"):
        answer = locked.http.get(path, headers=headers)
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"
    assert locked.http.post("/v1/chat/completions", json=HI, headers=headers).status_code == 401
    assert locked.http.get("/health", headers=headers).status_code == 200
    assert locked.http.get("/v1/health", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer first-key"},
        {"authorization": "bearer first-key"},
        {"X-Api-Key": "first-key"},
    ],
)
def test_with_a_key(locked: Live, headers: dict[str, str]) -> None:
    assert locked.http.post("/v1/chat/completions", json=HI, headers=headers).status_code == 200


def test_any_key_will_do_where_none_is_set(live: Live) -> None:
    assert live.http.get("/v1/models", headers={"Authorization": "Bearer sk-whatever"}).status_code == 200


def test_keys_do_not_share_prefixes(serve: Serve) -> None:
    live = serve(api_keys=("one", "two"))
    body = {"messages": [{"role": "user", "content": "Something only one of us says."}], "max_tokens": 1}

    def cached(key: str) -> int:
        answer = live.http.post("/v1/chat/completions", json=body, headers={"X-Api-Key": key})
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached("one") == 0
    assert cached("one") > 0
    assert cached("two") == 0


def test_request_ids_come_back(live: Live) -> None:
    assert live.http.get("/health", headers={"X-Request-ID": "abc-1"}).headers["x-request-id"] == "abc-1"
    assert live.http.get("/nope", headers={"X-Request-ID": "abc-2"}).headers["x-request-id"] == "abc-2"
    made = live.http.get("/health", headers={"X-Request-ID": "x" * 500}).headers["x-request-id"]
    assert made.startswith("req-")
    assert len(made) < 100


@pytest.mark.parametrize(
    "content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""]
)
def test_bodies_must_say_that_they_are_json(live: Live, content_type: str) -> None:
    headers = {"Content-Type": content_type} if content_type else {}
    answer = live.http.post("/v1/chat/completions", content=b'{"messages": []}', headers=headers)
    assert answer.status_code == 415


def test_json_may_name_its_charset(live: Live) -> None:
    answer = raw_request(
        live, post_bytes({**HI, "stream": False}, "/v1/chat/completions", "Connection: close")
    )
    assert status(answer) == 200
    headers = {"Content-Type": "application/json; charset=utf-8"}
    assert live.http.post("/tokenize", content=b'{"content": "a"}', headers=headers).status_code == 200


def test_a_server_for_others_needs_a_key() -> None:
    with pytest.raises(UsageError, match="no API key"):
        check_exposure(ServerConfig(host="0.0.0.0"))
    assert check_exposure(ServerConfig(host="127.0.0.1")) == ()
    assert "has a key" in "".join(check_exposure(ServerConfig(host="0.0.0.0", api_keys=("k",))))
    assert "anybody" in "".join(check_exposure(ServerConfig(host="::"), is_insecure=True))


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ("Example.org.:80", "example.org"),
        ("[::1]:80", "::1"),
        ("::1", None),
        ("a:b", None),
        (".", None),
        ("a/b", None),
        ("", None),
    ],
)
def test_host_name(value: str, name: str | None) -> None:
    assert host_name(value) == name


def test_what_counts_as_local() -> None:
    assert is_loopback("::1")
    assert not is_loopback("128.0.0.1")
    assert not is_exposed("localhost")
    assert is_exposed("")
    assert is_exposed("192.168.0.2")
