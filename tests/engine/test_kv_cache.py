"""Slots: which one a newcomer gets, what stays resident, what is evicted, who must wait."""

from __future__ import annotations

from edgeserve.engine.kv_cache import KVCache
from edgeserve.engine.request import FinishReason, Request, Sequence, SequenceStatus
from edgeserve.engine.sampling_params import SamplingParams
from edgeserve.engine.saved_prefix import common_prefix_length


def sequence(
    prompt: list[int], max_tokens: int = 4, namespace: str = "", cache_prompt: bool = True
) -> Sequence:
    request = Request(
        f"r{id(prompt)}",
        tuple(prompt),
        SamplingParams(),
        0.0,
        cache_namespace=namespace,
        cache_prompt=cache_prompt,
    )
    return Sequence(request, max_tokens)


def run(cache: KVCache, seq: Sequence) -> int:
    """Place, compute and finish a sequence; returns the cached tokens it found."""
    placement = cache.place(seq)
    assert placement is not None
    cache.acquire(placement, seq)
    cache.advance(seq, seq.num_tokens - placement.num_cached_tokens)
    seq.finish(FinishReason.STOP)
    cache.release(seq)
    return placement.num_cached_tokens


def test_common_prefix_length() -> None:
    assert common_prefix_length([1, 2, 3], [1, 2, 4]) == 2
    assert common_prefix_length([1, 2], [1, 2, 4]) == 2
    assert common_prefix_length([], [1]) == 0
    assert common_prefix_length([5], [6]) == 0


def test_the_longest_resident_prefix_is_reused_token_by_token() -> None:
    cache = KVCache(3, 300, 100, unified=False)
    run(cache, sequence([1, 2, 3, 4, 5, 6]))
    run(cache, sequence([9, 9, 9, 9]))
    assert run(cache, sequence([1, 2, 3, 4, 7, 8])) == 4


def test_one_token_is_always_computed_anew() -> None:
    cache = KVCache(1, 100, 100, unified=False)
    run(cache, sequence([1, 2, 3]))
    assert run(cache, sequence([1, 2, 3])) == 2


def test_other_namespaces_and_uncached_requests_share_nothing() -> None:
    cache = KVCache(1, 100, 100, unified=False)
    run(cache, sequence([1, 2, 3, 4], namespace="alice"))
    assert run(cache, sequence([1, 2, 3, 4], namespace="bob")) == 0
    assert run(cache, sequence([1, 2, 3, 4], namespace="bob", cache_prompt=False)) == 0


def test_a_short_match_does_not_cost_a_long_conversation_while_an_empty_slot_is_free() -> None:
    cache = KVCache(2, 200, 100, unified=False)
    run(cache, sequence(list(range(50))))
    assert run(cache, sequence([0, 1, 99])) == 0
    assert run(cache, sequence([*range(50), 77])) == 50


def test_a_long_prefix_of_another_slot_is_taken_over_idle_or_running() -> None:
    cache = KVCache(3, 300, 100, unified=False)
    system = list(range(40))
    run(cache, sequence([*system, 101, 102]))
    placement = cache.place(sequence([*system, 201]))
    assert placement is not None
    assert (placement.source, placement.num_cached_tokens) == (cache.slots[0], 40)
    assert placement.slot is not cache.slots[0]
    running = sequence([*system, 201])
    cache.acquire(placement, running)
    assert placement.slot.token_ids == system
    assert cache.slots[0].token_ids == [*system, 101, 102]
    third = cache.place(sequence([*system, 301]))
    assert third is not None
    assert third.num_cached_tokens == 40


def test_a_short_prefix_is_not_worth_a_copy() -> None:
    cache = KVCache(2, 200, 100, unified=False)
    run(cache, sequence([1, 2, 3, 4]))
    placement = cache.place(sequence([1, 2, 3, 9]))
    assert placement is not None
    assert placement.source is None


def test_a_cache_that_cannot_be_cut_keeps_prefixes_to_their_slot() -> None:
    cache = KVCache(2, 200, 100, unified=False, can_cut=lambda seq_id, n: False)
    run(cache, sequence([*range(50), 60]))
    busy = sequence([*range(50), 60, 61])
    placement = cache.place(busy)
    assert placement is not None
    cache.acquire(placement, busy)
    other = cache.place(sequence([*range(50), 70]))
    assert other is not None
    assert (other.source, other.num_cached_tokens) == (None, 0)


def test_a_long_prefix_outlives_short_ones_but_not_for_ever() -> None:
    cache = KVCache(2, 200, 100, unified=False)
    run(cache, sequence([7] * 50))
    survived = 0
    while any(slot.token_ids[:1] == [7] for slot in cache.slots):
        survived += 1
        run(cache, sequence([100 + survived] * 10))
    assert 4 <= survived <= 8


