"""From what people call their machine to a device profile and a memory size.

Owns the reading of names such as "MacBook Air M2 16 GB" and the near names told when nothing matches. Knows
nothing of what the profile's figures mean, but picks the slower variant when a name leaves several open.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edgeserve.errors import UsageError
from edgeserve.planner.device import DeviceProfile, list_profiles, load_profile

# Product lines whose words would be taken for chips ("Pro" is an M2 Pro as well as a MacBook Pro).
_PRODUCT_LINES = re.compile(r"\b(macbook\s+(pro|air)|mac\s+(pro|studio|mini)|macbook|imac)\b")
_SCREEN_OR_YEAR = re.compile(r"\b\d\d([.,]\d)?\s*-?\s*(inch\b|zoll\b|in\b|\")|\b20\d\d\b")
_MEMORY = re.compile(r"(\d+(?:\.\d+)?)\s*(?:gib|gb|g)\b\s*(?:of\s+)?(ram|vram|host|system)?")
_WORD = re.compile(r"[a-z]?\d+|[a-z]+")
_SAME_WORDS = {"mobile": "laptop", "notebook": "laptop", "rpi": "pi", "radeon": "rx", "nvidia": "geforce"}
# Words that say nothing by themselves: a name that consists of them alone matches nothing.
_WEAK_WORDS = frozenset(
    {"apple", "geforce", "amd", "intel", "rx", "rtx", "gtx", "arc", "core", "ryzen", "desktop", "laptop"}
)
# Words that anything may be called by.
_NO_WORDS = frozenset({"gpu", "cpu", "gb", "graphics", "processor", "with", "and", "the", "only"})


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """The profile that a name led to. `others` are keys of further profiles that the name left open."""

    profile: DeviceProfile
    memory_gib: float | None = None
    host_memory_gib: float | None = None
    others: tuple[str, ...] = ()


def find_profile(text: str, profiles: Sequence[DeviceProfile] | None = None) -> DeviceChoice:
    """The profile for a name, a key or the path of a .toml file; a size in the name is read as memory.

    For a card, a size that it is sold with is its own memory, any other (or one called RAM) the host's.
    Raises UsageError with near names when nothing matches.
    """
    if text.endswith(".toml"):
        return DeviceChoice(load_profile(Path(text)))
    known = list_profiles() if profiles is None else profiles
    exact = [profile for profile in known if text.strip().lower() in (profile.key, profile.name.lower())]
    matches = exact or _matches(text, known)
    if not matches:
        raise UsageError(f"No device profile matches {text!r}.", _near_names(text, known))
    sizes = [(float(size), word) for size, word in _MEMORY.findall(_without_products(text))]
    return _choose(matches, [] if exact else sizes)


def _matches(text: str, known: Sequence[DeviceProfile]) -> list[DeviceProfile]:
    """Profiles that hold every known word of the name; of those, the ones with the fewest words besides."""
    names = {profile.key: [_words(name) for name in _names(profile)] for profile in known}
    vocabulary = frozenset().union(*(words for forms in names.values() for words in forms))
    asked = _words(_without_products(text))
    wanted = asked & vocabulary
    if not _strong(wanted) or any(re.search(r"\d", word) for word in asked - vocabulary):
        return []
    surplus: dict[str, int] = {}
    for key, forms in names.items():
        extras = [len(words - wanted - _WEAK_WORDS - _bins(words)) for words in forms if wanted <= words]
        if extras:
            surplus[key] = min(extras) * 2 + _unasked_laptop(key, known, wanted)
    fewest = min(surplus.values(), default=0)
    return [profile for profile in known if surplus.get(profile.key) == fewest]


def _strong(words: frozenset[str]) -> frozenset[str]:
    """Words that name a machine: a maker says little, and a short number alone could be anything's."""
    return frozenset(word for word in words - _WEAK_WORDS if not (word.isdigit() and len(word) < 3))


def _unasked_laptop(key: str, known: Sequence[DeviceProfile], wanted: frozenset[str]) -> int:
    """A card without the word laptop is the desktop card: between the two the laptop's comes second."""
    kind = next(profile.kind for profile in known if profile.key == key)
    return int(kind == "laptop-gpu" and "laptop" not in wanted)


def _names(profile: DeviceProfile) -> tuple[str, ...]:
    return (profile.key, profile.name, *profile.aliases)


def _bins(words: frozenset[str]) -> frozenset[str]:
    """ "(8-core GPU)" tells variants of one chip apart; a name without it means any of them."""
    return (
        frozenset({"core"} | {w for w in words if w.isdigit() and len(w) < 3})
        if "core" in words
        else frozenset()
    )


def _without_products(text: str) -> str:
    return _SCREEN_OR_YEAR.sub(" ", _PRODUCT_LINES.sub(" ", text.lower()))


def _words(text: str) -> frozenset[str]:
    """Words of a name without memory sizes; these are compared as numbers."""
    words = _WORD.findall(_MEMORY.sub(" ", text.lower()))
    return frozenset(_SAME_WORDS.get(word, word) for word in words) - _NO_WORDS


def _choose(matches: Sequence[DeviceProfile], sizes: Sequence[tuple[float, str]]) -> DeviceChoice:
    """Variants that are sold with the memory asked for come first, then the slowest: no promise too large."""
    own = next(
        (size for size, word in sizes if word not in ("ram", "host", "system") and _sold(matches, size)), None
    )
    unified = matches[0].memory_type == "unified"
    if unified and own is None and sizes:
        own = sizes[0][0]
    host = None if unified else next((size for size, _ in sizes if size != own), None)
    fitting = [profile for profile in matches if own in profile.memory_options_gib] or list(matches)
    fitting.sort(key=lambda p: (p.bandwidth_gb_s or 0, p.fp32_tflops or 0, p.gpu_cores or 0))
    others = tuple(profile.key for profile in matches if profile is not fitting[0])
    return DeviceChoice(fitting[0], own, host, others)


def _sold(matches: Sequence[DeviceProfile], size_gib: float) -> bool:
    return any(size_gib in profile.memory_options_gib for profile in matches)


def _near_names(text: str, known: Sequence[DeviceProfile]) -> str:
    spoken = {name.lower(): profile.name for profile in known for name in _names(profile)}
    plain = " ".join(_MEMORY.sub(" ", _without_products(text)).split())
    near = [spoken[name] for name in difflib.get_close_matches(plain, spoken, n=6, cutoff=0.4)]
    if not near:
        return "`edgeserve devices` lists the known ones; a .toml file of your own works too."
    return f"Near names: {', '.join(dict.fromkeys(near))}. `edgeserve devices` lists all."
