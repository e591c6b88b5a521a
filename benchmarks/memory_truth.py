"""Compare every memory figure with llama.cpp's own: recorded rows, dry runs, real loads. Prints one table.

    python benchmarks/memory_truth.py                 closed forms and estimates against 990 recorded rows
    python benchmarks/memory_truth.py --dry-run       and dry runs of the same rows
    python benchmarks/memory_truth.py --load          and 58 small models of many architectures, really loaded
    python benchmarks/memory_truth.py --json          the same as one JSON document

"exact" counts figures that are equal to the byte (dry runs that are known to be too low, of minimax-01 with
several sequences, are left out); "held" counts estimates whose interval holds the real
figure; "ratio" is the estimate over the real figure: 5th percentile, median and 95th percentile. Exit code 1
when a figure that should be exact is not.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edgeserve.gguf import GGUFHeader, read_header
from edgeserve.planner.measure import DryRunFailure, measure
from edgeserve.planner.memory import ModelMemory
from edgeserve.planner.report import MemoryReport
from edgeserve.planner.settings import Settings

TESTS = Path(__file__).resolve().parent.parent / "tests"

LOAD_SETTINGS = (
    Settings(n_ctx=512, swa_full=False),
    Settings(n_ctx=1024, n_seq_max=3, swa_full=False),
    Settings(n_ctx=700, n_seq_max=2, kv_unified=True, swa_full=False),
    Settings(n_ctx=512, flash_attn="off"),
    Settings(n_ctx=512, n_ubatch=64, type_k="q8_0", type_v="q8_0", swa_full=False),
    Settings(n_ctx=512, n_batch=128, n_ubatch=32, n_seq_max=4, n_outputs_max=0, swa_full=False),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One context: what llama.cpp said (None: it refused) beside what was planned, in bytes."""

    said: dict[str, int] | None
    planned: MemoryReport
    measured: MemoryReport | DryRunFailure | None = None

    @property
    def is_exact(self) -> bool:
        """Weights and context equal, or both sides refuse."""
        if self.said is None or self.planned.rejected is not None:
            return self.said is None and self.planned.rejected is not None
        host = self.planned.devices[0]
        return (host.model_bytes, host.context_bytes) == (self.said["model"], self.said["context"])

    @property
    def is_doubtful(self) -> bool:
        return isinstance(self.measured, MemoryReport) and self.measured.compute_source == "estimate"

    @property
    def is_measured_exactly(self) -> bool:
        if isinstance(self.measured, DryRunFailure):
            return self.said is None and self.measured.code == self.planned.rejection_code
        assert self.measured is not None and self.said is not None
        host = self.measured.devices[0]
        found = {"model": host.model_bytes, "context": host.context_bytes, "compute": host.compute_bytes}
        return found == self.said


@dataclass(frozen=True, slots=True)
class Summary:
    """One line of the table."""

    source: str
    models: int
    rows: int
    exact: int
    held: int
    estimated: int
    ratio: tuple[float, float, float]
    dry_runs: int
    dry_runs_exact: int


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--load", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        summaries = list(_summaries(Path(directory), options.dry_run, options.load))
    if options.json:
        print(json.dumps([asdict(summary) for summary in summaries]))
    else:
        _print_table(summaries)
    wrong = any(s.exact < s.rows or s.dry_runs_exact < s.dry_runs for s in summaries)
    return 1 if wrong else 0


def _summaries(directory: Path, dry_runs: bool, loads: bool) -> Iterator[Summary]:
    sys.path.insert(0, str(TESTS))
    zoo = importlib.import_module("zoo")
    recorded = json.loads((TESTS / "data" / "memory_truth" / "truth.json").read_text())["models"]
    for kind in ("tiny", "real-size"):
        names = [name for name in recorded if name.startswith(kind)]
        rows = []
        for name in names:
            header = zoo.truth_header(name.replace("/", "-"), directory)
            rows += _recorded_rows(header, recorded[name]["rows"], dry_runs)
        yield _summary(f"recorded, {kind}", len(names), rows)
    if loads:
        rows = []
        for _, path in zoo.zoo(directory):
            rows += _loaded_rows(read_header(path))
            path.unlink()
        yield _summary("loaded", len(zoo.RECIPES), rows)


def _recorded_rows(header: GGUFHeader, rows: Sequence[dict[str, Any]], dry_runs: bool) -> list[Row]:
    model = ModelMemory(header)
    all_settings = [Settings(**row["settings"], use_extra_bufts=False) for row in rows]
    results = measure(header, all_settings) if dry_runs else [None] * len(rows)
    return [
        Row(row["bytes"]["CPU"] if "bytes" in row else None, model.report(settings), result)
        for row, settings, result in zip(rows, all_settings, results, strict=True)
    ]


def _loaded_rows(header: GGUFHeader) -> list[Row]:
    model, dry = ModelMemory(header), measure(header, LOAD_SETTINGS)
    loaded = measure(header, LOAD_SETTINGS, allocate=True)
    rows = []
    for settings, real, result in zip(LOAD_SETTINGS, loaded, dry, strict=True):
        said = None
        if isinstance(real, MemoryReport):
            host = real.devices[0]
            said = {"model": host.model_bytes, "context": host.context_bytes, "compute": host.compute_bytes}
        rows.append(Row(said, model.report(settings), result))
    return rows


def _summary(source: str, models: int, rows: Sequence[Row]) -> Summary:
    estimated = [
        (row.planned.devices[0], row.said["compute"]) for row in rows if row.said is not None and row.is_exact
    ]
    ratios = sorted(host.compute_bytes / said for host, said in estimated)
    measured = [row for row in rows if row.measured is not None and not row.is_doubtful]
    return Summary(
        source=source,
        models=models,
        rows=len(rows),
        exact=sum(row.is_exact for row in rows),
        held=sum(host.compute_low_bytes <= said <= host.compute_high_bytes for host, said in estimated),
        estimated=len(estimated),
        ratio=(_percentile(ratios, 0.05), _percentile(ratios, 0.5), _percentile(ratios, 0.95)),
        dry_runs=len(measured),
        dry_runs_exact=sum(row.is_measured_exactly for row in measured),
    )


def _percentile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def _print_table(summaries: Sequence[Summary]) -> None:
    print(
        "source                models  rows  exact  estimate held  ratio (5 %, median, 95 %)  dry run exact"
    )
    for s in summaries:
        held = f"{s.held}/{s.estimated}"
        ratio = " ".join(f"{value:.2f}" for value in s.ratio)
        dry = f"{s.dry_runs_exact}/{s.dry_runs}" if s.dry_runs else "-"
        print(f"{s.source:<20} {s.models:>7} {s.rows:>5} {s.exact:>6} {held:>14} {ratio:>26} {dry:>14}")


if __name__ == "__main__":
    raise SystemExit(main())
