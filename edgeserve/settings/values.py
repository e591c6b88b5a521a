"""From settings to the frozen configurations that engine and server are built from, and their defaults.

Owns which dataclass a setting fills, and the few settings that name a file. Knows nothing of sources.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgeserve.config import EngineConfig, ServerConfig
from edgeserve.engine.sampling_params import SamplingParams
from edgeserve.errors import UsageError
from edgeserve.settings.kinds import Value
from edgeserve.settings.table import Command

if TYPE_CHECKING:
    from edgeserve.settings.sources import Settings

_CHAT_DEFAULTS: dict[str, Value] = {"n_seq_max": 1}
"""A chat has one conversation: all the context is its own."""


def defaults_of(command: Command) -> dict[str, Value]:
    """Defaults by field, as the dataclasses have them."""
    found: dict[str, Value] = {
        "model": None,
        "offline": False,
        "verbose": False,
        "force": False,
        "tune": True,
    }
    if command == "chat":
        found |= {"plain": False, "timings_per_token": False}
    for config in (EngineConfig, ServerConfig, SamplingParams):
        for field in fields(config):
            if field.default is not MISSING:
                # An empty text or list is how these classes say that there is none.
                found[field.name] = field.default or None if field.default in ("", ()) else field.default
    return found | (_CHAT_DEFAULTS if command == "chat" else {})


def engine_config(settings: Settings, model_path: Path) -> EngineConfig:
    """Raises UsageError when settings contradict each other."""
    defaults = _CHAT_DEFAULTS if settings.command == "chat" else {}
    given: dict[str, Any] = {**defaults, **settings.given_of("engine")}
    return EngineConfig(str(model_path), **given)


def server_config(settings: Settings) -> ServerConfig:
    """Raises UsageError when a file that a setting names cannot be used."""
    given: dict[str, Any] = settings.given_of("server")
    if key_file := given.pop("api_key_file", None):
        given["api_keys"] = (*given.get("api_keys", ()), *_keys_in(Path(key_file).expanduser()))
    if template_file := given.pop("chat_template", None):
        given["chat_template"] = _read(Path(template_file).expanduser(), "chat template")
    return ServerConfig(**given, request_defaults=sampling_options(settings))


def sampling_options(settings: Settings) -> dict[str, float | int]:
    """The sampling options that were given, by SamplingParams field."""
    values = settings.given_of("sampling").items()
    return {field: value for field, value in values if isinstance(value, int | float)}


def _keys_in(path: Path) -> tuple[str, ...]:
    keys = tuple(line.strip() for line in _read(path, "API key file").splitlines() if line.strip())
    if not keys:
        raise UsageError(f"The API key file {path} is empty.", "`edgeserve key new` makes a key.")
    return keys


def _read(path: Path, what: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text in UTF-8"
        raise UsageError(f"The {what} {path} cannot be read: {reason}.") from None
