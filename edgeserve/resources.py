"""Where the data files that ship with edgeserve lie: `models.txt` and `profiles/`.

Owns that one question. In a wheel they are packed below `edgeserve/data/`; in a checkout they sit at its top,
where people edit them. Knows nothing of what is in them.
"""

from __future__ import annotations

from pathlib import Path

from edgeserve.errors import EdgeserveError


def data_path(name: str) -> Path:
    """Path of the data file or folder `name` (`"models.txt"`, `"profiles"`).

    The packed copy comes first: an installed package may lie beside unrelated files of the same name.
    Raises EdgeserveError if neither is there, which means a broken installation.
    """
    package = Path(__file__).resolve().parent
    for candidate in (package / "data" / name, package.parent / name):
        if candidate.exists():
            return candidate
    raise EdgeserveError(
        f"The data file {name} is missing from this installation of edgeserve.",
        "Reinstall the package, or run it from a complete checkout.",
    )
