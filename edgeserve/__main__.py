"""`python -m edgeserve` and the `edgeserve` command. An interruption counts from the first import on."""

from __future__ import annotations

EXIT_INTERRUPTED = 130


def main() -> int:
    try:
        from edgeserve.cli import main as run

        return run()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    raise SystemExit(main())
