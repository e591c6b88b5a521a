"""A terminal with nobody at it: runs the chat on a pseudo-terminal and plays keys into it."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
DEADLINE_S = 20.0
_ESCAPES = re.compile(r"\x1b(\[[0-9;?]*[ -/]*[@-~]|\][^\x07]*\x07|[=>()][0-9A-B]?)")

_PROGRAM = """
import sys
from pathlib import Path
from edgeserve.chat.terminal_chat import ChatOptions, message_given, run_chat, run_once
url, history, options, prompt = sys.argv[1], Path(sys.argv[2]), eval(sys.argv[3]), eval(sys.argv[4])
options = ChatOptions(history_path=history, **options)
message = message_given(prompt)
sys.exit(run_chat(url, None, options) if message is None else run_once(url, None, options, message))
"""


def command(url: str, history: Path, options: Mapping[str, object], prompt: str | None) -> list[str]:
    return [sys.executable, "-c", _PROGRAM, url, str(history), repr(dict(options)), repr(prompt)]


def run_piped(
    url: str,
    tmp_path: Path,
    *,
    stdin: bytes | None = b"",
    prompt: str | None = None,
    environ: Mapping[str, str] | None = None,
    **options: object,
) -> subprocess.CompletedProcess[bytes]:
    """The chat without a terminal."""
    return subprocess.run(
        command(url, tmp_path / "history", options, prompt),
        input=stdin,
        capture_output=True,
        timeout=DEADLINE_S,
        cwd=ROOT,
        env={**os.environ, **(environ or {})},
        check=False,
    )


class Terminal:
    """The screen side of a pseudo-terminal. `seen` is all that was written to it, escape codes included."""

    def __init__(self, process: subprocess.Popen[bytes], master: int) -> None:
        self._process = process
        self._master = master
        self._at = 0
        self.seen = ""
        self._bytes = b""

    def send(self, keys: str | bytes) -> None:
        os.write(self._master, keys.encode() if isinstance(keys, str) else keys)

    def wait_for(self, text: str) -> str:
        """Read until `text` shows up behind what was waited for before; what came up to it, without codes."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            shown = _ESCAPES.sub("", self.seen)
            found = shown.find(text, self._at)
            if found >= 0:
                before, self._at = shown[self._at : found], found + len(text)
                return before
            if not self._read(deadline):
                raise AssertionError(f"{text!r} did not appear; seen: {shown[self._at :]!r}")

    def interrupt(self) -> None:
        """Ctrl-C, as the terminal's driver or the editor gets it."""
        self.send("\x03")

    def exit_code(self) -> int:
        """Wait for the end."""
        deadline = time.monotonic() + DEADLINE_S
        while self._read(deadline):
            pass
        return self._process.wait(timeout=DEADLINE_S)

    def _read(self, deadline: float) -> bool:
        ready, _, _ = select.select([self._master], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return False
        with contextlib.suppress(OSError):  # EIO: the other side is gone
            if data := os.read(self._master, 65536):
                self._bytes += data
                self.seen = self._bytes.decode("utf-8", "replace").replace("\r\n", "\n")
                return True
        return False


@contextlib.contextmanager
def terminal(
    url: str,
    tmp_path: Path,
    *,
    prompt: str | None = None,
    environ: Mapping[str, str] | None = None,
    columns: int = 120,
    **options: object,
) -> Iterator[Terminal]:
    """The chat on a terminal of `columns` x 40."""
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (40, columns))
    process = subprocess.Popen(
        command(url, tmp_path / "history", options, prompt),
        stdin=slave,
        stdout=slave,
        stderr=slave,
        cwd=ROOT,
        env={**os.environ, "TERM": "xterm-256color", "NO_COLOR": "", **(environ or {})},
        # Its own session with this terminal as the controlling one, so that Ctrl-C becomes SIGINT.
        preexec_fn=lambda: _take_terminal(slave),
    )
    os.close(slave)
    try:
        yield Terminal(process, master)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait()
        os.close(master)


def _take_terminal(slave: int) -> None:
    import fcntl

    os.setsid()
    fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
