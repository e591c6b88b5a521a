"""`python -m edgeserve`: the same as the `edgeserve` command."""

from __future__ import annotations

from edgeserve.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
