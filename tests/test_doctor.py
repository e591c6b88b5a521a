from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from edgeserve.doctor.doctor import Machine, examine, finding_lines, findings_json, read_machine, run_doctor
from edgeserve.doctor.hardware import Gpu, build_features, cpu_flags, find_gpus, missing_features
from edgeserve.doctor.runtime import Finding, ProbeReport, probe_command, run_probe
from edgeserve.host import CpuBudget, MemoryBudget
from edgeserve.ink import Ink

GIB = 1 << 30
AVX2_BUILD = (
    "CPU : SSE3 = 1 | SSSE3 = 1 | AVX = 1 | AVX2 = 1 | F16C = 1 | FMA = 1 | AVX512 = 0 | REPACK = 1 | "
)
AMX_BUILD = "CPU : AVX2 = 1 | AVX512 = 1 | AMX_INT8 = 1 | "
AVX2_FLAGS = frozenset({"pni", "ssse3", "avx", "avx2", "f16c", "fma", "bmi2"})
MACHINE = Machine(
    CpuBudget(4, "4 physical cores, 8 logical processors.", 8, 8, 4, 4),
    MemoryBudget(16 * GIB, 12 * GIB, None, "12.0 GiB available of 16.0 GiB RAM."),
    (),
    AVX2_FLAGS,
)
CARD = Gpu("NVIDIA", "NVIDIA GeForce RTX 4060 Laptop GPU", 8 * GIB)


def child(*statements: str) -> ProbeReport:
    """What run_probe makes of a child that runs these statements."""
    code = "\n".join(
        ["import json, os, signal, sys", "say = lambda **line: print(json.dumps(line), flush=True)"]
    )
    return run_probe([sys.executable, "-c", "\n".join([code, *statements])])


def healthy(system_info: str = AVX2_BUILD, **facts: object) -> ProbeReport:
    cpu = {
        "name": "CPU",
        "description": "a CPU",
        "type": "cpu",
        "memory_free_bytes": 1,
        "memory_total_bytes": 1,
    }
    told = {"system_info": system_info, "supports_gpu_offload": False, "devices": [cpu], **facts}
    return ProbeReport(told, "decode")


def examined(
    *reports: ProbeReport,
    gpus: tuple[Gpu, ...] = (),
    flags: frozenset[str] = AVX2_FLAGS,
    model: Path | None = Path("m.gguf"),
    version: str = "0.3.36",
    machine: Machine = MACHINE,
) -> list[Finding]:
    """The findings for what the probes report, in turn."""
    answers = iter(reports)
    seen = Machine(machine.cpu, machine.memory, gpus, flags)
    return examine(model, machine=seen, runtime_version=version, probe=lambda _: next(answers))


def only(findings: list[Finding], level: str) -> Finding:
    (found,) = [finding for finding in findings if finding.level == level]
    return found


# --- a runtime that works ----------------------------------------------------------------------------------


def test_this_machine_in_order_with_a_real_decode(model_path: Path) -> None:
    findings = examine(model_path)
    assert [finding.level for finding in findings if finding.level == "problem"] == []
    runtime = next(finding for finding in findings if finding.sentence.startswith("llama-cpp-python"))
    assert "build (" in runtime.sentence
    decode = findings[-1]
    assert decode.sentence.startswith("a test decode ran (")
    assert decode.figures["codes"] == [0, 0] and decode.figures["decode_ms"] > 0


