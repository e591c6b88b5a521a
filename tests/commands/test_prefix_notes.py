"""What a start says of prefixes: where they are kept, and when a model can only reuse some of them."""

from __future__ import annotations

from edgeserve.commands.engine_start import prefix_notes
from edgeserve.config import EngineConfig


def test_nothing_is_said_where_every_prefix_can_be_reused_and_none_is_kept_elsewhere() -> None:
    assert prefix_notes(EngineConfig("m"), can_cut=True) == ()


def test_a_model_that_cannot_drop_a_part_says_what_stands_in_for_it() -> None:
    (with_checkpoints,) = prefix_notes(EngineConfig("m", checkpoint_mib=64), can_cut=False)
    assert "checkpoints, 64 MiB at most" in with_checkpoints
    (without,) = prefix_notes(EngineConfig("m", checkpoint_mib=0), can_cut=False)
    assert "only as a whole" in without


def test_each_tier_is_named_with_its_bound() -> None:
    config = EngineConfig("m", cache_ram_mib=512, cache_disk="/var/prefixes", cache_disk_mib=2048)
    in_ram, on_disk = prefix_notes(config, can_cut=True)
    assert "in RAM, 512 MiB" in in_ram
    assert "/var/prefixes, 2048 MiB" in on_disk
