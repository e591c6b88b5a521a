"""Versions, from the packages' metadata: the runtime is not started for it."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

_MISSING = "(not installed)"


def version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return _MISSING


def own_version() -> str:
    own = version_of("edgeserve")
    return own if own != _MISSING else "(from its source tree)"


def version_line() -> str:
    return f"edgeserve {own_version()} with llama-cpp-python {version_of('llama-cpp-python')}"


def version_lines() -> list[str]:
    return [
        f"edgeserve {own_version()}",
        f"llama-cpp-python {version_of('llama-cpp-python')}",
        f"Python {platform.python_version()}",
    ]
