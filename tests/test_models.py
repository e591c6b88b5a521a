from __future__ import annotations

from pathlib import Path

import pytest
from model_files import MODEL, cached, ollama, own_home, write

from edgeserve.download import Progress
from edgeserve.errors import GGUFError, ModelError, ModelNotFoundError
from edgeserve.hub import choose, is_repo_name
from edgeserve.local_models import find_local_models
from edgeserve.model_reference import HubReference, parse_hub_reference
from edgeserve.models import locate, read_model_header, remove, resolve
from edgeserve.models_view import list_rows, progress_line, render_list


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return own_home(tmp_path, monkeypatch)


# -- references ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/repo", HubReference("org/repo")),
        ("org/repo:Q4_K_M", HubReference("org/repo", "Q4_K_M")),
        ("hf:org/repo", HubReference("org/repo")),
        ("hf:org/repo:q8_0", HubReference("org/repo", "q8_0")),
        ("hf:org/repo/a.gguf", HubReference("org/repo", file="a.gguf")),
        ("hf:org/repo/sub/a.gguf", HubReference("org/repo", file="sub/a.gguf")),
        ("https://huggingface.co/org/repo", HubReference("org/repo")),
        ("https://huggingface.co/org/repo/blob/main/a%20b.gguf", HubReference("org/repo", file="a b.gguf")),
        (
            "https://huggingface.co/org/repo/resolve/main/a.gguf?download=true",
            HubReference("org/repo", file="a.gguf"),
        ),
        ("name", None),
        ("a/b/c", None),
        ("folder/model.gguf", None),
        ("hf:org", None),
        ("hf:../repo", None),
        ("hf:org/..", None),
        ("hf:org/re--po", None),
        ("hf:org/repo/readme.md", None),
        ("https://example.org/org/repo", None),
    ],
)
def test_hub_references(text: str, expected: HubReference | None) -> None:
    assert parse_hub_reference(text) == expected


@pytest.mark.parametrize(
    "name", ["../x", "a/../b", "a", "a/b/c", "a\\b/c", "/a/b", "a/b\0", "-a/b", "a/b c", ""]
)
def test_repo_names(name: str) -> None:
    assert not is_repo_name(name)


FILES = (
    "m-BF16.gguf",
    "m-F16-00001-of-00002.gguf",
    "m-F16-00002-of-00002.gguf",
    "m-Q4_K_M.gguf",
    "m-Q8_0.gguf",
    "mmproj-m-Q8_0.gguf",
    "imatrix_Q4_K_M.gguf",
    "README.md",
)


@pytest.mark.parametrize(
    ("tag", "expected"),
    [
        (None, ["m-Q4_K_M.gguf"]),
        ("q8_0", ["m-Q8_0.gguf"]),
        ("Q4_K", []),
        ("f16", ["m-F16-00001-of-00002.gguf", "m-F16-00002-of-00002.gguf"]),
        ("Q2_K", []),
        ("Q4.K", []),
        ("bf16", ["m-BF16.gguf"]),
        ("Q4_K_M-", []),
    ],
)
def test_tags(tag: str | None, expected: list[str]) -> None:
    assert choose(FILES, tag) == expected


def test_no_tag_falls_back() -> None:
    assert choose(["b-Q8_0.gguf", "a-Q2_K.gguf"]) == ["b-Q8_0.gguf"]
    assert choose(["b-Q6_K.gguf", "a-Q2_K.gguf"]) == ["a-Q2_K.gguf"]
    assert choose(["mmproj-a.gguf", "README.md"]) == []


def test_unknown_names_suggest_near_ones() -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        resolve("smollm-135m")
    assert "'smollm-135m'" in caught.value.message
    assert "smollm2-135m" in caught.value.hint


@pytest.mark.parametrize(
    "reference", ["", "a\0b", "x" * 5000, "a\x1b[31m", "hf:", "ollama:", "ollama:../../x", "https://"]
)
def test_odd_references(reference: str) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        resolve(reference)
    assert str(caught.value).isprintable()
    assert len(caught.value.message) < 400


# -- files --------------------------------------------------------------------------------------------------


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "some.gguf")
    assert locate(str(path)) == path
    monkeypatch.chdir(tmp_path)
    assert locate("some.gguf") == Path("some.gguf")
    assert locate("./some.gguf") == Path("some.gguf")
    assert resolve(str(tmp_path)) == path
    with pytest.raises(ModelNotFoundError, match="There is no file") as caught:
        locate("same.gguf")
    assert "some.gguf" in caught.value.hint


def test_a_folder_with_several_models(tmp_path: Path) -> None:
    write(tmp_path / "m" / "a.gguf")
    write(tmp_path / "m" / "mmproj-a.gguf")
    assert resolve(str(tmp_path / "m")) == tmp_path / "m" / "a.gguf"
    write(tmp_path / "m" / "b.gguf")
    with pytest.raises(ModelNotFoundError, match="holds 2 models") as caught:
        resolve(str(tmp_path / "m"))
    assert "a.gguf, b.gguf" in caught.value.hint
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelNotFoundError, match="holds no model"):
        resolve(str(tmp_path / "empty"))


def test_what_cannot_be_loaded_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GGUFError, match="cut short"):
        locate(str(write(tmp_path / "cut.gguf", MODEL[:-1])))
    with pytest.raises(GGUFError, match="web page"):
        locate(str(write(tmp_path / "page.gguf", b"<html>" * 100)))
    assert read_model_header(str(tmp_path / "cut.gguf")).architecture == "llama"


# -- removing and showing -----------------------------------------------------------------------------------


def test_remove_from_the_hubs_cache(home: Path) -> None:
    first = cached(home, "org/repo", "a-Q8_0.gguf")
    twin = first.with_name("b-Q8_0.gguf")
    twin.symlink_to(first.readlink())
    blob = first.resolve()
    remove("hf:org/repo/a-Q8_0.gguf")
    assert blob.is_file()
    assert not first.is_symlink()
    remove("hf:org/repo/b-Q8_0.gguf")
    assert not blob.exists()


def test_what_belongs_to_others_is_not_removed(home: Path, tmp_path: Path) -> None:
    ollama(home, "registry.ollama.ai/library/smollm2/latest")
    studio = write(home / ".lmstudio/models/maker/m/m-Q4_K_M.gguf")
    for reference in ("ollama:smollm2", "maker/m", str(write(tmp_path / "x.gguf"))):
        with pytest.raises(ModelError, match="not edgeserve's to delete"):
            remove(reference)
    assert studio.is_file()


def test_the_list_for_people(home: Path) -> None:
    own = write(home / "own" / "mine.gguf")
    rows = list_rows(usable_bytes=3_000_000_000)
    assert rows[0].fits is True
    assert rows[-1].fits is False
    assert list_rows()[0].fits is None
    text = render_list(rows, find_local_models())
    assert "smollm2-135m" in text
    assert "98 MB" in text
    assert "too big" in text
    assert str(own) in text


def test_progress_lines() -> None:
    assert progress_line(Progress("m.gguf", "connect", 0, 100)) == "m.gguf  connecting"
    line = progress_line(Progress("m.gguf", "download", 1_200_000_000, 2_900_000_000, 31e6, 54.8))
    assert line == "m.gguf  41 %  1.2 GB of 2.9 GB  31.0 MB/s  55 s left"
    assert progress_line(Progress("m", "download", 5)) == "m"
    assert progress_line(Progress("m", "verify", 50, 100, None, 125.0)).endswith("2 min 5 s left")
