"""Device profiles: what is known about a machine without having it, one TOML file each.

Owns the file format, reading, writing and listing. A figure that is not known is absent, never guessed; every
table of figures says where they come from. Knows nothing of models, of speed or of what fits.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from edgeserve.errors import UsageError
from edgeserve.resources import data_path

MEMORY_TYPES = ("unified", "discrete")
MEMORY_RULES = ("apple-working-set", "vram", "gpu-share", "host")


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """One device. Figures are the vendor's peaks, None where nobody has stated them.

    `memory_type` is "unified" (processor and accelerator share one memory, or there is no accelerator) or
    "discrete" (`memory_options_gib` is then the card's own memory). `memory_rule` names how much of it may be
    used (see device_memory.py), `usable_share` its parameter. `architecture` is the class that speeds are
    learned for, such as "ada" or "apple-m2". `fp16_matrix_tflops` and `int8_tops` are dense figures of matrix
    units. `performance_cores` leaves efficiency cores out.
    """

    key: str
    name: str
    vendor: str
    kind: str
    architecture: str
    backends: tuple[str, ...]
    memory_type: str
    memory_options_gib: tuple[float, ...]
    memory_rule: str
    memory_source: str
    usable_share: float | None = None
    bandwidth_gb_s: float | None = None
    bandwidth_source: str = ""
    fp32_tflops: float | None = None
    fp16_matrix_tflops: float | None = None
    int8_tops: float | None = None
    gpu_cores: int | None = None
    ai_note: str = ""
    compute_source: str = ""
    cores: str = ""
    performance_cores: int | None = None
    cpu_source: str = ""
    aliases: tuple[str, ...] = ()
    confidence: str = ""
    note: str = ""


def list_profiles(directory: Path | None = None) -> tuple[DeviceProfile, ...]:
    """All profiles that ship with edgeserve (or those in `directory`), sorted by key."""
    paths = sorted((directory or data_path("profiles")).glob("*.toml"))
    return tuple(load_profile(path) for path in paths)


def load_profile(path: Path) -> DeviceProfile:
    """Read one profile; the file's name without .toml is its key. Raises UsageError on a bad file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"The device profile {path} cannot be read.", str(error)) from error
    return parse_profile(text, path.stem)


def parse_profile(text: str, key: str) -> DeviceProfile:
    """A profile from TOML text. Raises UsageError that names the profile and the field."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"The device profile {key} is not valid TOML.", str(error)) from error
    top = _Table(key, "", data)
    cpu, memory, bandwidth, compute = (top.table(name) for name in ("cpu", "memory", "bandwidth", "compute"))
    profile = DeviceProfile(
        key=key,
        name=top.text("name"),
        vendor=top.text("vendor"),
        kind=top.text("kind"),
        architecture=top.text("architecture"),
        backends=top.texts("backends"),
        aliases=top.texts("aliases", required=False),
        confidence=top.text("confidence", required=False),
        note=top.text("note", required=False),
        memory_type=memory.choice("type", MEMORY_TYPES),
        memory_options_gib=memory.numbers("options_gib"),
        memory_rule=memory.choice("rule", MEMORY_RULES),
        usable_share=memory.number("usable_share"),
        memory_source=memory.text("source"),
        bandwidth_gb_s=bandwidth.number("gb_s"),
        bandwidth_source=bandwidth.text("source", required=bool(bandwidth.data)),
        fp32_tflops=compute.number("fp32_tflops"),
        fp16_matrix_tflops=compute.number("fp16_matrix_tflops"),
        int8_tops=compute.number("int8_tops"),
        gpu_cores=compute.integer("gpu_cores"),
        ai_note=compute.text("ai_note", required=False),
        compute_source=compute.text("source", required=bool(compute.data)),
        cores=cpu.text("cores", required=False),
        performance_cores=cpu.integer("performance_cores"),
        cpu_source=cpu.text("source", required=bool(cpu.data)),
    )
    for table in (top, cpu, memory, bandwidth, compute):
        table.refuse_unknown()
    return profile


class _Table:
    """One TOML table, read field by field; remembers what was asked for so that misspelt names are found."""

    def __init__(self, key: str, name: str, data: Mapping[str, object]) -> None:
        self.key = key
        self.name = name
        self.data = data
        self._asked: set[str] = set()

    def _get(self, field: str) -> object:
        self._asked.add(field)
        return self.data.get(field)

    def _wrong(self, field: str, wanted: str) -> UsageError:
        where = f"{self.name}.{field}" if self.name else field
        return UsageError(f"In the device profile {self.key}, {where} must be {wanted}.")

    def table(self, name: str) -> _Table:
        value = self._get(name)
        if value is not None and not isinstance(value, dict):
            raise self._wrong(name, "a table")
        return _Table(self.key, name, value or {})

    def text(self, field: str, *, required: bool = True) -> str:
        value = self._get(field)
        if value is None and not required:
            return ""
        if not isinstance(value, str) or (required and not value):
            raise self._wrong(field, "a text")
        return value

    def choice(self, field: str, choices: tuple[str, ...]) -> str:
        value = self.text(field)
        if value not in choices:
            raise self._wrong(field, "one of " + ", ".join(choices))
        return value

    def texts(self, field: str, *, required: bool = True) -> tuple[str, ...]:
        value = self._get(field)
        if value is None and not required:
            return ()
        if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
            raise self._wrong(field, "a list of texts")
        return tuple(value)

    def number(self, field: str) -> float | None:
        value = self._get(field)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self._wrong(field, "a number above 0")
        return float(value)

    def integer(self, field: str) -> int | None:
        value = self.number(field)
        if value is not None and value != int(value):
            raise self._wrong(field, "a whole number")
        return None if value is None else int(value)

    def numbers(self, field: str) -> tuple[float, ...]:
        value = self._get(field)
        if not isinstance(value, list) or not value:
            raise self._wrong(field, "a list of numbers")
        numbers = [_Table(self.key, self.name, {field: item}).number(field) for item in value]
        return tuple(sorted(number for number in numbers if number is not None))

    def refuse_unknown(self) -> None:
        for field in self.data:
            if field not in self._asked:
                raise self._wrong(field, "left out: no such field exists")


def profile_to_toml(profile: DeviceProfile) -> str:
    """The profile as a file that `parse_profile` reads back unchanged."""
    blocks = ["\n".join(_lines(profile, _TOP_FIELDS))]
    for table, fields in _TABLE_FIELDS.items():
        lines = list(_lines(profile, fields))
        if lines:
            blocks.append("\n".join([f"[{table}]", *lines]))
    return "\n\n".join(blocks) + "\n"


# TOML name -> attribute.
_TOP_FIELDS = {
    name: name
    for name in ("name", "vendor", "kind", "architecture", "backends", "aliases", "confidence", "note")
}
_TABLE_FIELDS = {
    "cpu": {"cores": "cores", "performance_cores": "performance_cores", "source": "cpu_source"},
    "memory": {
        "type": "memory_type",
        "options_gib": "memory_options_gib",
        "rule": "memory_rule",
        "usable_share": "usable_share",
        "source": "memory_source",
    },
    "bandwidth": {"gb_s": "bandwidth_gb_s", "source": "bandwidth_source"},
    "compute": {
        "fp32_tflops": "fp32_tflops",
        "fp16_matrix_tflops": "fp16_matrix_tflops",
        "int8_tops": "int8_tops",
        "gpu_cores": "gpu_cores",
        "ai_note": "ai_note",
        "source": "compute_source",
    },
}


def _lines(profile: DeviceProfile, fields: Mapping[str, str]) -> Iterator[str]:
    for name, attribute in fields.items():
        value = getattr(profile, attribute)
        if value not in (None, "", ()):
            # JSON's strings, numbers and flat lists are TOML's.
            yield f"{name} = {json.dumps(value, ensure_ascii=False)}"
