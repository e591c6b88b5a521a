"""`edgeserve devices`: the machines that a plan can be made for without having them, and their figures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from edgeserve.planner.device import DeviceProfile, list_profiles
from edgeserve.planner.device_search import DeviceChoice, find_profile

_UNKNOWN = "n/a"


def run(name: str | None, *, as_json: bool) -> int:
    """All profiles, or the one that a name leads to. Raises UsageError, with near names, when none does."""
    if name is None:
        profiles = list_profiles()
        print(json.dumps([asdict(each) for each in profiles], indent=1) if as_json else listing(profiles))
    else:
        choice = find_profile(name)
        print(json.dumps(asdict(choice), indent=1) if as_json else "\n".join(details(choice)))
    return 0


def listing(profiles: Sequence[DeviceProfile]) -> str:
    """A line a device: key, name, memory, bandwidth. Keys and names may be given to `edgeserve plan`."""
    rows = [(each.key, each.name, memory_text(each), bandwidth_text(each)) for each in profiles]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]])
        for row in rows
    )


def memory_text(profile: DeviceProfile) -> str:
    sizes = ", ".join(f"{size:g}" for size in profile.memory_options_gib)
    return f"{sizes} GiB {profile.memory_type}"


def bandwidth_text(profile: DeviceProfile) -> str:
    return f"{profile.bandwidth_gb_s:,.0f} GB/s" if profile.bandwidth_gb_s else _UNKNOWN


def details(choice: DeviceChoice) -> list[str]:
    """What is known of one device. The source of each figure is in the JSON document."""
    profile = choice.profile
    rows = [
        ("device", f"{profile.name} ({profile.key})"),
        ("backends", ", ".join(profile.backends)),
        ("memory", memory_text(profile)),
        ("bandwidth", bandwidth_text(profile)),
        ("compute", compute_text(profile)),
        ("cores", profile.cores or _UNKNOWN),
        ("confidence", profile.confidence or _UNKNOWN),
        ("note", profile.note),
        ("or", f"{', '.join(choice.others)}: the name means these as well" if choice.others else ""),
    ]
    return [f"{label:12}{text}" for label, text in rows if text]


def compute_text(profile: DeviceProfile) -> str:
    """Peaks as the vendor states them, dense."""
    figures = [
        (profile.fp32_tflops, "TFLOPS in 32-bit vectors"),
        (profile.fp16_matrix_tflops, "TFLOPS in 16-bit matrices"),
        (profile.int8_tops, "TOPS in 8-bit matrices"),
    ]
    return ", ".join(f"{figure:g} {unit}" for figure, unit in figures if figure) or _UNKNOWN
