from __future__ import annotations

from collections.abc import Iterator

import pytest
from file_server import FileServer, Served, file_server

from edgeserve.errors import DownloadError
from edgeserve.http_fetch import check_url, is_loopback, is_private, open_url, origin, without_secrets


@pytest.fixture
def server() -> Iterator[FileServer]:
    with file_server() as running:
        yield running


def public(host: str) -> list[str]:
    return ["93.184.216.34", "2606:2800:220:1::1"]


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "ftp://example.org/x",
        "http://example.org/x",
        "https:///x",
        "https://[::1",
        "https://example.org:port/x",
        "model.gguf",
        "",
    ],
)
def test_only_https_to_a_host(url: str) -> None:
    with pytest.raises(DownloadError):
        check_url(url, resolve=public)


PRIVATE_HOSTS = (
    "10.0.0.1", "192.168.1.1", "172.16.9.9", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
    "255.255.255.255", "[fe80::1]", "[fd00::1]", "[::ffff:10.0.0.1]",
)  # fmt: skip


@pytest.mark.parametrize("host", PRIVATE_HOSTS)
def test_private_addresses_are_refused(host: str) -> None:
    with pytest.raises(DownloadError, match="private network"):
        check_url(f"https://{host}/model.gguf")


def test_a_name_that_resolves_to_a_private_address_is_refused() -> None:
    check_url("https://example.org/x", resolve=public)
    with pytest.raises(DownloadError, match="private network"):
        check_url("https://rebound.example/x", resolve=lambda host: ["93.184.216.34", "127.0.0.1"])


def test_redirects_may_not_lead_inside() -> None:
    first = "https://example.org/x"
    check_url("https://cdn.example.net/x", first=first, resolve=public)
    for inside_url in ("http://127.0.0.1:8080/x", "https://localhost/x", "https://10.1.2.3/x"):
        with pytest.raises(DownloadError, match=r"private network|not encrypted"):
            check_url(inside_url, first=first, resolve=lambda host: ["127.0.0.1"])
    with pytest.raises(DownloadError, match="not encrypted"):
        check_url("http://example.org/x", first=first, resolve=public)


def test_what_the_users_settings_name_may_be_private() -> None:
    mirror = "http://10.0.0.7:8081/simple"
    check_url("http://10.0.0.7:8081/packages/x.whl", first=mirror)
    with pytest.raises(DownloadError):
        check_url("http://10.0.0.7:9000/packages/x.whl", first=mirror)


def test_loopback_by_name_only() -> None:
    assert is_loopback("localhost")
    assert is_loopback("127.8.8.8")
    assert is_loopback("::1")
    assert not is_loopback("localhost.example.org")
    assert not is_loopback("10.0.0.1")
    assert is_private("127.0.0.1")
    assert not is_private("8.8.8.8")


def get(url: str) -> bytes:
    with open_url(url) as response:
        return response.read()


def test_a_redirect_is_followed_and_a_bad_one_is_not(server: FileServer) -> None:
    server.paths["/model"] = Served(status=302, headers={"Location": "/elsewhere"})
    server.paths["/elsewhere"] = Served(b"found")
    assert get(server.url + "/model") == b"found"
    for target in (
        "https://10.1.2.3/x",
        "http://169.254.169.254/latest",
        "file:///etc/passwd",
        "http://[bad",
    ):
        server.paths["/model"] = Served(status=302, headers={"Location": target})
        with pytest.raises(DownloadError):
            get(server.url + "/model")


def test_endless_redirects(server: FileServer) -> None:
    server.paths["/model"] = Served(status=307, headers={"Location": "/model"})
    with pytest.raises(DownloadError, match="redirects more than 5 times"):
        get(server.url + "/model")


def test_a_token_stays_with_its_origin(server: FileServer) -> None:
    with file_server() as other:
        server.paths["/a"] = Served(status=302, headers={"Location": "/b"})
        server.paths["/b"] = Served(status=302, headers={"Location": other.url + "/c"})
        other.paths["/c"] = Served(b"x")
        with open_url(server.url + "/a", {"Authorization": "Bearer secret"}) as response:
            assert response.status_code == 200
        assert server.asked("/b")[0]["authorization"] == "Bearer secret"
        assert "authorization" not in other.asked("/c")[0]


def test_messages_carry_no_secrets() -> None:
    assert without_secrets("https://me:pw@host:8443/a/b?sig=1") == "https://host:8443/a/b"
    assert origin("https://host/x") == origin("https://host:443/y")
    assert origin("https://host/x") != origin("http://host/x")
