"""Profile files, memory pools of described devices, and this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgeserve.errors import UsageError
from edgeserve.host import CpuBudget, MemoryBudget, cpu_budget, memory_budget
from edgeserve.planner.device import load_profile, parse_profile, profile_to_toml
from edgeserve.planner.device_memory import apple_working_set_bytes, usable_memory
from edgeserve.planner.device_search import find_profile
from edgeserve.planner.this_machine import GgmlDevice, ThisMachine, nvml_devices, this_machine

GIB = 1 << 30

MINIMAL = """
name = "A board"
vendor = "Somebody"
kind = "board"
architecture = "arm"
backends = ["cpu"]
[memory]
type = "unified"
options_gib = [8, 4]
rule = "host"
source = "its box"
"""


class TestFile:
    def test_what_is_unknown_stays_absent(self) -> None:
        profile = parse_profile(MINIMAL, "board")
        assert profile.key == "board"
        assert profile.memory_options_gib == (4, 8)
        assert profile.bandwidth_gb_s is None
        assert profile.fp32_tflops is None
        assert profile.performance_cores is None
        assert "bandwidth" not in profile_to_toml(profile)

    def test_key_is_the_file_name(self, tmp_path: Path) -> None:
        path = tmp_path / "my-board.toml"
        path.write_text(MINIMAL)
        assert load_profile(path).key == "my-board"
        assert find_profile(str(path)).profile.name == "A board"

    @pytest.mark.parametrize(
        ("text", "told"),
        [
            (MINIMAL.replace('name = "A board"', ""), "name must be a text"),
            (MINIMAL.replace('type = "unified"', 'type = "other"'), "memory.type must be one of unified"),
            (MINIMAL.replace("[8, 4]", "[8, -4]"), "memory.options_gib must be a number above 0"),
            (MINIMAL.replace("[8, 4]", "[]"), "memory.options_gib must be a list of numbers"),
            (MINIMAL + "[bandwidth]\ngb_s = 17\n", "bandwidth.source must be a text"),
            (MINIMAL + "[bandwidth]\ngbs = 17\nsource = 's'\n", "bandwidth.gbs must be left out"),
            (MINIMAL + "[bandwidth]\ngb_s = true\nsource = 's'\n", "bandwidth.gb_s must be a number"),
            (MINIMAL + "[cpu]\nperformance_cores = 1.5\nsource = 's'\n", "a whole number"),
            (MINIMAL + "compute = 3\n", "memory.compute must be left out"),
            ("compute = 3\n" + MINIMAL, "compute must be a table"),
            ("name = ", "not valid TOML"),
        ],
    )
    def test_mistakes_are_named(self, text: str, told: str) -> None:
        with pytest.raises(UsageError, match="profile board") as error:
            parse_profile(text, "board")
        assert told in str(error.value)

    def test_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="cannot be read"):
            find_profile(str(tmp_path / "none.toml"))


class TestPools:
    def test_apple_is_one_pool_below_the_working_set(self) -> None:
        (pool,) = usable_memory(find_profile("m2-10").profile, 16)
        assert pool.kind == "unified"
        assert pool.total_bytes == 16 * GIB
        assert pool.usable_bytes == 16 * GIB * 2 // 3 - GIB // 2
        assert "working-set limit is about 10.7 GiB of 16.0 GiB" in pool.reason
        assert "margin of 0.5 GiB" in pool.reason

    @pytest.mark.parametrize(("ram_gib", "limit_mb"), [(16, 11453.25), (32, 22906.50), (64, 51539.61)])
    def test_working_set_as_observed(self, ram_gib: int, limit_mb: float) -> None:
        assert apple_working_set_bytes(ram_gib * GIB) / 1e6 == pytest.approx(limit_mb, abs=0.01)

    def test_card_has_its_own_memory_beside_the_hosts(self) -> None:
        gpu, host = usable_memory(find_profile("rtx4060").profile, host_memory_gib=32)
        assert (gpu.kind, host.kind) == ("gpu", "host")
        assert gpu.total_bytes == 8 * GIB
        assert 7 * GIB < gpu.usable_bytes < 8 * GIB
        assert host.total_bytes == 32 * GIB
        assert host.usable_bytes == 28 * GIB

    def test_assumptions_are_said(self) -> None:
        gpu, host = usable_memory(find_profile("rtx3080").profile)
        assert "10 GiB assumed, the smallest sold" in gpu.reason
        assert "16 GiB of host RAM assumed" in host.reason

    def test_integrated_graphics_share_is_never_added_to_ram(self) -> None:
        (pool,) = usable_memory(find_profile("780m").profile, 32)
        assert pool.kind == "unified"
        assert pool.usable_bytes < 16 * GIB

    def test_board_without_accelerator_is_host_memory(self) -> None:
        (pool,) = usable_memory(find_profile("pi5").profile, 4)
        assert (pool.kind, pool.usable_bytes) == ("host", 3 * GIB)

    def test_jetson_leaves_a_third_to_the_desktop(self) -> None:
        (pool,) = usable_memory(find_profile("orinnano").profile, 8)
        assert pool.kind == "unified"
        assert pool.usable_bytes / GIB == pytest.approx(5.2)

    def test_usable_never_exceeds_total(self) -> None:
        for key in ("m1-8", "rtx4090", "strixhalo", "pi4", "orinnano", "steamdeck"):
            for size in (0.5, 1, 8, 256):
                for pool in usable_memory(find_profile(key).profile, size):
                    assert 0 <= pool.usable_bytes < pool.total_bytes

    def test_no_memory_is_refused(self) -> None:
        with pytest.raises(UsageError):
            usable_memory(find_profile("pi5").profile, 0)


CPU = CpuBudget(6, "6 physical cores", 12, 12, 6, 6)


def machine(
    *devices: GgmlDevice, free_gib: float = 12, name: str = "AMD Ryzen 9 7950X 16-Core"
) -> ThisMachine:
    memory = MemoryBudget(16 * GIB, round(free_gib * GIB), None, "")
    return this_machine(devices, cpu=CPU, memory=memory, host_name=name)


def card(name: str, description: str, free_gib: float, total_gib: float, kind: str = "gpu") -> GgmlDevice:
    return GgmlDevice(name, description, kind, round(free_gib * GIB), round(total_gib * GIB))


HOST = card("CPU", "AMD Ryzen 9 7950X", 16, 16, "cpu")


class TestThisMachine:
    def test_inputs_of_the_budget_are_told(self) -> None:
        found = machine(card("CUDA0", "NVIDIA GeForce RTX 4060", 5.1, 8), HOST)
        gpu, host = found.pools
        assert gpu.reason.startswith("5.1 GiB free of 8.0 (2.9 used by other programs)")
        assert gpu.usable_bytes == round(5.1 * GIB) - GIB // 2
        assert (host.kind, host.total_bytes) == ("host", 16 * GIB)
        assert host.reason.startswith("12.0 GiB free of 16.0 (4.0 used by other programs)")

    def test_figures_come_from_the_profile_of_that_name(self) -> None:
        profile = machine(card("CUDA0", "NVIDIA GeForce RTX 4060 Laptop GPU", 7, 8), HOST).profile
        assert profile.key == "this-machine"
        assert profile.bandwidth_gb_s == find_profile("rtx4060l").profile.bandwidth_gb_s
        assert profile.memory_options_gib == (8,)
        assert profile.backends == ("cuda", "cpu")
        assert parse_profile(profile_to_toml(profile), "this-machine") == profile

    def test_unknown_card_has_no_invented_figures(self) -> None:
        profile = machine(card("Vulkan0", "Some New Card 9999 (RADV X)", 7, 8), HOST).profile
        assert profile.bandwidth_gb_s is None, "the processor's bandwidth is not the card's"
        assert "unknown" in profile.confidence
        assert parse_profile(profile_to_toml(profile), "this-machine") == profile

    def test_processor_is_known_beside_the_card(self) -> None:
        found = machine(card("CUDA0", "NVIDIA GeForce RTX 4060", 7, 8), HOST)
        assert found.host_profile is not None
        assert found.host_profile.key == "7950x"

    def test_driver_names_in_parentheses_are_ignored(self) -> None:
        profile = machine(card("Vulkan0", "AMD Radeon RX 7900 XTX (RADV NAVI31)", 20, 24), HOST).profile
        assert profile.architecture == "rdna3"
        assert profile.backends == ("vulkan", "cpu")

    def test_apple_is_one_pool_limited_by_metal_and_by_ram(self) -> None:
        roomy = machine(card("MTL0", "Apple M2", 10.6, 10.7), card("CPU", "Apple M2", 16, 16, "cpu"))
        (pool,) = roomy.pools
        assert pool.kind == "unified"
        assert pool.usable_bytes == round(10.6 * GIB) - GIB // 2
        assert "Apple M2 may take 10.7 of 16.0 GiB unified memory" in pool.reason
        (pool,) = machine(card("MTL0", "Apple M2", 10.6, 10.7), free_gib=6).pools
        assert pool.usable_bytes == round(5.5 * GIB)
        assert "6.0 GiB free of 16.0 (10.0 used by other programs)" in pool.reason
        assert roomy.profile.backends == ("metal", "cpu")

    def test_integrated_graphics_is_not_added_to_ram(self) -> None:
        found = machine(card("Vulkan0", "AMD Radeon 780M (RADV PHOENIX)", 12, 16, "igpu"), HOST, free_gib=9)
        assert [pool.kind for pool in found.pools] == ["unified"]

    def test_two_backends_list_a_card_once(self) -> None:
        first, second = (card(name, "NVIDIA GeForce RTX 4060", 7, 8) for name in ("CUDA0", "Vulkan0"))
        assert [pool.kind for pool in machine(first, second, HOST).pools] == ["gpu", "host"]

    def test_two_cards_are_two_pools(self) -> None:
        cards = [card(f"CUDA{index}", "NVIDIA GeForce RTX 3090", 23, 24) for index in range(2)]
        assert [pool.kind for pool in machine(*cards, HOST).pools] == ["gpu", "gpu", "host"]

    def test_cgroup_limit_is_named(self) -> None:
        memory = MemoryBudget(16 * GIB, GIB // 5, GIB // 2, "The cgroup limit of 0.5 GiB leaves 0.2 GiB.")
        (pool,) = this_machine((), cpu=CPU, memory=memory, host_name="").pools
        assert pool.reason.startswith("The cgroup limit of 0.5 GiB")
        assert 0 < pool.usable_bytes < GIB // 5

    def test_here(self) -> None:
        found = this_machine(())
        assert [pool.kind for pool in found.pools] == ["host"]
        assert found.pools[0].total_bytes == memory_budget().total_bytes
        assert found.profile.performance_cores == cpu_budget().num_performance
        assert parse_profile(profile_to_toml(found.profile), "this-machine") == found.profile

    def test_nvml_without_a_driver_is_empty(self) -> None:
        assert isinstance(nvml_devices(), tuple)
