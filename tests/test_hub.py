from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from file_server import FileServer, Served, file_server
from model_files import MODEL, SHA256, FakeHub, entry, own_home

from edgeserve import hub, local_models, models
from edgeserve.download import Progress
from edgeserve.errors import DownloadError, ModelNotFoundError
from edgeserve.models import DownloadPlan, locate, pull, read_model_header, resolve


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return own_home(tmp_path, monkeypatch)


@pytest.fixture
def server() -> Iterator[FileServer]:
    with file_server() as running:
        yield running


@pytest.fixture
def fake_hub(server: FileServer, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    return FakeHub(server)


def test_downloads_into_the_hubs_cache(fake_hub: FakeHub, home: Path) -> None:
    fake_hub.repo("org/repo", {"m-Q4_K_M.gguf": MODEL, "m-Q8_0.gguf": MODEL + b"x", "README.md": b"hi"})
    reports: list[Progress] = []
    path = locate("org/repo", progress=reports.append)
    assert path.name == "m-Q4_K_M.gguf"
    assert path.read_bytes() == MODEL
    assert path.is_relative_to(home / ".cache/huggingface/hub")
    assert reports[0].phase == "connect"
    phases = [report.phase for report in reports]
    assert {"download", "verify"} <= set(phases)
    assert phases[-1] == "done"
    fake_hub.server.requests.clear()
    assert locate("org/repo") == path
    assert fake_hub.server.requests == []


def test_a_plan_says_what_would_be_fetched(fake_hub: FakeHub) -> None:
    names = [f"big/m-Q4_K_M-0000{i}-of-00002.gguf" for i in (1, 2)]
    fake_hub.repo("org/repo", dict.fromkeys(names, MODEL))
    plan = resolve("org/repo:q4_k_m")
    assert isinstance(plan, DownloadPlan)
    assert [file.name for file in plan.files] == names
    assert plan.n_bytes == 2 * len(MODEL)
    assert plan.files[0].sha256 == SHA256
    path = pull(plan)
    assert all(part.is_file() for part in local_models.all_parts(path))


def test_repositories_without_what_is_wanted(fake_hub: FakeHub) -> None:
    fake_hub.repo("org/repo", {"m-Q4_K_M.gguf": MODEL, "mmproj-m.gguf": MODEL})
    with pytest.raises(ModelNotFoundError, match="org/repo has no Q2_K") as caught:
        locate("org/repo:Q2_K")
    assert "m-Q4_K_M.gguf" in caught.value.hint
    fake_hub.repo("org/weights", {"model.safetensors": b"x"})
    with pytest.raises(ModelNotFoundError, match="no GGUF model"):
        locate("org/weights")


def test_missing_and_gated_repositories(fake_hub: FakeHub) -> None:
    headers = {"X-Error-Code": "RepoNotFound"}
    fake_hub.server.paths["/api/models/org/none"] = Served(b"{}", status=404, headers=headers)
    with pytest.raises(ModelNotFoundError, match="There is no repository org/none"):
        locate("org/none")
    headers = {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted."}
    fake_hub.server.paths["/api/models/org/gated"] = Served(b"{}", status=403, headers=headers)
    with pytest.raises(DownloadError, match="org/gated is gated") as caught:
        locate("org/gated")
    assert "HF_TOKEN" in caught.value.hint


def test_no_network() -> None:
    with pytest.raises(DownloadError, match="cannot be reached") as caught:
        locate("org/repo")
    assert "--offline" in caught.value.hint


def test_a_damaged_file_is_deleted(fake_hub: FakeHub, home: Path) -> None:
    fake_hub.repo("org/repo", {"m-Q4_K_M.gguf": MODEL})
    served = fake_hub.server.paths["/org/repo/resolve/main/m-Q4_K_M.gguf"]
    served.body = MODEL[:-1] + b"!"
    with pytest.raises(DownloadError, match="came damaged"):
        locate("org/repo")
    assert hub.cached_files("org/repo") == {}
    served.body = MODEL
    assert locate("org/repo").read_bytes() == MODEL


def test_the_hub_may_not_redirect_into_a_private_network(fake_hub: FakeHub) -> None:
    fake_hub.repo("org/repo", {"m-Q4_K_M.gguf": MODEL})
    served = fake_hub.server.paths["/org/repo/resolve/main/m-Q4_K_M.gguf"]
    served.status = 302
    served.headers["Location"] = "https://10.1.2.3/m.gguf"
    with pytest.raises(DownloadError, match="private network"):
        locate("org/repo")


def test_file_names_from_the_hub_cannot_escape(fake_hub: FakeHub, home: Path) -> None:
    fake_hub.repo("org/repo", {"../../../m-Q4_K_M.gguf": MODEL})
    with pytest.raises(DownloadError, match="not a file name"):
        locate("org/repo")


def test_entries_of_the_list(fake_hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "read_models_list", lambda: (entry(),))
    fake_hub.repo("org/repo", {"m-Q4_K_M.gguf": MODEL})
    assert resolve("tiny") == DownloadPlan(
        "tiny", (hub.HubFile("m-Q4_K_M.gguf", len(MODEL), SHA256),), "org/repo", "", "MIT"
    )
    assert fake_hub.server.requests == []
    path = locate("Tiny")
    assert path.read_bytes() == MODEL
    assert locate("tiny", offline=True) == path


def test_an_entry_that_its_publisher_replaced(fake_hub: FakeHub) -> None:
    fake_hub.repo("org/repo", {"m-Q4_K_M.gguf": MODEL + b"new"})
    with pytest.raises(DownloadError, match="replaced by its publisher") as caught:
        pull(entry())
    assert "hf:org/repo/m-Q4_K_M.gguf" in caught.value.hint
    assert fake_hub.server.asked("/org/repo/resolve/main/m-Q4_K_M.gguf") == []
    fake_hub.repo("org/repo", {"other.gguf": MODEL})
    with pytest.raises(ModelNotFoundError, match="any more"):
        pull(entry())


def test_headers_of_models_that_are_not_here(
    fake_hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    fake_hub.repo("org/repo", {"m-Q4_K_M.gguf": MODEL})
    header = read_model_header("org/repo")
    assert header.architecture == "llama"
    assert not header.is_local
    assert hub.cached_files("org/repo") == {}
    asked = fake_hub.server.asked("/org/repo/resolve/main/m-Q4_K_M.gguf")
    assert [headers.get("authorization") for headers in asked] == ["Bearer hf_secret"]
    fake_hub.server.paths["/m.gguf"] = Served(MODEL)
    assert read_model_header(fake_hub.server.url + "/m.gguf").n_vocab == 32