def test_the_runtime_never_enters_the_parent() -> None:
    code = (
        "import sys; from edgeserve.doctor.doctor import examine; found = examine();"
        " assert len(found) > 3, found; print('llama_cpp' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_healthy_machine_has_nothing_but_ok() -> None:
    findings = examined(healthy(decode_ms=12.94, codes=[0, 0]))
    assert {finding.level for finding in findings} == {"ok"}
    assert [finding.sentence for finding in findings][1:] == [
        "llama-cpp-python 0.3.36, CPU build (AVX2, no AMX)",
        "4 threads: 4 physical cores, 8 logical processors",
        "12.0 GiB available of 16.0 GiB RAM",
        "a test decode ran (12.9 ms, m)",
    ]


def test_devices_of_a_gpu_build_are_listed() -> None:
    card = {"name": "CUDA0", "description": "RTX 4060", "type": "gpu"}
    card |= {"memory_free_bytes": 7 * GIB, "memory_total_bytes": 8 * GIB}
    sentences = [
        f.sentence for f in examined(healthy(supports_gpu_offload=True, devices=[card]), gpus=(CARD,))
    ]
    assert "llama-cpp-python 0.3.36, CUDA build (AVX2, no AMX)" in sentences
    assert "CUDA0: RTX 4060, 7.0 of 8.0 GiB free" in sentences


def test_a_decode_that_fails_is_a_problem() -> None:
    problem = only(examined(healthy(decode_ms=1.0, codes=[0, -3])), "problem")
    assert problem.sentence == "the test decode failed (llama_decode returned [0, -3])"


# --- a runtime that does not -------------------------------------------------------------------------------


def test_an_illegal_instruction_becomes_a_sentence() -> None:
    report = child("say(stage='import')", "os.kill(os.getpid(), signal.SIGILL)")
    assert (report.died_of, report.stage) == (signal.SIGILL, "import")
    problem = only(examined(report, flags=AVX2_FLAGS - {"avx2", "fma"}), "problem")
    assert problem.sentence == (
        "This build uses instructions that this CPU or virtual machine does not have (AVX2, FMA),"
        " while its library was loading."
    )
    assert "make install BACKEND=native" in problem.remedy


def test_instructions_are_named_by_what_the_build_says_of_itself() -> None:
    report = child(
        f"say(system_info={AMX_BUILD!r}, supports_gpu_offload=False)",
        "say(stage='decode')",
        "os.kill(os.getpid(), signal.SIGILL)",
    )
    findings = examined(report, report, flags=AVX2_FLAGS | {"avx512f"})
    assert "(AMX_INT8), in a test decode" in only(findings, "problem").sentence


def test_an_unknown_instruction_is_not_guessed() -> None:
    report = child("say(stage='import')", "os.kill(os.getpid(), signal.SIGILL)")
    assert "which one the system does not tell" in only(examined(report), "problem").sentence


def test_after_a_crash_it_is_tried_without_rearranged_weights() -> None:
    crashed = child("say(stage='decode')", "os.kill(os.getpid(), signal.SIGILL)")
    findings = examined(crashed, healthy(decode_ms=15.0, codes=[0, 0]))
    note = only(findings, "note")
    assert note.sentence == "without rearranged weights a test decode ran (15.0 ms, m)"
    assert "--no-repack" in note.remedy
    assert "--no-repack" in probe_command(None, 1, repack=False)


@pytest.mark.parametrize(
    ("statements", "sentence"),
    [
        (
            ["say(stage='load')", "os.kill(os.getpid(), signal.SIGSEGV)"],
            "died of SIGSEGV while it loaded a model.",
        ),
        (["say(stage='load')", "os.kill(os.getpid(), signal.SIGKILL)"], "It may have run out of memory."),
        (["sys.exit('cannot go on')"], "cannot go on"),
        (["sys.exit(3)"], "The probe ended without a word."),
        (['sys.stdout.write(\'{"stage": "dev\')', "sys.exit('half a line')"], "half a line"),
    ],
)
def test_every_other_end_has_a_sentence_too(statements: list[str], sentence: str) -> None:
    assert sentence in only(examined(child(*statements)), "problem").sentence


def test_a_probe_that_hangs_is_ended() -> None:
    command = [
        sys.executable,
        "-c",
        'import time; print(\'{"stage": "devices"}\', flush=True); time.sleep(60)',
    ]
    problem = only(examined(run_probe(command, timeout_s=1.0)), "problem")
    assert problem.sentence == "The runtime gave no answer while it looked for devices."


def test_a_probe_that_cannot_start_is_a_sentence() -> None:
    report = run_probe(["/nonexistent/python"])
    assert "No such file" in only(examined(report), "problem").sentence


def probe_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str) -> ProbeReport:
    """The real probe with another llama_cpp before the installed one."""
    (tmp_path / "llama_cpp").mkdir()
    (tmp_path / "llama_cpp" / "__init__.py").write_text(package)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return run_probe(probe_command(None, 1))


