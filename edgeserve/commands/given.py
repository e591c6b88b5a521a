"""What was given to a command, from all sources, and how `--print-config` shows it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from edgeserve.errors import UsageError
from edgeserve.settings.sources import Settings, gather, table
from edgeserve.settings.table import Command
from edgeserve.settings.values import defaults_of


def read_settings(
    command: Command,
    reference: str | None,
    typed: Mapping[str, bool | str | list[str] | None],
    config: Path | None,
) -> Settings:
    """All settings of a command. The positional model and -m say the same. Raises UsageError."""
    if reference and typed.get("model") not in (None, reference):
        raise UsageError(f"Two models were given: {reference} and {typed['model']}.", "One server has one.")
    typed = {**typed, "model": reference or typed.get("model")}
    return gather(command, typed, os.environ, defaults_of(command), config_path=config)


def config_lines(settings: Settings, *, as_json: bool) -> list[str]:
    """Name, value and source of every setting; keys are counted, never shown."""
    if not as_json:
        return table(settings)
    rows = {setting.name: {"value": value, "source": source} for setting, value, source in settings.rows()}
    return [json.dumps(rows, indent=1)]