def test_no_match_takes_the_slot_unused_for_longest() -> None:
    cache = KVCache(2, 200, 100, unified=False)
    run(cache, sequence([1, 1, 1]))
    run(cache, sequence([2, 2, 2]))
    run(cache, sequence([3, 3, 3]))
    assert [slot.token_ids[0] for slot in cache.slots] == [3, 2]


def test_split_cells_admit_while_a_slot_is_free() -> None:
    cache = KVCache(1, 100, 100, unified=False)
    running = sequence([1] * 50)
    cache.acquire(cache.place(running) or exit(), running)
    assert cache.place(sequence([2])) is None
    assert cache.num_missing_cells(sequence([2] * 90)) == 0


def test_unified_cells_are_reserved_for_a_whole_life() -> None:
    cache = KVCache(4, 100, 100, unified=True)
    first = sequence([1] * 40, max_tokens=30)
    cache.acquire(cache.place(first) or exit(), first)
    late = sequence([2] * 20, max_tokens=20)
    assert cache.place(late) is None
    assert cache.num_missing_cells(late) == 10
    first.finish(FinishReason.STOP)
    cache.release(first)
    assert cache.place(late) is not None


def test_unified_cells_evict_the_oldest_idle_prefix_and_no_more_than_needed() -> None:
    cache = KVCache(4, 100, 100, unified=True)
    for token in (1, 2, 3):
        run(cache, sequence([token] * 30))
    placement = cache.place(sequence([4] * 20, max_tokens=10))
    assert placement is not None
    assert [slot.token_ids[0] for slot in placement.evict] == [1]


def test_counts_of_used_and_cached_cells() -> None:
    cache = KVCache(2, 100, 50, unified=False)
    run(cache, sequence([1, 2, 3]))
    busy = sequence([7, 8])
    placement = cache.place(busy)
    assert placement is not None
    cache.acquire(placement, busy)
    cache.advance(busy, 2)
    assert (cache.num_used_cells, cache.num_cached_cells) == (5, 3)


def start(cache: KVCache, seq: Sequence) -> int:
    """Place and compute a sequence that goes on running; returns its slot."""
    placement = cache.place(seq)
    assert placement is not None
    cache.acquire(placement, seq)
    cache.advance(seq, seq.num_tokens - placement.num_cached_tokens)
    return seq.seq_id


def test_with_split_cells_running_slots_are_neighbours() -> None:
    """llama.cpp computes neighbours in one pass over the weights, others in one more."""
    cache = KVCache(6, 6000, 1000, unified=False)
    first = [sequence([index] * 50) for index in range(6)]
    assert [start(cache, item) for item in first] == [0, 1, 2, 3, 4, 5]
    for index in (0, 1, 3, 4, 5):
        cache.release(first[index])
    # Slot 5 knows the prompt best, but a pass more in every step would cost more than copying from it.
    again = sequence([5] * 45 + [7] * 20)
    placement = cache.place(again)
    assert placement is not None
    assert placement.slot.seq_id in (1, 3)
    assert placement.source is cache.slots[5]
    assert placement.num_cached_tokens == 45
    cache.acquire(placement, again)
    others = [start(cache, sequence([20 + index] * 30)) for index in range(2)]
    running = sorted([2, again.seq_id, *others])
    assert running == list(range(running[0], running[0] + 4))


def test_with_unified_cells_any_slot_is_as_good() -> None:
    cache = KVCache(4, 8000, 2000, unified=True)
    first = [sequence([index] * 50) for index in range(4)]
    assert [start(cache, item) for item in first] == [0, 1, 2, 3]
    cache.release(first[3])
    cache.release(first[1])
    assert start(cache, sequence([3] * 45 + [7] * 20)) == 3


def test_idle_tokens_in_a_shared_pool_leave_when_they_have_cost_others_as_much_as_they_are_worth() -> None:
    for unified in (True, False):
        cache = KVCache(2, 400, 200, unified, carry_tokens=50)
        run(cache, sequence([1] * 60))
        busy = sequence([2] * 10, max_tokens=100)
        cache.acquire(cache.place(busy) or exit(), busy)
        cache.advance(busy, 10)
        busy.status = SequenceStatus.DECODE
        for count in range(1, 60):
            busy.token_ids.append(3)
            cache.advance(busy, 1)
            assert [slot.seq_id for slot in cache.carried()] == ([0] if unified and count >= 50 else [])


def test_a_slot_that_is_used_again_is_carried_anew() -> None:
    cache = KVCache(2, 400, 200, unified=True, carry_tokens=5)
    busy = sequence([2] * 10, max_tokens=100)
    cache.acquire(cache.place(busy) or exit(), busy)
    busy.status = SequenceStatus.DECODE
    cache.advance(busy, 10)
    run(cache, sequence([1] * 60))
    assert cache.carried() == []
    assert cache.carried(0) == [cache.slots[1]]