def test_a_missing_runtime_names_where_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = probe_with(tmp_path, monkeypatch, "raise ImportError(\"No module named 'llama_cpp'\")")
    problem = only(examined(report, version=""), "problem")
    assert problem.sentence == "llama-cpp-python is not installed (No module named 'llama_cpp')."
    assert "https://abetlen.github.io/llama-cpp-python/whl" in problem.remedy


def test_a_missing_library_names_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = "raise RuntimeError('libgomp.so.1: cannot open shared object file')"
    problem = only(examined(probe_with(tmp_path, monkeypatch, error)), "problem")
    assert "libgomp.so.1: cannot open shared object file" in problem.sentence
    assert "libgomp1" in problem.remedy


def test_a_library_that_does_not_load_for_another_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = probe_with(tmp_path, monkeypatch, "raise OSError('invalid ELF header')")
    assert "BACKEND=native" in only(examined(report), "problem").remedy


def test_an_untested_release_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llama_cpp").mkdir()
    (tmp_path / "llama_cpp" / "llama_cpp.py").touch()
    (tmp_path / "llama_cpp" / "__init__.py").write_text("__version__ = '0.2.9'")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    problem = only(examined(run_probe(probe_command(None, 1)), version="0.2.9"), "problem")
    assert problem.sentence.startswith("llama-cpp-python 0.2.9 is not a tested release")
    assert "0.3.36" in problem.remedy


# --- what the build leaves unused --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpu", "sentence", "remedy"),
    [
        (CARD, "an NVIDIA GPU (RTX 4060 Laptop GPU, 8.0 GiB) is present", "BACKEND=cuda"),
        (Gpu("AMD", "AMD GPU"), "an AMD GPU is present", "BACKEND=vulkan"),
        (Gpu("Apple", "Apple GPU"), "an Apple GPU is present", "BACKEND=metal"),
    ],
)
def test_an_unused_gpu_is_said_with_the_remedy(gpu: Gpu, sentence: str, remedy: str) -> None:
    note = only(examined(healthy(), gpus=(gpu,)), "note")
    assert note.sentence == f"this build cannot offload, so -ngl has no effect: {sentence}"
    assert remedy in note.remedy


def test_a_gpu_build_that_sees_no_device_points_to_the_driver() -> None:
    problem = only(examined(healthy(supports_gpu_offload=True), gpus=(CARD,)), "problem")
    assert "can offload but sees no device" in problem.sentence and "driver" in problem.remedy


def test_amx_that_the_kernel_withholds_is_a_note() -> None:
    report = healthy(AMX_BUILD, decode_ms=10.0, codes=[0, 0])
    note = only(examined(report, flags=AVX2_FLAGS | {"avx512f"}), "note")
    assert "AMX" in note.sentence
    # A system that lists no instruction sets gives no reason to doubt.
    assert {finding.level for finding in examined(report, flags=frozenset())} == {"ok"}


def test_instructions_that_were_not_met_yet_are_a_problem() -> None:
    report = healthy("CPU : AVX2 = 1 | AVX512 = 1 | ")
    assert "(AVX512)" in only(examined(report, model=None), "problem").sentence


def test_limits_of_a_container_are_notes() -> None:
    machine = Machine(
        CpuBudget(1, "The cgroup quota allows 1.5 CPUs (cpu.max).", 8, 8, 4, 4, 1.5),
        MemoryBudget(
            16 * GIB, GIB // 4, GIB // 2, "The cgroup limit of 0.5 GiB (memory.max) leaves 0.2 GiB."
        ),
        (),
        AVX2_FLAGS,
    )
    notes = [f.sentence for f in examined(healthy(), machine=machine) if f.level == "note"]
    assert notes == [
        "1 thread: the cgroup quota allows 1.5 CPUs (cpu.max)",
        "the cgroup limit of 0.5 GiB (memory.max) leaves 0.2 GiB; models and their contexts have 0.2 GiB",
    ]


# --- hardware ----------------------------------------------------------------------------------------------


def pci_device(root: Path, address: str, **files: str) -> None:
    directory = root / "sys/bus/pci/devices" / address
    directory.mkdir(parents=True)
    for name, content in files.items():
        (directory / (name if name != "class_" else "class")).write_text(content + "\n")


