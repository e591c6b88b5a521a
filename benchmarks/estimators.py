"""Cache and recurrent state as edgeserve and others have them: the table in the README.

    python benchmarks/estimators.py                      all rows, as a Markdown table
    python benchmarks/estimators.py lfm2-1.2b 131072     one model at one context

MiB for one sequence, an f16 cache, flash attention and windows kept short. The models are headers of real
shapes among the test data, and edgeserve's figure comes from these alone. "llama.cpp" is its own load without
memory (a dry run); llama-fit-params makes the same load. gguf-parser's errors are those of the formulas of
gguf-parser-go v0.25 (file_estimate__llamacpp.go) for the same headers; neither program was run. Exit code 1
when edgeserve's figure is not llama.cpp's.
"""

from __future__ import annotations

import argparse
import gzip
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from edgeserve.gguf import read_header
from edgeserve.gguf_header import GGUFHeader
from edgeserve.planner.measure import DryRunFailure, measure
from edgeserve.planner.memory import plan_memory
from edgeserve.planner.settings import Settings

HEADERS = Path(__file__).resolve().parent.parent / "tests" / "data" / "memory_truth" / "headers"
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Published:
    """One row of the table. `gguf_parser`: that program's error in percent of llama.cpp's allocation."""

    name: str
    n_ctx: int
    gguf_parser: int
    why: str = ""


PUBLISHED = (
    Published("llama3.1-8b", 131072, 0, "plain grouped heads"),
    Published("gemma2-9b", 8192, 12, "windowed layers keep n_swa + n_ubatch cells"),
    Published("gpt-oss-20b", 131072, 99, "every other layer is windowed"),
    Published("mamba2-2.7b", 8192, -100, "a state and no cache; gguf-parser has a figure of its own for it"),
    Published("nemotron-h-8b", 131072, -100, "few layers attend, the others keep a state"),
    Published("lfm2-1.2b", 131072, -100, "KV heads by layer, the first has none"),
    Published("qwen3-next-80b", 131072, 290, "one layer in four attends"),
)


@dataclass(frozen=True, slots=True)
class Row:
    """Bytes of cache and state. `dry_run_bytes` None: llama.cpp gave no figure."""

    published: Published
    own_bytes: int
    dry_run_bytes: int | None

    @property
    def cells(self) -> tuple[str, ...]:
        one = self.published
        said = self.dry_run_bytes
        dry_run = "n/a" if said is None else f"{said / MIB:,.1f}"
        command = f"`python benchmarks/estimators.py {one.name} {one.n_ctx}`"
        return (
            one.name, f"{one.n_ctx:,}", dry_run, f"{self.own_bytes / MIB:,.1f}", "the same load",
            percent(one.gguf_parser), one.why, command,
        )  # fmt: skip


HEAD = ("model", "context", "llama.cpp", "edgeserve", "llama-fit-params", "gguf-parser", "why", "command")


def percent(value: int) -> str:
    return f"{value:+d} %".replace("-", "−")


def row_of(published: Published) -> Row:
    settings = Settings(n_ctx=published.n_ctx, flash_attn="on", swa_full=False)
    with tempfile.TemporaryDirectory() as folder:
        header = unpacked(published.name, Path(folder))
        own = plan_memory(header, settings).context_bytes
        return Row(published, own, _said(header, settings))


def _said(header: GGUFHeader, settings: Settings) -> int | None:
    (answer,) = measure(header, [settings])
    return None if isinstance(answer, DryRunFailure) else answer.context_bytes


def unpacked(name: str, folder: Path) -> GGUFHeader:
    path = folder / f"{name}.gguf-header"
    path.write_bytes(gzip.decompress((HEADERS / f"real-size-{name}.gguf-header.gz").read_bytes()))
    return read_header(path)


def lines(rows: list[Row]) -> Iterator[str]:
    yield f"| {' | '.join(HEAD)} |"
    yield "|---|---:|---:|---:|---:|---:|---|---|"
    yield from (f"| {' | '.join(row.cells)} |" for row in rows)


def main() -> int:
    names = sorted({one.name for one in PUBLISHED})
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", nargs="?", choices=names)
    parser.add_argument("n_ctx", nargs="?", type=int)
    options = parser.parse_args()
    wanted = [
        one for one in PUBLISHED if options.name in (None, one.name) and options.n_ctx in (None, one.n_ctx)
    ]
    if not wanted:
        parser.error(f"No published figure of {options.name} at {options.n_ctx}.")
    rows = [row_of(one) for one in wanted]
    print("\n".join(lines(rows)))
    return int(any(row.dry_run_bytes not in (None, row.own_bytes) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
