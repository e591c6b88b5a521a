"""The README's comparison with other estimators is what its script prints."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()


def printed(*typed: str) -> list[str]:
    """Lines of the script's table; it fails when a figure of ours is not llama.cpp's."""
    command = [sys.executable, "-X", "utf8", "benchmarks/estimators.py", *typed]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", check=True)
    return done.stdout.splitlines()


def test_the_readme_has_the_table_and_each_row_its_command() -> None:
    table = printed()
    start = README.index(table[0])
    assert README[start : start + len(table)] == table
    assert len(table) > 6
    row = table[-1]
    typed = row.rsplit("estimators.py ", 1)[1].split("`")[0].split()
    assert printed(*typed) == [*table[:2], row]
