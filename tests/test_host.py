"""CPU and memory limits, read from made-up /proc, sysfs and cgroup trees."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from edgeserve.host import cpu_budget, format_gib, memory_budget, parse_cpu_list

GIB = 1 << 30
MIB = 1 << 20

WriteTree = Callable[[dict[str, str | int]], Path]


@pytest.fixture
def tree(tmp_path: Path) -> WriteTree:
    """Write files below the temporary root; keys are paths such as "cgroup/a/cpu.max"."""

    def write(files: dict[str, str | int]) -> Path:
        for name, content in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{content}\n")
        return tmp_path

    return write


def cores(count: int, threads_per_core: int = 1) -> dict[str, str | int]:
    """sysfs files of a machine whose siblings are numbered like Intel's: 0..n-1, then n..2n-1."""
    files: dict[str, str | int] = {"sys/devices/system/cpu/online": f"0-{count * threads_per_core - 1}"}
    for cpu in range(count * threads_per_core):
        siblings = ",".join(str(cpu % count + count * i) for i in range(threads_per_core))
        files[f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"] = siblings
    return files


def budget(root: Path, affinity: set[int] | None = None) -> tuple[int, str]:
    everything = frozenset(range(1024))
    answer = cpu_budget(
        root / "proc", root / "cgroup", root / "sys", frozenset(affinity) if affinity else everything
    )
    return answer.n_threads, answer.reason


V2: dict[str, str | int] = {"proc/self/cgroup": "0::/app", "cgroup/cgroup.controllers": "cpu memory"}


class TestCpu:
    def test_physical_cores_are_counted_once_for_two_threads(self, tree: WriteTree) -> None:
        assert budget(tree(cores(4, threads_per_core=2))) == (4, "4 physical cores, 8 logical processors.")

    def test_quota_of_one_and_a_half_gives_one_thread(self, tree: WriteTree) -> None:
        root = tree({**cores(8), **V2, "cgroup/app/cpu.max": "150000 100000"})
        assert budget(root) == (1, "The cgroup quota allows 1.5 CPUs (cpu.max).")

    def test_quota_below_one_cpu_still_gives_a_thread(self, tree: WriteTree) -> None:
        assert budget(tree({**cores(8), **V2, "cgroup/app/cpu.max": "20000 100000"}))[0] == 1

    def test_quota_larger_than_the_machine_does_not_bind(self, tree: WriteTree) -> None:
        n_threads, reason = budget(tree({**cores(2), **V2, "cgroup/app/cpu.max": "900000 100000"}))
        assert n_threads == 2
        assert "physical" in reason

    @pytest.mark.parametrize("content", ["max 100000", "", "garbage", "100000 0"])
    def test_no_quota_or_an_unreadable_one_does_not_bind(self, tree: WriteTree, content: str) -> None:
        assert budget(tree({**cores(8), **V2, "cgroup/app/cpu.max": content}))[0] == 8

    def test_tightest_ancestor_binds(self, tree: WriteTree) -> None:
        root = tree(
            {
                **cores(16),
                "proc/self/cgroup": "0::/pod/container",
                "cgroup/cgroup.controllers": "cpu",
                "cgroup/pod/cpu.max": "300000 100000",
                "cgroup/pod/container/cpu.max": "800000 100000",
            }
        )
        assert budget(root)[0] == 3

    def test_v1_quota(self, tree: WriteTree) -> None:
        root = tree(
            {
                **cores(8),
                "proc/self/cgroup": "4:cpu,cpuacct:/docker/abc",
                "cgroup/cpu,cpuacct/docker/abc/cpu.cfs_quota_us": 250000,
                "cgroup/cpu,cpuacct/docker/abc/cpu.cfs_period_us": 100000,
            }
        )
        assert budget(root) == (2, "The cgroup quota allows 2.5 CPUs (cpu.cfs_quota_us).")

    def test_v1_minus_one_means_no_quota(self, tree: WriteTree) -> None:
        root = tree(
            {
                **cores(8),
                "proc/self/cgroup": "1:cpu:/",
                "cgroup/cpu/cpu.cfs_quota_us": -1,
                "cgroup/cpu/cpu.cfs_period_us": 100000,
            }
        )
        assert budget(root)[0] == 8

    def test_container_that_sees_only_its_own_part_of_the_tree(self, tree: WriteTree) -> None:
        """/proc tells the host's path, the mount shows the container's group as its root."""
        root = tree(
            {
                **cores(8),
                "proc/self/cgroup": "3:cpu:/docker/abc",
                "cgroup/cpu/cpu.cfs_quota_us": 400000,
                "cgroup/cpu/cpu.cfs_period_us": 100000,
            }
        )
        assert budget(root)[0] == 4

    def test_affinity_of_one(self, tree: WriteTree) -> None:
        n_threads, reason = budget(tree(cores(8)), affinity={5})
        assert n_threads == 1
        assert reason == "The affinity mask allows 1 of 8 processors, 1 usable core."

    def test_affinity_to_both_threads_of_a_core_is_one_core(self, tree: WriteTree) -> None:
        assert budget(tree(cores(4, threads_per_core=2)), affinity={1, 5})[0] == 1

    def test_the_smallest_of_quota_and_affinity_binds(self, tree: WriteTree) -> None:
        root = tree({**cores(8), **V2, "cgroup/app/cpu.max": "300000 100000"})
        assert budget(root, affinity={0, 1})[0] == 2
        assert budget(root, affinity={0, 1, 2, 3, 4})[0] == 3

    def test_intel_hybrid_uses_performance_cores(self, tree: WriteTree) -> None:
        """Four P-cores with two threads each (0-7) and four E-cores (8-11)."""
        files: dict[str, str | int] = {"sys/devices/system/cpu/online": "0-11"}
        for cpu in range(12):
            siblings = f"{cpu // 2 * 2}-{cpu // 2 * 2 + 1}" if cpu < 8 else str(cpu)
            files[f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"] = siblings
        root = tree({**files, "sys/devices/cpu_core/cpus": "0-7"})
        n_threads, reason = budget(root)
        assert n_threads == 4
        assert reason.startswith("4 performance cores; 4 slower")

    def test_arm_capacities_leave_little_cores_out(self, tree: WriteTree) -> None:
        capacities = [250, 250, 250, 250, 925, 925, 925, 1024]
        files = {f"sys/devices/system/cpu/cpu{i}/cpu_capacity": c for i, c in enumerate(capacities)}
        root = tree({**cores(8), **files})
        assert budget(root)[0] == 4
        assert budget(root, affinity={0, 1})[0] == 2, "a mask of slow cores only must still give threads"

    def test_this_machine_has_at_least_one_thread_and_no_more_than_processors(self) -> None:
        answer = cpu_budget()
        assert 1 <= answer.n_threads <= (os.cpu_count() or 1)
        assert answer.n_threads <= answer.num_allowed <= answer.num_logical
        if sys.platform == "linux":
            assert answer.num_allowed == len(os.sched_getaffinity(0))

    def test_cpu_list(self) -> None:
        assert parse_cpu_list("0-2,8,10-11") == {0, 1, 2, 8, 10, 11}
        with pytest.raises(ValueError, match="invalid literal"):
            parse_cpu_list("0-x")


def meminfo(total_bytes: int, available_bytes: int, free_bytes: int = 0) -> dict[str, str | int]:
    lines = {"MemTotal": total_bytes, "MemFree": free_bytes, "MemAvailable": available_bytes}
    text = "\n".join(f"{name}:{value // 1024:12} kB" for name, value in lines.items())
    return {"proc/meminfo": text + "\nHugePages_Total:       0"}


class TestMemory:
    def test_available_not_total_and_not_free(self, tree: WriteTree) -> None:
        """A board whose page cache is full: little is free, most is available."""
        root = tree(meminfo(64 * GIB, 60 * GIB, free_bytes=1 * GIB))
        answer = memory_budget(root / "proc", root / "cgroup")
        assert (answer.total_bytes, answer.available_bytes) == (64 * GIB, 60 * GIB)
        assert answer.limit_bytes is None
        assert answer.bound_by == "60.0 GiB available of 64.0 GiB RAM."

    def test_other_programs_bind(self, tree: WriteTree) -> None:
        root = tree(meminfo(16 * GIB, 3 * GIB // 2))
        assert memory_budget(root / "proc", root / "cgroup").available_bytes == 3 * GIB // 2

    def test_v2_limit_counts_inactive_file_as_room(self, tree: WriteTree) -> None:
        root = tree(
            {
                **meminfo(16 * GIB, 8 * GIB),
                **V2,
                "cgroup/app/memory.max": 512 * MIB,
                "cgroup/app/memory.current": 300 * MIB,
                "cgroup/app/memory.stat": f"anon {200 * MIB}\ninactive_file {80 * MIB}\nactive_file 0",
            }
        )
        answer = memory_budget(root / "proc", root / "cgroup")
        assert answer.available_bytes == (512 - 300 + 80) * MIB
        assert answer.limit_bytes == 512 * MIB
        assert answer.bound_by == "The cgroup limit of 0.5 GiB (memory.max) leaves 0.3 GiB."

    def test_memory_high_is_a_limit_too(self, tree: WriteTree) -> None:
        root = tree(
            {
                **meminfo(16 * GIB, 8 * GIB),
                **V2,
                "cgroup/app/memory.max": 4 * GIB,
                "cgroup/app/memory.high": 2 * GIB,
                "cgroup/app/memory.current": 1 * GIB,
            }
        )
        answer = memory_budget(root / "proc", root / "cgroup")
        assert answer.available_bytes == 1 * GIB
        assert "memory.high" in answer.bound_by

    def test_parent_with_least_room_binds_although_its_limit_is_larger(self, tree: WriteTree) -> None:
        root = tree(
            {
                **meminfo(64 * GIB, 60 * GIB),
                "proc/self/cgroup": "0::/pod/container",
                "cgroup/cgroup.controllers": "memory",
                "cgroup/pod/memory.max": 8 * GIB,
                "cgroup/pod/memory.current": 7 * GIB,
                "cgroup/pod/container/memory.max": 4 * GIB,
                "cgroup/pod/container/memory.current": 1 * GIB,
            }
        )
        answer = memory_budget(root / "proc", root / "cgroup")
        assert (answer.available_bytes, answer.limit_bytes) == (1 * GIB, 8 * GIB)

    def test_hybrid_machine_reads_the_v1_controller(self, tree: WriteTree) -> None:
        """v1 controllers beside an empty v2 tree, with the v1 word for "no limit" at the root."""
        root = tree(
            {
                **meminfo(32 * GIB, 30 * GIB),
                "proc/self/cgroup": "4:memory:/service/a\n2:cpuacct:/\n1:cpu:/\n0::/",
                "cgroup/unified/cgroup.controllers": "",
                "cgroup/memory/memory.limit_in_bytes": 9223372036854771712,
                "cgroup/memory/memory.usage_in_bytes": 20 * GIB,
                "cgroup/memory/service/a/memory.limit_in_bytes": 4 * GIB,
                "cgroup/memory/service/a/memory.usage_in_bytes": 3 * GIB,
                "cgroup/memory/service/a/memory.stat": f"inactive_file 0\ntotal_inactive_file {GIB}",
            }
        )
        answer = memory_budget(root / "proc", root / "cgroup")
        assert (answer.available_bytes, answer.limit_bytes) == (2 * GIB, 4 * GIB)

    def test_v1_word_for_no_limit_is_not_a_limit(self, tree: WriteTree) -> None:
        root = tree(
            {
                **meminfo(32 * GIB, 30 * GIB),
                "proc/self/cgroup": "4:memory:/",
                "cgroup/memory/memory.limit_in_bytes": 9223372036854771712,
                "cgroup/memory/memory.usage_in_bytes": 20 * GIB,
            }
        )
        assert memory_budget(root / "proc", root / "cgroup").limit_bytes is None

    def test_full_group_leaves_nothing_rather_than_less(self, tree: WriteTree) -> None:
        root = tree(
            {
                **meminfo(16 * GIB, 8 * GIB),
                **V2,
                "cgroup/app/memory.max": 1 * GIB,
                "cgroup/app/memory.current": 2 * GIB,
            }
        )
        assert memory_budget(root / "proc", root / "cgroup").available_bytes == 0

    def test_this_machine(self) -> None:
        answer = memory_budget()
        assert 0 < answer.available_bytes <= answer.total_bytes

    def test_format(self) -> None:
        assert format_gib(8 * GIB) == "8.0"
