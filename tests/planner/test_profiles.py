"""The profiles that ship: complete, sourced, plausible, and found by the names people use."""

from __future__ import annotations

import pytest

from edgeserve.errors import UsageError
from edgeserve.planner.device import DeviceProfile, list_profiles, parse_profile, profile_to_toml
from edgeserve.planner.device_search import find_profile


@pytest.fixture(scope="module")
def profiles() -> tuple[DeviceProfile, ...]:
    return list_profiles()


def test_there_are_laptops_cards_boards_and_handhelds(profiles: tuple[DeviceProfile, ...]) -> None:
    kinds = [profile.kind for profile in profiles]
    assert len(profiles) >= 60
    for kind in ("apple-silicon", "laptop-gpu", "gpu-card", "apu", "board", "handheld", "cpu"):
        assert kinds.count(kind) >= 2, kind


def test_every_figure_has_a_source(profiles: tuple[DeviceProfile, ...]) -> None:
    for profile in profiles:
        assert profile.memory_source, profile.key
        assert profile.bandwidth_gb_s is None or profile.bandwidth_source, profile.key
        figures = (profile.fp32_tflops, profile.fp16_matrix_tflops, profile.int8_tops)
        assert not any(figures) or profile.compute_source, profile.key


def test_figures_are_plausible(profiles: tuple[DeviceProfile, ...]) -> None:
    for profile in profiles:
        assert 10 < (profile.bandwidth_gb_s or 50) < 2000, profile.key
        assert 0.5 < (profile.fp32_tflops or 1) < 200, profile.key
        assert all(0.5 <= size <= 1024 for size in profile.memory_options_gib), profile.key
        if profile.memory_rule == "vram":
            assert profile.memory_type == "discrete", profile.key


def test_names_are_unique(profiles: tuple[DeviceProfile, ...]) -> None:
    names = [profile.name.lower() for profile in profiles]
    assert len(set(names)) == len(names)


def test_export_reads_back_unchanged(profiles: tuple[DeviceProfile, ...]) -> None:
    for profile in profiles:
        assert parse_profile(profile_to_toml(profile), profile.key) == profile


def test_every_profile_is_found_by_its_own_name_and_key(profiles: tuple[DeviceProfile, ...]) -> None:
    for profile in profiles:
        for text in (profile.key, profile.name):
            assert find_profile(text, profiles).profile == profile, text


@pytest.mark.parametrize(
    ("text", "key", "memory_gib", "host_gib"),
    [
        ("MacBook Air M2 16 GB", "m2-8", 16, None),
        ("macbook pro m2", "m2-8", None, None),
        ("MacBook Pro 14-inch 2023 M3 Max 128GB", "m3max-40", 128, None),
        ("Apple M2 Pro", "m2pro-16", None, None),
        ("Mac mini M4 Pro 48 GB", "m4pro-16", 48, None),
        ("RTX 4060 laptop", "rtx4060l", None, None),
        ("rtx4060", "rtx4060", None, None),
        ("NVIDIA GeForce RTX 5070 Ti Laptop GPU", "rtx5070til", None, None),
        ("RTX 4060 Ti 16GB", "rtx4060ti", 16, None),
        ("rtx 3080 12GB + 64 GB RAM", "rtx3080", 12, 64),
        ("RTX 3090 with 32 GB RAM", "rtx3090", None, 32),
        ("4090", "rtx4090", None, None),
        ("Intel Arc A770", "a770", None, None),
        ("Radeon RX 7900 XT", "rx7900xt", None, None),
        ("Raspberry Pi 5 8GB", "pi5", 8, None),
        ("rpi 4", "pi4", None, None),
        ("Jetson Orin Nano 8GB", "orinnano", 8, None),
        ("Orin Nano Super", "orinnanosuper", None, None),
        ("Steam Deck", "steamdeck", None, None),
        ("Framework Desktop 128GB", "strixhalo", 128, None),
        ("DGX Spark", "gb10", None, None),
        ("Ryzen 7 7840HS 32 GB", "780m", 32, None),
        ("Snapdragon X Elite", "xelite", None, None),
        ("orange pi 5 16gb", "rk3588", 16, None),
    ],
)
def test_names_that_people_use(
    profiles: tuple[DeviceProfile, ...], text: str, key: str, memory_gib: float | None, host_gib: float | None
) -> None:
    choice = find_profile(text, profiles)
    assert (choice.profile.key, choice.memory_gib, choice.host_memory_gib) == (key, memory_gib, host_gib)


def test_variants_left_open_are_told(profiles: tuple[DeviceProfile, ...]) -> None:
    choice = find_profile("MacBook Air M2", profiles)
    assert choice.others == ("m2-10",)


def test_unknown_names_get_near_ones(profiles: tuple[DeviceProfile, ...]) -> None:
    with pytest.raises(UsageError) as error:
        find_profile("RTX 4065", profiles)
    assert "NVIDIA RTX 4060" in error.value.hint


@pytest.mark.parametrize("text", ["laptop", "MacBook Air M17", "qwerty", "", "16 GB", "Commodore 64"])
def test_names_that_say_nothing_match_nothing(profiles: tuple[DeviceProfile, ...], text: str) -> None:
    with pytest.raises(UsageError):
        find_profile(text, profiles)
