"""Load a model for real and put planned and real bytes side by side.

Owns the comparison. The load is a child process (`measure` with `allocate`): what the operating system then
says of it comes from there, not from here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from edgeserve.errors import OutOfMemoryError, RuntimeUnavailableError, UsageError
from edgeserve.gguf_checks import check_loadable
from edgeserve.gguf_header import GGUFHeader
from edgeserve.planner.measure import DryRunFailure, measure
from edgeserve.planner.plan import Plan
from edgeserve.planner.words import size

_TIMEOUT_S = 160.0


@dataclass(frozen=True, slots=True)
class Compared:
    """One figure, planned and real. `what` is weights, cache or scratch."""

    device: str
    what: str
    planned_bytes: int
    real_bytes: int

    @property
    def difference_bytes(self) -> int:
        return self.real_bytes - self.planned_bytes


def verify(plan: Plan, header: GGUFHeader) -> list[Compared]:
    """Planned and real bytes of the plan's settings.

    Raises UsageError for a plan for another machine, ModelError when the file cannot be loaded,
    RuntimeUnavailableError without a runtime.
    """
    if not plan.target.is_here:
        raise UsageError("Only a plan for this machine can be verified.", "Leave --device out.")
    if plan.target.accelerators:
        raise UsageError(
            "A load on a GPU cannot be compared yet.",
            "Add --backend cpu to verify the plan for the processor.",
        )
    check_loadable(header)
    if not plan.fits:
        raise OutOfMemoryError("The plan does not fit, so it is not loaded.", "See its remedy.")
    limit = plan.target.host_pool.usable_bytes
    (real,) = measure(header, [plan.settings], timeout_s=_TIMEOUT_S, memory_limit_bytes=limit, allocate=True)
    if isinstance(real, DryRunFailure):
        if real.kind == "no runtime":
            raise RuntimeUnavailableError(real.message, "`edgeserve doctor` says what is missing.")
        raise OutOfMemoryError(f"The model could not be loaded: {real.message}")
    planned = plan.best.report
    return [
        Compared(device.name, what, getattr(device, field), getattr(real.device(device.name), field))
        for device in planned.devices
        for what, field in (
            ("weights", "model_bytes"),
            ("cache", "context_bytes"),
            ("scratch", "compute_bytes"),
        )
    ]


def verify_json(rows: list[Compared]) -> list[dict[str, int | str]]:
    """One object a figure."""
    return [
        {
            "device": row.device,
            "what": row.what,
            "planned_bytes": row.planned_bytes,
            "real_bytes": row.real_bytes,
        }
        for row in rows
    ]


def verify_lines(rows: list[Compared]) -> Iterator[str]:
    """An aligned table."""
    yield f"{'device':<10}{'':<9}{'planned':>14}{'real':>14}{'difference':>14}"
    for row in rows:
        difference = f"{row.difference_bytes:+,} B" if row.difference_bytes else "exact"
        yield (
            f"{row.device:<10}{row.what:<9}{size(row.planned_bytes):>14}{size(row.real_bytes):>14}"
            f"{difference:>14}"
        )