def gpus_of(root: Path, nvidia_smi: Sequence[str] = ("/nonexistent",)) -> tuple[Gpu, ...]:
    return find_gpus(root / "sys", root / "proc", tuple(nvidia_smi), ("Linux", "x86_64"))


def test_cards_are_found_on_the_bus_without_a_driver(tmp_path: Path) -> None:
    pci_device(tmp_path, "0000:01:00.0", vendor="0x10de", class_="0x030200")
    pci_device(
        tmp_path, "0000:02:00.0", vendor="0x1002", class_="0x030000", mem_info_vram_total=str(16 * GIB)
    )
    pci_device(tmp_path, "0000:02:00.1", vendor="0x1002", class_="0x040300")  # its sound output
    pci_device(tmp_path, "0000:03:00.0", vendor="0x8086", class_="0x030000")
    information = tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0/information"
    information.parent.mkdir(parents=True)
    information.write_text("Model: \t\t NVIDIA L4\nIRQ: 12\n")
    assert gpus_of(tmp_path) == (Gpu("NVIDIA", "NVIDIA L4"), Gpu("AMD", "AMD GPU", 16 * GIB))


def test_the_drivers_own_tool_knows_more_than_the_bus(tmp_path: Path) -> None:
    pci_device(tmp_path, "0000:01:00.0", vendor="0x10de", class_="0x030000")
    tool = [sys.executable, "-c", "print('NVIDIA GeForce RTX 4060 Laptop GPU, 8192')"]
    assert gpus_of(tmp_path, tool) == (CARD,)


def test_other_places_for_a_gpu(tmp_path: Path) -> None:
    assert gpus_of(tmp_path) == ()
    assert find_gpus(system=("Darwin", "arm64")) == (Gpu("Apple", "Apple GPU"),)
    tree = tmp_path / "proc/device-tree"
    tree.mkdir(parents=True)
    (tree / "compatible").write_text("nvidia,p3767\0nvidia,tegra234\0")
    (tree / "model").write_text("NVIDIA Jetson Orin Nano\0")
    assert gpus_of(tmp_path) == (Gpu("NVIDIA", "NVIDIA Jetson Orin Nano"),)


def test_instruction_sets_of_cpu_and_build(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(
        "processor\t: 0\nflags\t\t: fpu avx avx2\n\nprocessor\t: 1\nflags\t\t: fpu\n"
    )
    assert cpu_flags(tmp_path) == {"fpu", "avx", "avx2"}
    (tmp_path / "cpuinfo").write_text("Features\t: asimd i8mm\n")
    assert cpu_flags(tmp_path) == {"asimd", "i8mm"}
    assert cpu_flags(tmp_path / "none") == frozenset()
    assert build_features(AVX2_BUILD) == ("SSE3", "SSSE3", "AVX", "AVX2", "F16C", "FMA")
    assert missing_features(("AVX2", "AVX512"), AVX2_FLAGS) == ("AVX512",)
    assert missing_features(("AVX2",), frozenset()) == ()


def test_this_machines_own_build_runs_on_it() -> None:
    report = run_probe(probe_command(None, 1))
    assert missing_features(build_features(str(report.facts["system_info"])), read_machine().flags) == ()


# --- showing -----------------------------------------------------------------------------------------------


def test_a_remedy_stands_beside_or_below() -> None:
    findings = [Finding("ok", "fine"), Finding("problem", "broken", "mend it")]
    assert finding_lines(findings, Ink(False), 80) == [" ok       fine", " problem  broken  mend it"]
    assert finding_lines(findings, Ink(False), 20)[1:] == [" problem  broken", "          mend it"]


def test_json_carries_level_sentence_remedy_and_figures() -> None:
    document = json.loads(findings_json(examined(healthy(decode_ms=12.9, codes=[0, 0]))))
    assert document["ok"] is True
    assert document["findings"][-1]["figures"] == {"decode_ms": 12.9, "model": "m.gguf", "codes": [0, 0]}
    assert set(document["findings"][0]) == {"level", "sentence", "remedy", "figures"}


def test_the_command_prints_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    code = run_doctor(as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert (code, document["ok"]) in ((0, True), (1, False))
    assert run_doctor() == code
    assert len(capsys.readouterr().out.splitlines()) >= len(document["findings"])
