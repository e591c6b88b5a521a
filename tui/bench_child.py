"""The child process that measures for the bench screen: `python -m tui.bench_child`.

A client that shares a thread with a screen would measure the screen. Reads one JSON request from standard
input, writes one JSON line for each piece of news, and leaves the report's files. An interrupt gives the
partial result, as `edgeserve bench` does.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from edgeserve.bench.read_options import read_options
from edgeserve.bench.report import text_report, write_files
from edgeserve.bench.session import run_bench
from edgeserve.errors import EdgeserveError

REPORT = "report.txt"


def main() -> int:
    """The exit code: 0 done, else the error's own."""
    request = json.loads(sys.stdin.readline())
    try:
        _measure(request)
    except EdgeserveError as error:
        _tell(error=str(error))
        return error.exit_code
    return 0


def _measure(request: dict[str, Any]) -> None:
    (options,) = read_options(request["typed"], request["url"], request["api_key"], None)
    result = run_bench(options, lambda text: _tell(progress=text), request["command"])
    directory = Path(request["directory"])
    write_files(result, directory)
    (directory / REPORT).write_text(text_report(result, request["width"]), encoding="utf-8")
    _tell(done=str(directory), is_partial=result.is_partial)


def _tell(**news: object) -> None:
    print(json.dumps(news), flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
