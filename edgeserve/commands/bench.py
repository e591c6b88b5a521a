"""`edgeserve bench`: measure a server that runs already, or one that is started for the run.

Owns the start and what goes where: results to standard output, progress to standard error, files to --out.
After Ctrl-C what was measured is shown, and the exit code is 130.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from edgeserve.bench import compare, engine_gap, read_options, report
from edgeserve.bench.options import BenchOptions
from edgeserve.bench.results import BenchResult, summary_json
from edgeserve.bench.session import ProgressLine, run_bench
from edgeserve.bench.thresholds import Condition, check_thresholds
from edgeserve.commands import engine_bench
from edgeserve.commands.child_server import ChildServer, ServeCommand
from edgeserve.commands.given import read_settings
from edgeserve.commands.model_file import find, reference_of
from edgeserve.errors import UsageError
from edgeserve.settings.bench_flags import BENCH_FLAGS

EXIT_INTERRUPTED = 130
SET_SCHEMA = "edgeserve-bench-set/1"
_KEY_ENV = "EDGESERVE_API_KEY"
_ENGINE_ONLY = frozenset({"npp", "ntg", "npl", "pps"})

Typed = Mapping[str, bool | str | list[str] | None]


def run(reference: str | None, typed: Typed, config: Path | None, *, as_json: bool) -> int:
    """The exit code. Raises UsageError before anything starts, and what finding or reaching a server
    raises."""
    if typed.get("engine"):
        return _engine_alone(reference, typed, config, as_json=as_json)
    _refuse(typed, _ENGINE_ONLY, "an option of --engine.")
    url = typed.get("url")
    out = _out(typed)
    key = str(typed.get("api_key") or os.environ.get(_KEY_ENV) or "") or None
    if isinstance(url, str):
        model = str(reference or typed.get("model") or "") or None
        planned = read_options.read_options(typed, url, key, model)
        _refuse_engine_settings(reference, typed, config)
        return _measure(planned, out, as_json=as_json)
    # Everything that can be wrong in the options is said before a model is loaded.
    planned = read_options.read_options(typed, "http://127.0.0.1", None, None)
    with _own_server(reference, typed, config) as server:
        planned = tuple(
            replace(
                options, url=server.url, api_key=server.key, against_api_key=options.against_api_key or key
            )
            for options in planned
        )
        return _measure(planned, out, as_json=as_json)


def _engine_alone(reference: str | None, typed: Typed, config: Path | None, *, as_json: bool) -> int:
    others = {flag.field for flag in BENCH_FLAGS} - _ENGINE_ONLY - {"engine", "repeats", "seed", "out"}
    _refuse(typed, others, "not possible with --engine, which has no requests.")
    points = read_options.read_points(typed)
    settings = read_settings("serve", reference, typed, config)
    command = ServeCommand(reference, typed, config, is_verbose=settings["verbose"] is True)
    return engine_bench.run(command, points, _out(typed), as_json=as_json)


def _refuse(typed: Typed, fields: Collection[str], why: str) -> None:
    names = [flag.name for flag in BENCH_FLAGS if flag.field in fields and typed.get(flag.field)]
    if names:
        raise UsageError(f"--{', --'.join(names)}: {why}", "--help shows what goes together.")


def _out(typed: Typed) -> Path | None:
    return Path(str(typed["out"])) if typed.get("out") else None


def _refuse_engine_settings(reference: str | None, typed: Typed, config: Path | None) -> None:
    settings = read_settings("serve", reference, typed, config)
    if misplaced := settings.typed_of("engine"):
        names = ", ".join(setting.spelling for setting in misplaced)
        raise UsageError(f"{names}: not possible for a server that runs already.", "Leave it out, or --url.")


@contextmanager
def _own_server(reference: str | None, typed: Typed, config: Path | None) -> Iterator[ChildServer]:
    settings = read_settings("serve", reference, typed, config)
    # Here, not in the child: a download shows how far it is.
    find(settings)
    progress = ProgressLine(sys.stderr, dict(os.environ))
    progress(f"loading {reference_of(settings)}")
    command = ServeCommand(reference, typed, config, is_verbose=settings["verbose"] is True)
    with ChildServer(command) as server:
        progress.clear()
        for note in server.notes:
            print(note, file=sys.stderr)
        yield server


@dataclass(frozen=True, slots=True)
class Output:
    """Where results go: text at once, JSON as one document at the end, files into `directory`."""

    as_json: bool
    directory: Path | None
    is_several: bool

    def show(self, result: BenchResult) -> None:
        if not self.as_json:
            print(report.text_report(result), flush=True)
        if self.directory is not None:
            place = self.directory / result.scenario if self.is_several else self.directory
            for path in report.write_files(result, place):
                print(path, file=sys.stderr)

    def end(self, results: Sequence[BenchResult]) -> None:
        if not self.as_json or not results:
            return
        documents = [summary_json(result) for result in results]
        document = {"schema": SET_SCHEMA, "results": documents} if self.is_several else documents[0]
        print(json.dumps(document, indent=1, ensure_ascii=False))


def _measure(planned: Sequence[BenchOptions], out: Path | None, *, as_json: bool) -> int:
    progress = ProgressLine(sys.stderr, dict(os.environ))
    output = Output(as_json, out, is_several=len(planned) > 1)
    results: list[BenchResult] = []
    is_interrupted = False
    try:
        for options in planned:
            try:
                result = run_bench(options, progress)
            finally:
                progress.clear()
            results.append(result)
            output.show(result)
            if is_interrupted := result.is_partial:
                break
    except KeyboardInterrupt:
        # Before the first request of a scenario: there is nothing of it to show.
        is_interrupted = True
    finally:
        # An error in a later scenario takes nothing from the earlier ones.
        output.end(results)
    if is_interrupted:
        return EXIT_INTERRUPTED
    _judge(results, planned[0].fail_if)
    return 0


def _judge(results: Sequence[BenchResult], conditions: Sequence[str]) -> None:
    """A condition may name a figure of any of the scenarios."""
    together = replace(results[0], cases=tuple(case for result in results for case in result.cases))
    check_thresholds(together, [Condition.parse(text) for text in conditions])


def run_compare(first: Path, second: Path, *, as_json: bool) -> int:
    """Two summary.json, or the folders that hold them; or an engine.json and a summary.json."""
    if engine_gap.is_engine_result(first):
        rows = engine_gap.gap_rows(engine_gap.read_engine(first), compare.read_summary(_summary_path(second)))
        print(
            json.dumps({"rows": rows}, indent=1) if as_json else report.text_table(engine_gap.gap_table(rows))
        )
        return 0
    a, b = (compare.read_summary(_summary_path(path)) for path in (first, second))
    found = compare.compare(a, b)
    if not as_json:
        print(report.comparison_text(found), end="")
        return 0
    ratios = [{**asdict(row), "is_within_noise": row.ratio.is_within_noise} for row in found.rows]
    print(json.dumps({"rows": ratios, "warnings": list(found.warnings)}, indent=1, ensure_ascii=False))
    return 0


def _summary_path(path: Path) -> Path:
    return path / "summary.json" if path.is_dir() else path
