"""Does it fit: needs of a model at given settings against a target's memory, and the longest context that
fits.

Owns the comparison of a memory report with pools, and the inverse of the memory model over the context. Knows
nothing of preferences (`search`) nor of where a report's figures come from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from edgeserve.gguf_header import GGUFHeader
from edgeserve.planner.extras import Extras
from edgeserve.planner.memory import ModelMemory
from edgeserve.planner.report import MemoryReport
from edgeserve.planner.settings import CELL_STEP, Settings
from edgeserve.planner.target import PlanPool, Target

Ratios = Mapping[str, float]
"""Scratch bytes over the estimate's likely figure, by device, as a dry run found them."""


@dataclass(frozen=True, slots=True)
class PoolUse:
    """What a plan takes of one pool. `need_bytes` is expected; `high_bytes` is what must be free for it."""

    pool: PlanPool
    need_bytes: int
    high_bytes: int

    @property
    def left_bytes(self) -> int:
        """What stays free of the usable part; negative when it does not fit."""
        return self.pool.usable_bytes - self.high_bytes

    @property
    def fits(self) -> bool:
        return self.left_bytes >= 0


def pool_uses(report: MemoryReport, target: Target) -> tuple[PoolUse, ...]:
    """Needs of a report's devices, summed by the memory that they share."""
    uses = []
    for pool in target.pools:
        needs = [report.need(name) for name in pool.devices if report.devices]
        uses.append(PoolUse(pool, sum(n.likely for n in needs), sum(n.high for n in needs)))
    return tuple(uses)


class Sizer:
    """One model on one target: needs at any settings, remembered. Pure: no file, no runtime, no clock.

    `hopeful` compares with the likely figure of an estimate and not with its upper bound: right for what a
    dry run will check.
    """

    def __init__(
        self, header: GGUFHeader, target: Target, extras: Extras | None = None, *, hopeful: bool = False
    ) -> None:
        """Raises GGUFError when the header lacks a key that the sizes depend on."""
        self.hopeful = hopeful
        self.model = ModelMemory(header)
        self.target = target
        self.extras = extras or Extras()
        self._reports: dict[Settings, MemoryReport] = {}

    def report(self, settings: Settings) -> MemoryReport:
        if settings not in self._reports:
            self._reports[settings] = self.model.report(
                settings, self.target.accelerators, extras=self.extras
            )
        return self._reports[settings]

    def uses(self, settings: Settings) -> tuple[PoolUse, ...]:
        return pool_uses(self.report(settings), self.target)

    def fits(self, settings: Settings, ratios: Ratios | None = None) -> bool:
        return self.overflow_bytes(settings, ratios) <= 0 and self.report(settings).rejected is None

    def overflow_bytes(self, settings: Settings, ratios: Ratios | None = None) -> int:
        """What is missing in the pool that misses most; 0 or less when it fits."""
        report = self.report(settings)
        if ratios is None:
            uses = pool_uses(report, self.target)
            if self.hopeful:
                return max(use.need_bytes - use.pool.usable_bytes for use in uses)
            return max(-use.left_bytes for use in uses)
        return max(_scaled_need(report, pool, ratios) - pool.usable_bytes for pool in self.target.pools)

    def longest(self, settings: Settings, most: int, ratios: Ratios | None = None) -> int:
        """Most tokens a sequence, a multiple of 256 and at most `most`, with which the settings fit; 0: none.

        Needs never fall as the context grows, so the steps are halved.
        """
        steps = most // CELL_STEP
        if most % CELL_STEP and self.fits(with_n_ctx_seq(settings, most), ratios):
            return most
        low, high = 0, steps
        while low < high:
            middle = high if low == 0 and high == steps else (low + high + 1) // 2
            if self.fits(with_n_ctx_seq(settings, middle * CELL_STEP), ratios):
                low = middle
            else:
                high = middle - 1
        return low * CELL_STEP


def with_n_ctx_seq(settings: Settings, n_ctx_seq: int) -> Settings:
    """The same settings with room for `n_ctx_seq` tokens in each sequence."""
    streams = 1 if settings.kv_unified else settings.n_seq_max
    return replace(settings, n_ctx=n_ctx_seq * streams)


def _scaled_need(report: MemoryReport, pool: PlanPool, ratios: Ratios) -> int:
    """Need with scratch bytes in the proportion that a dry run of nearby settings found."""
    total = 0
    for name in pool.devices:
        compute = report.device(name).compute_bytes if report.devices else 0
        need = report.need(name).likely if report.devices else 0
        total += need - compute + round(compute * ratios.get(name, 1.0))
    return total
