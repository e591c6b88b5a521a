"""What hardware is there, asked of the system and not of the runtime: graphics cards and CPU instructions.

Owns the reading of /proc, PCI devices in sysfs and `nvidia-smi`. Works where llama-cpp-python is missing or
built without GPU support, which is exactly when the question matters. Every root is a parameter.
"""

from __future__ import annotations

import platform
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

PROC_ROOT = Path("/proc")
SYS_ROOT = Path("/sys")
_PCI_VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD"}
_PCI_DISPLAY_CLASS = "0x03"  # display controllers; 3D controllers of data centres are 0x0302
_NVIDIA_SMI = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")

# llama.cpp's names of instruction sets (`llama_print_system_info`) and the kernel's (/proc/cpuinfo).
FEATURES: Mapping[str, str] = {
    "SSE3": "pni",
    "SSSE3": "ssse3",
    "AVX": "avx",
    "AVX2": "avx2",
    "F16C": "f16c",
    "FMA": "fma",
    "BMI2": "bmi2",
    "AVX_VNNI": "avx_vnni",
    "AVX512": "avx512f",
    "AVX512_VBMI": "avx512vbmi",
    "AVX512_VNNI": "avx512_vnni",
    "AVX512_BF16": "avx512_bf16",
    "AMX_INT8": "amx_int8",
    "NEON": "asimd",
    "FP16_VA": "asimdhp",
    "DOTPROD": "asimddp",
    "MATMUL_INT8": "i8mm",
    "SVE": "sve",
    "SME": "sme",
}
# What prebuilt x86-64 wheels rely on.
WHEEL_FEATURES = ("AVX", "AVX2", "F16C", "FMA", "BMI2")


@dataclass(frozen=True, slots=True)
class Gpu:
    """A graphics processor. `memory_bytes` is None when the system does not say."""

    vendor: str
    name: str
    memory_bytes: int | None = None


def find_gpus(
    sys_root: Path = SYS_ROOT,
    proc_root: Path = PROC_ROOT,
    nvidia_smi: tuple[str, ...] = _NVIDIA_SMI,
    system: tuple[str, str] | None = None,
) -> tuple[Gpu, ...]:
    """NVIDIA, AMD and Apple graphics processors. `system` replaces (operating system, machine)."""
    if (system or (platform.system(), platform.machine())) == ("Darwin", "arm64"):
        return (Gpu("Apple", "Apple GPU"),)
    by_tool = tuple(_from_nvidia_smi(nvidia_smi))
    by_bus = tuple(_from_pci(sys_root, proc_root)) or tuple(_from_device_tree(proc_root))
    # The tool knows names and memory; the bus also sees a card whose driver is not loaded.
    return (*by_tool, *(gpu for gpu in by_bus if not (by_tool and gpu.vendor == "NVIDIA")))


def _from_nvidia_smi(command: tuple[str, ...]) -> Iterator[Gpu]:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return
    for line in done.stdout.splitlines():
        name, _, mib = line.rpartition(",")
        if name:
            yield Gpu("NVIDIA", name.strip(), int(mib) << 20 if mib.strip().isdigit() else None)


def _from_pci(sys_root: Path, proc_root: Path) -> Iterator[Gpu]:
    for device in sorted((sys_root / "bus/pci/devices").glob("*")):
        vendor = _PCI_VENDORS.get(_read(device / "vendor"))
        if vendor is None or not _read(device / "class").startswith(_PCI_DISPLAY_CLASS):
            continue
        told = _read(proc_root / "driver/nvidia/gpus" / device.name / "information")
        model = re.search(r"^Model:\s*(.+)$", told, re.MULTILINE)
        name = model[1] if model else _read(device / "product_name") or f"{vendor} GPU"
        vram = _read(device / "mem_info_vram_total")
        yield Gpu(vendor, name, int(vram) if vram.isdigit() else None)


def _from_device_tree(proc_root: Path) -> Iterator[Gpu]:
    """Jetson boards have their graphics processor outside of PCI."""
    if "nvidia,tegra" in _read(proc_root / "device-tree/compatible"):
        yield Gpu("NVIDIA", _read(proc_root / "device-tree/model") or "NVIDIA Tegra")


def cpu_flags(proc_root: Path = PROC_ROOT) -> frozenset[str]:
    """Instruction sets that the kernel lets programs use, by its own names; empty where it does not tell."""
    found = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", _read(proc_root / "cpuinfo"), re.MULTILINE)
    return frozenset(found[1].split()) if found else frozenset()


def build_features(system_info: str) -> tuple[str, ...]:
    """The instruction sets that a build uses, out of llama.cpp's `AVX2 = 1 | AVX512 = 0 | ...`."""
    enabled = re.findall(r"(\w+) = 1", system_info)
    return tuple(name for name in FEATURES if name in enabled)


def missing_features(features: tuple[str, ...], flags: frozenset[str]) -> tuple[str, ...]:
    """Those that the kernel does not list. Nothing is known to be missing where it lists nothing."""
    return tuple(name for name in features if flags and FEATURES[name] not in flags)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip("\0\n ")
    except OSError:
        return ""
