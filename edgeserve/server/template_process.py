"""The parent's side of the rendering process: start it, ask it, and end it when it takes too long.

Owns deadlines and restarts. Knows nothing of chat: messages go in as JSON, a prompt comes back. Calls block
and are meant for a worker thread, never the event loop or the engine's thread.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Self

import psutil

from edgeserve.errors import InvalidRequestError
from edgeserve.server.limits import Limits

MAX_MEMORY_BYTES = 768 << 20
_WATCH_INTERVAL_S = 0.05
_SCRIPT = Path(__file__).with_name("template_worker.py")
# What Python needs to start and to find Jinja; no keys or tokens go along.
_CHILD_ENVIRONMENT = (
    "PATH",
    "HOME",
    "PYTHONPATH",
    "PYTHONHOME",
    "LD_LIBRARY_PATH",
    "SYSTEMROOT",
    "APPDATA",
    "USERPROFILE",
)


class TemplateError(InvalidRequestError):
    """The template failed on this conversation, took too long, or made too much of it."""

    code = "template_error"


class TemplateProcess:
    """One template in one child process, started when needed. Thread-safe: renders take turns."""

    def __init__(self, source: str, limits: Limits) -> None:
        self._source = source
        self._limits = limits
        self._lock = threading.Lock()
        self._child: subprocess.Popen[str] | None = None

    def render(
        self, messages: list[dict[str, Any]], variables: dict[str, Any], *, add_generation_prompt: bool
    ) -> str:
        """The prompt. Raises TemplateError: does not compile, refuses, fails, or goes past a bound."""
        if len(self._source) > self._limits.max_template_chars:
            raise TemplateError(
                f"The chat template has {len(self._source)} characters;"
                f" at most {self._limits.max_template_chars} are read."
            )
        job = {"messages": messages, "variables": variables, "add_generation_prompt": add_generation_prompt}
        with self._lock:
            answer = self._ask(self._running(), job, self._limits.template_render_s)
        if "raised" in answer:
            raise TemplateError(f"The model's chat template refuses this conversation: {answer['raised']}")
        if "error" in answer:
            raise TemplateError(f"The model's chat template failed: {answer['error'].rstrip('.')}.")
        return str(answer["prompt"])

    def close(self) -> None:
        with self._lock:
            self._end()

    def _running(self) -> subprocess.Popen[str]:
        if self._child is not None and self._child.poll() is None:
            return self._child
        self._end()
        # -P: this script's folder must not shadow the standard library's modules.
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-X", "utf8", str(_SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in _CHILD_ENVIRONMENT if name in os.environ},
            encoding="utf-8",
        )
        set_up = {
            "source": self._source,
            "max_chars": self._limits.max_rendered_chars,
            "max_memory_bytes": MAX_MEMORY_BYTES,
            "max_s": self._limits.template_render_s,
        }
        answer = self._ask(self._child, set_up, self._limits.template_start_s)
        if "error" in answer:
            self._end()
            raise TemplateError(f"The chat template does not compile: {answer['error'].rstrip('.')}.")
        return self._child

    def _ask(self, child: subprocess.Popen[str], job: dict[str, Any], max_s: float) -> dict[str, Any]:
        assert child.stdin is not None and child.stdout is not None
        with Watchdog(child, max_s) as watchdog:
            try:
                child.stdin.write(json.dumps(job) + "\n")
                child.stdin.flush()
                line = child.stdout.readline()
            except OSError:
                line = ""
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        self._end()
        raise TemplateError(f"The model's chat template {watchdog.reason or 'ended its process'}.")

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        child.kill()
        child.wait()
        for stream in (child.stdin, child.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


class Watchdog:
    """Kills a child that takes too long or too much: that is what ends a blocking read of its answer."""

    def __init__(self, child: subprocess.Popen[str], max_s: float) -> None:
        self._child = child
        self._max_s = max_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="template-watchdog", daemon=True)
        self.reason = ""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        deadline_s = time.monotonic() + self._max_s
        while not self._over.wait(_WATCH_INTERVAL_S):
            if time.monotonic() > deadline_s:
                self.reason = f"took longer than {self._max_s:g} s"
            elif self._memory_bytes() > MAX_MEMORY_BYTES:
                self.reason = "wants too much memory"
            if self.reason:
                self._child.kill()
                return

    def _memory_bytes(self) -> int:
        """The system's own limit does not exist or does not hold everywhere; this does, a little later."""
        try:
            return int(psutil.Process(self._child.pid).memory_info().rss)
        except psutil.Error:
            return 0
