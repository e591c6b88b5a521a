"""Where the value of each setting comes from: typed flag > environment > configuration file > default.

Owns that order, the environment's names and the file's sections. An unknown key or a bad value is an error
that names its place: a setting that silently does nothing is worse than none. Knows nothing of what the
values are used for.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeserve.errors import UsageError
from edgeserve.folders import config_dir
from edgeserve.settings.kinds import BadValueError, Pairs, Shares, Switch, TextList, Value, format_value
from edgeserve.settings.table import SETTINGS, Command, Setting, env_name, settings_of

COMMANDS: tuple[Command, ...] = ("serve", "chat")
Typed = Mapping[str, bool | str | list[str] | None]
"""What was typed, by field: a switch's state, a text, or the texts of a repeated flag; None where nothing."""


@dataclass(frozen=True, slots=True)
class Given:
    """A value and its origin: "flag", the environment variable's name, or the file and section."""

    value: Value
    source: str


class Settings:
    """The settings of one command, each with its value and source."""

    def __init__(self, command: Command, given: Mapping[str, Given], defaults: Mapping[str, Value]) -> None:
        self.command = command
        self._given = dict(given)
        self._defaults = defaults

    def __getitem__(self, field: str) -> Value:
        """The value, by the name of the field that it fills."""
        return self._given[field].value if self.is_given(field) else self._defaults.get(field)

    def is_given(self, field: str) -> bool:
        """Whether anybody gave a value; one that means "as by default" counts as none."""
        return field in self._given and self._given[field].value is not None

    def source(self, field: str) -> str:
        return self._given[field].source if field in self._given else "default"

    def text(self, field: str) -> str:
        value = self[field]
        return value if isinstance(value, str) else ""

    def given_of(self, target: str) -> dict[str, Value]:
        """Fields and values of one target, only those that somebody gave."""
        fields = [setting.field for setting in settings_of(self.command) if setting.target == target]
        return {field: self[field] for field in fields if self.is_given(field)}

    def typed_of(self, *targets: str) -> list[Setting]:
        """The settings of these targets that stand on the command line."""
        return [
            setting
            for setting in settings_of(self.command)
            if setting.target in targets and self.source(setting.field) == "flag"
        ]

    def rows(self) -> Iterator[tuple[Setting, Value, str]]:
        """(setting, value, source) of every setting; keys are counted, never shown."""
        for setting in settings_of(self.command):
            value = self[setting.field]
            if setting.is_secret and value:
                number = len(value) if isinstance(value, tuple) else 1
                value = f"{number} key{'s' if number > 1 else ''}"
            yield setting, value, self.source(setting.field)


def gather(
    command: Command,
    typed: Typed,
    environ: Mapping[str, str],
    defaults: Mapping[str, Value],
    *,
    config_path: Path | None = None,
) -> Settings:
    """Read all sources. Raises UsageError, naming the source, for what cannot be understood."""
    path, must_exist = _config_path(config_path, environ)
    file = ConfigFile.read(path, must_exist=must_exist)
    given = file.section(command)
    given |= _from_environment(command, environ)
    given |= _from_flags(command, typed)
    if model := given.get("model"):
        # What the file says for one model is more particular than what it says for the command.
        of_model = file.model_section(command, str(model.value))
        given |= {field: item for field, item in of_model.items() if _is_weak(given.get(field), file)}
    return Settings(command, given, defaults)


def _is_weak(given: Given | None, file: ConfigFile) -> bool:
    return given is None or given.source.startswith(file.name)


def _from_flags(command: Command, typed: Typed) -> dict[str, Given]:
    found: dict[str, Given] = {}
    for setting in settings_of(command):
        value = typed.get(setting.field)
        if isinstance(value, bool):
            found[setting.field] = Given(value, "flag")
        elif value:
            text = ",".join(value) if isinstance(value, list) else value
            found[setting.field] = Given(parse(setting, text, setting.spelling), "flag")
    return found


def _from_environment(command: Command, environ: Mapping[str, str]) -> dict[str, Given]:
    found: dict[str, Given] = {}
    for setting in settings_of(command):
        for name, is_inverted in _environment_names(setting):
            if text := environ.get(name):
                value = parse(setting, text, name)
                found[setting.field] = Given(not value if is_inverted else value, name)
                break
        else:
            if name := next((name for name in _llama_off_names(setting) if name in environ), ""):
                found[setting.field] = Given(False, name)
    return found


def _environment_names(setting: Setting) -> Iterator[tuple[str, bool]]:
    """(name, whether it means the opposite), ours first."""
    yield from ((env_name(name), False) for name in setting.long_names)
    yield from ((env_name(name), True) for name in setting.off_names)
    yield from ((name, False) for name in setting.llama_env)


def _llama_off_names(setting: Setting) -> list[str]:
    """llama.cpp's LLAMA_ARG_NO_...: whatever its value, it switches off."""
    if not setting.off_flags:
        return []
    return [name.replace("LLAMA_ARG_", "LLAMA_ARG_NO_", 1) for name in setting.llama_env]


def parse(setting: Setting, text: str, where: str) -> Value:
    """The value that `text` stands for. Raises UsageError that names `where` and what is allowed."""
    try:
        return setting.kind.parse(text.strip())
    except BadValueError as error:
        shown = "the value" if setting.is_secret else repr(text)
        raise UsageError(f"{where}: {shown} {error}.", setting.kind.allowed) from None


