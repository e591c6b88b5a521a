"""What a step costs, learned: from a few observations to a choice that keeps the target."""

from __future__ import annotations

import pytest

from edgeserve.engine.step_cost import CHUNK_SIZES, IDLE_STEP_S, MIN_TARGET_S, StepCost


def learned(
    decode_ms: float, token_ms: float, itl_target_s: float = 0.0, sizes: tuple[int, ...] = CHUNK_SIZES
) -> StepCost:
    cost = StepCost(itl_target_s)
    for _ in range(20):
        cost.observe(1, 0, decode_ms / 1e3)
        for size in sizes:
            cost.observe(1, size, (decode_ms + token_ms * size) / 1e3)
    return cost


def test_a_step_is_its_decodes_and_its_prompt_tokens() -> None:
    cost = learned(10, 2)
    assert cost.decode_s(1) == pytest.approx(0.010)
    assert cost.step_s(1, 32) == pytest.approx(0.074)


def test_the_largest_chunk_within_the_target() -> None:
    cost = learned(10, 2, itl_target_s=0.1)
    assert cost.prefill_tokens(1, 2048) == 40
    assert cost.prefill_tokens(1, 20) == 20


def test_the_floor_makes_progress_where_nothing_fits() -> None:
    cost = learned(200, 50, itl_target_s=0.05)
    assert cost.prefill_tokens(1, 2048) == CHUNK_SIZES[0]


def test_with_nobody_decoding_the_step_is_longer() -> None:
    cost = learned(10, 2)
    assert cost.prefill_tokens(0, 2048) == 224
    assert cost.step_s(0, 192) <= IDLE_STEP_S


def test_a_slow_path_for_small_chunks_is_avoided_where_the_target_allows() -> None:
    cost = StepCost(0.3)
    for _ in range(20):
        cost.observe(1, 0, 0.010)
        for size in (32, 48, 64, 96):
            per_token = 0.006 if size < 64 else 0.002
            cost.observe(1, size, 0.010 + per_token * size)
    assert cost.prefill_tokens(1, 2048) >= 64


def test_the_first_step_is_small_and_growth_is_by_steps() -> None:
    cost = StepCost(10.0)
    tried = []
    for _ in range(6):
        chunk = cost.prefill_tokens(1, 2048)
        tried.append(chunk)
        cost.observe(1, chunk, 0.001 * chunk)
    assert tried == [32, 48, 64, 96, 128, 192]


def test_the_default_target_follows_the_machines_own_gap() -> None:
    assert learned(8, 2).target_s == MIN_TARGET_S
    assert learned(120, 20).target_s == pytest.approx(0.36)
    assert learned(120, 20, itl_target_s=0.25).target_s == 0.25


def test_it_follows_a_slower_machine_quickly_and_a_faster_one_slowly() -> None:
    cost = learned(10, 2)
    for _ in range(4):
        cost.observe(1, 32, 0.010 + 32 * 0.004)
    slower = cost.step_s(1, 32)
    assert slower > 0.010 + 32 * 0.0037
    for _ in range(4):
        cost.observe(1, 32, 0.010 + 32 * 0.002)
    assert 0.010 + 32 * 0.002 < cost.step_s(1, 32) < slower


def test_one_hiccup_does_not_stop_the_prompts() -> None:
    cost = learned(10, 2, itl_target_s=0.1)
    cost.observe(1, 32, 30.0)
    assert cost.step_s(1, 32) < 0.15


def test_the_last_tokens_of_a_prompt_teach_nothing_about_chunks() -> None:
    cost = learned(10, 2)
    before = cost.step_s(1, 8)
    cost.observe(1, 1, 0.020)
    assert cost.step_s(1, 8) == before


def test_an_unseen_batch_of_decodes_is_scaled_up_from_the_nearest() -> None:
    cost = learned(10, 2)
    assert cost.decode_s(4) == pytest.approx(0.040)
    cost.observe(4, 0, 0.025)
    assert cost.decode_s(4) == pytest.approx(0.025)
    assert cost.decode_s(3) == pytest.approx(0.025)
    assert StepCost().decode_s(3) == 0.0


def test_the_default_target_is_longer_while_others_wait_for_a_place() -> None:
    cost = learned(10, 2)
    assert cost.prefill_tokens(1, 2048) == 64
    assert cost.prefill_tokens(1, 2048, is_crowded=True) == 128
    asked = learned(10, 2, itl_target_s=0.15)
    assert asked.prefill_tokens(1, 2048, is_crowded=True) == 64


def test_a_lucky_first_sample_is_not_believed_over_a_neighbour_that_is_known() -> None:
    cost = StepCost(0.15)
    for _ in range(5):
        cost.observe(1, 0, 0.01)
        cost.observe(1, 32, 0.138)
    cost.observe(1, 40, 0.09)
    assert cost.step_s(1, 40) == pytest.approx(0.01 + 40 * 0.004)
    for _ in range(8):
        cost.observe(1, 40, 0.09)
    assert cost.step_s(1, 40) == pytest.approx(0.09)


def test_a_size_that_was_slow_once_is_tried_again() -> None:
    cost = learned(10, 2, itl_target_s=0.12)
    assert cost.prefill_tokens(1, 2048) == 48
    cost.observe(1, 48, 0.3)
    tried = []
    for _ in range(60):
        size = cost.prefill_tokens(1, 2048)
        tried.append(size)
        cost.observe(1, size, (10 + 2 * size) / 1e3)
    assert tried[0] < 48
    assert 48 in tried
    assert tried[-1] == 48


def test_a_size_that_stays_slow_is_tried_once_in_a_while_only() -> None:
    cost = StepCost(0.12)
    tried = []
    for _ in range(300):
        cost.observe(1, 0, 0.01)
        size = cost.prefill_tokens(1, 2048)
        tried.append(size)
        cost.observe(1, size, 0.01 + size * (0.002 if size <= 32 else 0.006))
    assert sum(size > 32 for size in tried) <= 300 * 0.06
