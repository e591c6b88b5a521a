"""Energy counters: a faked powercap tree, since virtual machines have none."""

from __future__ import annotations

from pathlib import Path

from edgeserve.bench.energy import Counter, joules_between, read_counters


def zone(root: Path, folder_name: str, **files: str) -> None:
    folder = root / folder_name
    folder.mkdir()
    for file, text in files.items():
        (folder / file).write_text(text + "\n", encoding="utf-8")


def test_packages_and_memory_count_and_parts_of_a_package_do_not(tmp_path: Path) -> None:
    zone(tmp_path, "intel-rapl:0", name="package-0", energy_uj="5000000", max_energy_range_uj="262143328850")
    zone(tmp_path, "intel-rapl:0:0", name="core", energy_uj="3000000", max_energy_range_uj="262143328850")
    zone(tmp_path, "intel-rapl:0:1", name="dram", energy_uj="700000", max_energy_range_uj="65712999613")
    zone(tmp_path, "intel-rapl:1", name="package-1", max_energy_range_uj="262143328850")
    found = read_counters(tmp_path)
    assert {name: counter.joules for name, counter in found.items()} == {
        "intel-rapl:0": 5.0,
        "intel-rapl:0:1": 0.7,
    }, "a counter that cannot be read is left out"


def test_a_counter_that_started_again_is_not_negative() -> None:
    before = {"a": Counter(90.0, 100.0), "b": Counter(5.0)}
    after = {"a": Counter(15.0, 100.0), "b": Counter(7.5), "new": Counter(1000.0)}
    assert joules_between(before, after) == 25.0 + 2.5


def test_without_counters_there_is_no_figure(tmp_path: Path) -> None:
    assert read_counters(tmp_path / "absent") == {}
    assert joules_between({}, {}) is None
