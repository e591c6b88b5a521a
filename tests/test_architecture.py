"""The house rules that a machine can check: imports, types, style, sizes, and what stands where."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted([*ROOT.glob("edgeserve/**/*.py"), *ROOT.glob("tui/**/*.py")])
TOP_LEVEL = {
    *("pyproject.toml", "edgeserve", "tui", "profiles", "tests", "models.txt", "README.md"),
    *("Makefile", "LICENSE", "CHANGELOG.md", "docs", "benchmarks"),
}
MAX_LINES = 400


def tool(*arguments: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


def tracked_files() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    return listed.stdout.split("\n")[:-1]


def test_imports_point_down() -> None:
    command = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports())"
    result = subprocess.run(
        [sys.executable, "-c", command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_lint_and_format() -> None:
    tool("ruff", "check", ".")
    tool("ruff", "format", "--check", ".")


def test_types() -> None:
    tool("mypy")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_is_one_idea(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_LINES
    if path.name == "__init__.py":
        assert not re.search(r"^\s*(import|from)\s", text, re.MULTILINE)
    else:
        assert text.startswith('"""'), "a module says what it owns"


def test_only_llama_py_imports_the_runtime() -> None:
    importing = [
        path for path in SOURCES if re.search(r"^\s*(import|from) llama_cpp", path.read_text(), re.M)
    ]
    assert importing == []
    assert 'import_module("llama_cpp' in (ROOT / "edgeserve/llama.py").read_text()
    others = [path for path in SOURCES if "import_module" in path.read_text() and path.name != "llama.py"]
    assert others == []


def test_the_top_level_is_what_it_should_be() -> None:
    names = {name.split("/")[0] for name in tracked_files()}
    assert {name for name in names if not name.startswith(".")} <= TOP_LEVEL


def test_the_readme_names_every_package_and_file() -> None:
    tree = re.search(r"```\nedgeserve/\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert tree, "the README draws the tree"
    named = set(re.findall(r"[\w/]+\.py", tree.group(1)))
    missing = {path.name for path in SOURCES if path.name != "__init__.py"} - {
        name.split("/")[-1] for name in named
    }
    assert not missing, f"not in the README's tree: {sorted(missing)}"
    gone = {name for name in named if not list(ROOT.glob(f"**/{name}"))}
    assert not gone, f"in the README's tree, but not there: {sorted(gone)}"


def test_light_modules_stay_light() -> None:
    code = (
        "import sys; import edgeserve.planner.memory, edgeserve.gguf, edgeserve.client, edgeserve.metrics,"
        " edgeserve.engine.scheduler;"
        " print([m for m in ('llama_cpp', 'textual', 'starlette') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