# --- the configuration file --------------------------------------------------------------------------------


def _config_path(typed: Path | None, environ: Mapping[str, str]) -> tuple[Path, bool]:
    """The file, and whether somebody asked for it by name."""
    if typed is not None:
        return typed, True
    if named := environ.get("EDGESERVE_CONFIG"):
        return Path(named).expanduser(), True
    return default_config_path(), False


def default_config_path() -> Path:
    """config.toml in the user's configuration folder."""
    return config_dir() / "config.toml"


class ConfigFile:
    """A configuration file, checked as a whole: `[serve]`, `[chat]` and `[models."NAME"]`."""

    def __init__(self, path: Path, document: Mapping[str, Any]) -> None:
        self.path = path
        self._sections: dict[Command, dict[str, Given]] = {"serve": {}, "chat": {}}
        self._models: dict[str, dict[str, Given]] = {}
        for name, content in document.items():
            if name == "models":
                self._read_models(content)
            elif name in COMMANDS:
                taken = [setting for setting in SETTINGS if name in setting.commands]
                self._sections[name] = self._read(f"[{name}]", content, taken)
            else:
                hint = _near(name, [*COMMANDS, "models"]) or 'Sections are [serve], [chat], [models."NAME"].'
                raise UsageError(f"{path}: there is no section [{name}].", hint)

    @classmethod
    def read(cls, path: Path, *, must_exist: bool) -> ConfigFile:
        try:
            return cls(path, tomllib.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            if must_exist:
                raise UsageError(f"There is no configuration file {path}.") from None
            return cls(path, {})
        except tomllib.TOMLDecodeError as error:
            raise UsageError(f"{path} is not valid TOML: {error}.") from None
        except UnicodeDecodeError:
            raise UsageError(f"{path} is not a text in UTF-8.") from None
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror or error}.") from None

    @property
    def name(self) -> str:
        return str(self.path)

    def section(self, command: Command) -> dict[str, Given]:
        return dict(self._sections[command])

    def model_section(self, command: Command, model: str) -> dict[str, Given]:
        fields = {setting.field for setting in settings_of(command)}
        return {field: given for field, given in self._models.get(model, {}).items() if field in fields}

    def _read_models(self, content: object) -> None:
        if not isinstance(content, dict):
            raise UsageError(f"{self.path}: models must be sections.", 'Write [models."NAME"].')
        taken = [setting for setting in SETTINGS if setting.is_about_a_model]
        for model, keys in content.items():
            self._models[model] = self._read(f'[models."{model}"]', keys, taken)

    def _read(self, section: str, content: object, taken: list[Setting]) -> dict[str, Given]:
        if not isinstance(content, dict):
            raise UsageError(f"{self.path}: {section} must be a section, not a value.")
        found: dict[str, Given] = {}
        for key, raw in content.items():
            setting, is_inverted = self._setting(section, key, taken)
            value = self._value(setting, raw, f"{self.path}: {section} {key}")
            found[setting.field] = Given(not value if is_inverted else value, f"{self.path} {section}")
        return found

    def _setting(self, section: str, key: str, taken: list[Setting]) -> tuple[Setting, bool]:
        name = key.replace("_", "-")
        for setting in taken:
            if name in setting.long_names + setting.off_names:
                return setting, name in setting.off_names
        if any(name in setting.long_names + setting.off_names for setting in SETTINGS):
            raise UsageError(f"{self.path}: {key} has no meaning in {section}.", _belongs(name))
        names = [name for setting in taken for name in setting.long_names]
        raise UsageError(
            f"{self.path}: {section} has an unknown key {key}.",
            _near(name, names) or f"Known keys: {', '.join(setting.name for setting in taken)}.",
        )

    def _value(self, setting: Setting, raw: object, where: str) -> Value:
        if isinstance(raw, list) and isinstance(setting.kind, TextList | Shares | Pairs):
            if not all(isinstance(item, str | int | float) for item in raw):
                raise UsageError(f"{where}: the list must hold texts or numbers.", setting.kind.allowed)
            return parse(setting, ",".join(map(str, raw)), where)
        if isinstance(raw, bool):
            # A number given as true is a mistake, and must not be read as 1.
            return parse(setting, "on" if raw else "off", where)
        if isinstance(raw, int | float | str) and not (isinstance(setting.kind, Switch) and raw == ""):
            return parse(setting, str(raw), where)
        raise UsageError(f"{where}: this is no value for it.", setting.kind.allowed)


def _belongs(name: str) -> str:
    places = [
        f"[{command}]"
        for command in COMMANDS
        if any(name in setting.long_names + setting.off_names for setting in settings_of(command))
    ]
    return f"It belongs into {' or '.join(places)}."


def _near(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(names), n=2)
    return f"Did you mean {' or '.join(near)}?" if near else ""


def table(settings: Settings) -> list[str]:
    """Lines "name  value  source", aligned."""
    rows = [
        (setting.name, format_value(value, setting.kind) or "-", source)
        for setting, value, source in settings.rows()
    ]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return [f"{name:{widths[0]}}  {value:{widths[1]}}  {source}" for name, value, source in rows]
