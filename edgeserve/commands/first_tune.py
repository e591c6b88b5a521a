"""The short measurement at the first start of a model on a machine: which settings are fastest here.

Owns when it is made, what is said meanwhile on standard error, and how it is skipped. What is measured and
chosen is tune.py's.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from edgeserve.commands.planned import known_tuning
from edgeserve.config import EngineConfig
from edgeserve.engine.tuning import tuning_path, write_tunings
from edgeserve.errors import EdgeserveError
from edgeserve.ink import can_redraw, ink_for
from edgeserve.llama import Model
from edgeserve.settings.sources import Settings
from edgeserve.settings.values import engine_config
from edgeserve.tune import SHORT_S, Deadline, tune

_ERASE_LINE = "\r\x1b[K"
_DECIDED = ("flash_attn", "n_threads")
_BY_HAND = ("override_tensor", "tensor_split", "devices")


class FirstTune:
    """For starts that go on for a while: a server, a conversation. One answer is over before it would pay."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._redraws = can_redraw(self._stream, os.environ)
        self._ink = ink_for(self._stream, os.environ)
        self._is_skipped = threading.Event()
        self._is_running = False

    def skip(self) -> bool:
        """End the measurement without a result, from any thread: the start goes on with the defaults. False
        when nothing is being measured, or when it is ending already: that was meant for the start."""
        if not self._is_running or self._is_skipped.is_set():
            return False
        self._is_skipped.set()
        return True

    def run_if_due(self, settings: Settings, model: Model, config: EngineConfig) -> bool:
        """Measure and keep what was found, unless it is known, decided by hand or not wanted. `config` is
        what would start without it. Returns whether something new is kept."""
        given = engine_config(settings, Path(config.model_path))
        if not is_wanted(settings, given):
            return False
        self._is_running = True
        try:
            return self._measure(model, config, given)
        finally:
            self._is_running = False

    def _measure(self, model: Model, config: EngineConfig, given: EngineConfig) -> bool:
        self._begin()
        deadline = Deadline(SHORT_S, self._is_skipped.is_set)
        # A start must not fail for want of a measurement.
        with suppress(EdgeserveError, OSError):
            result = tune(model, config, self._show, deadline, is_short=True)
            if not self._is_skipped.is_set():
                kept_at = tuning_path(config.model_path, given)
                write_tunings(kept_at, result.tunings, result.table, result.reasons)
                self._end(f"tuned      {' '.join(result.reasons)}")
                return True
        self._end("tuned      not measured: the defaults are used")
        return False

    def _begin(self) -> None:
        text = f"measuring once which settings are fastest here, {SHORT_S:g} s at most; Ctrl-C skips it"
        self._write(f"tuning     {text}\n")

    def _show(self, part: str) -> None:
        if self._redraws:
            self._write(_ERASE_LINE + self._ink(f"           {part}", "dim"))

    def _end(self, text: str) -> None:
        self._write((_ERASE_LINE if self._redraws else "") + text + "\n")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def is_wanted(settings: Settings, given: EngineConfig) -> bool:
    """Whether there is something to find out: not when all was decided, placed by hand, or measured."""
    if settings["tune"] is False or any(settings.is_given(name) for name in _BY_HAND):
        return False
    if all(settings.is_given(name) for name in _DECIDED):
        return False
    return known_tuning(given) is None
