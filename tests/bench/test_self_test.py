"""The cost of the client, against a server that does nothing."""

from __future__ import annotations

from edgeserve.bench.self_test import client_cost


async def test_the_client_measures_itself() -> None:
    cost = await client_cost()
    assert cost.ttft_s > 0
    assert 0 < cost.chunk_s < cost.ttft_s * 1000
