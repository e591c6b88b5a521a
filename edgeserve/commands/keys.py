"""`edgeserve key new`: a random key, printed or put into a file that only its owner can read."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from edgeserve.errors import UsageError


def new_key() -> str:
    """32 random bytes, as text that needs no quoting."""
    return "es-" + secrets.token_urlsafe(32)


def new(file: Path | None) -> int:
    key = new_key()
    if file is None:
        print(key)
        return 0
    try:
        # The mode is set at creation: between a write and a chmod others could read the key.
        descriptor = os.open(file.expanduser(), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise UsageError(f"{file} is there already.", "A key in use is not overwritten.") from None
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror or error}.") from None
    with os.fdopen(descriptor, "w") as stream:
        stream.write(key + "\n")
    print(file)
    return 0
