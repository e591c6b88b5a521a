"""Where does it stop keeping up? Offered rates, chosen as the results come in.

Owns: the search for the capacity point. Does not know: how a rate is measured.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

MAX_DOUBLINGS = 7
NUM_BISECTIONS = 2


async def find_capacity(first_rate_per_s: float, keeps_up: Callable[[float], Awaitable[bool]]) -> None:
    """Double the rate until the objective is missed (or halve it until it is kept), then narrow the bracket.

    `keeps_up` measures one rate. Points lie closest where the answer is; the caller reads the capacity off
    the points measured.
    """
    kept: float | None = None
    missed: float | None = None
    rate = first_rate_per_s
    for _ in range(MAX_DOUBLINGS):
        if await keeps_up(rate):
            kept, rate = rate, rate * 2
        else:
            missed, rate = rate, rate / 2
        if kept is not None and missed is not None:
            break
    if kept is None or missed is None:
        return
    for _ in range(NUM_BISECTIONS):
        middle = (kept * missed) ** 0.5
        if await keeps_up(middle):
            kept = middle
        else:
            missed = middle
