"""A child process that works for a command: asked once by JSON, answering by lines of JSON.

Owns both ends of the talk. The child ends when its parent does, however that ends, and Ctrl-C is the
parent's alone. What it raises is raised in the parent, with its exit code. Does not know the work.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self

from edgeserve.errors import EdgeserveError

_END_S = 10.0

Json = dict[str, Any]
Work = Callable[[Mapping[str, Any], Callable[[Mapping[str, Any]], None]], None]
"""The child's part: gets the request, and a function that sends an answer."""


class Child:
    """`with Child("edgeserve.some_module", request) as child:`, then `for answer in child.answers()`."""

    def __init__(self, module: str, request: Mapping[str, Any], *, is_verbose: bool = False) -> None:
        self._module = module
        self._request = request
        self._is_verbose = is_verbose
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", self._module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if self._is_verbose else subprocess.DEVNULL,
            text=True,
            # In a session of its own a Ctrl-C at the terminal does not reach it: the parent wants to report.
            start_new_session=True,
        )
        assert self._process.stdin is not None
        # One that is dead already shows when its answers are read.
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(self._request), file=self._process.stdin, flush=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def answers(self) -> Iterator[Json]:
        """Until the child ends. Raises what it raised, or that it died."""
        process = self._process
        assert process is not None
        assert process.stdout is not None
        for line in process.stdout:
            answer: Json = json.loads(line)
            if "error" in answer:
                failure = EdgeserveError(answer["error"], answer["hint"])
                failure.exit_code = answer["exit_code"]
                raise failure
            yield answer
        if code := process.wait():
            how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
            raise EdgeserveError(f"The child process {how}.", "-v shows what it says.")


def answer_parent(work: Work) -> int:
    """The child's `main`: do the work, tell what goes wrong, and return the exit code."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever is printed must not get between
    request = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def tell(answer: Mapping[str, Any]) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    try:
        work(request, tell)
    except EdgeserveError as error:
        tell({"error": error.message, "hint": error.hint, "exit_code": error.exit_code})
    return 0


def _end_with_parent() -> None:
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)
