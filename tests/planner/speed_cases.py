"""Models that the speed tests ask about."""

from __future__ import annotations

from dataclasses import replace

from edgeserve.planner.speed import Interval
from edgeserve.planner.speed_terms import ModelWork

# Llama 2 7B as Q4_0 (3.56 GiB): 32 layers, 32 KV heads of 128, untied tables of 32000 x 4096.
LLAMA2_7B = ModelWork(
    n_layer=32,
    weight_bytes=3.75e9,
    active_weight_bytes=3.75e9,
    active_params=6.48e9,
    quant_class="q",
    output_params=0.131e9,
    kv_bytes_per_token=524_288,
    pair_flops=4 * 32 * 128 * 32,
)
SMALL = replace(
    LLAMA2_7B,
    n_layer=16,
    weight_bytes=0.7e9,
    active_weight_bytes=0.7e9,
    active_params=1e9,
    output_params=0.1e9,
)
EXPERTS = replace(LLAMA2_7B, weight_bytes=30e9, active_weight_bytes=3e9, active_params=5e9)


def known(interval: Interval | None) -> Interval:
    assert interval is not None
    assert 0 < interval.low < interval.mid < interval.high
    return interval
