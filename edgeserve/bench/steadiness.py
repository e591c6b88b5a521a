"""Did the system keep up during the window, or did the queue grow?

Owns: the test for it. Percentiles of a run whose queue grows say more about the run's length than about the
server, so the report states saturation in their place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgeserve.bench.runner import Record

MIN_REQUESTS = 10
NUM_SAMPLES = 50
# Queueing makes neighbouring samples alike, so a slope has to stand out more than from independent noise.
MIN_T_VALUE = 4.0
MIN_GROWTH = 0.5


@dataclass(frozen=True)
class Trend:
    """A straight line through a series: its rise over the window, relative to the mean, and its t-value."""

    relative_rise: float
    t_value: float

    @property
    def is_rising(self) -> bool:
        return self.relative_rise > MIN_GROWTH and self.t_value > MIN_T_VALUE


@dataclass(frozen=True)
class Steadiness:
    """Saturated when the number in flight and the time to the first token both rise; too short to tell with
    fewer than `MIN_REQUESTS` requests."""

    in_flight: Trend | None
    ttft: Trend | None

    @property
    def is_saturated(self) -> bool:
        return bool(self.in_flight and self.ttft and self.in_flight.is_rising and self.ttft.is_rising)

    @property
    def reason(self) -> str:
        if not self.in_flight or not self.ttft:
            return "too few requests to tell"
        return (
            f"requests in flight rise by {self.in_flight.relative_rise:.0%} "
            f"and ttft by {self.ttft.relative_rise:.0%} of their mean"
        )


def trend(at: Sequence[float], values: Sequence[float]) -> Trend | None:
    """Least squares; None where a line says nothing (under three points, or all at one instant)."""
    if len(values) < 3 or max(at) <= min(at):
        return None
    x, y = np.asarray(at, dtype=np.float64), np.asarray(values, dtype=np.float64)
    slope, offset = np.polyfit(x, y, 1)
    residual = float(np.sum((y - (slope * x + offset)) ** 2))
    spread = float(np.sum((x - x.mean()) ** 2))
    error = (residual / (len(y) - 2) / spread) ** 0.5
    mean = abs(float(y.mean())) or 1.0
    rise = float(slope) * (max(at) - min(at)) / mean
    return Trend(rise, float(slope) / error if error else float("inf") if slope > 0 else 0.0)


def steadiness(records: Sequence[Record], window_s: tuple[float, float]) -> Steadiness:
    start_s, end_s = window_s
    answered = [record for record in records if start_s <= record.arrival_s < end_s and record.stamps_s]
    if len(answered) < MIN_REQUESTS:
        return Steadiness(None, None)
    samples = np.linspace(start_s, end_s, NUM_SAMPLES)
    in_flight = [float(sum(r.arrival_s <= at < r.end_s for r in records)) for at in samples]
    arrivals = [record.arrival_s for record in answered]
    ttfts = [record.stamps_s[0] - record.arrival_s for record in answered]
    return Steadiness(trend(list(samples), in_flight), trend(arrivals, ttfts))
