"""Whether this build's AMX code may be used: some virtual machines list AMX and kill whoever uses it.

llama.cpp decides by what the CPU lists, and the illegal instruction comes when weights are first multiplied.
So a child tries first. Owns the verdict, kept in the user's cache folder for as long as the library, the CPU
and the kinds of tensors are the same. Builds without AMX never start a child.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgeserve.doctor.hardware import build_features, cpu_flags, missing_features
from edgeserve.doctor.runtime import ProbeReport, probe_command, run_probe

# A large model may take minutes to come off the disk; after that, no answer counts as a bad one.
_PROBE_TIMEOUT_S = 300.0
_NOT_LISTED = "AMX stays off: this build has it, this CPU or its kernel does not."
_TRAPPED = "AMX stays off: a test decode with it died of an illegal instruction on this machine."
_BY_INSTRUCTION = (signal.SIGILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGABRT)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether extra buffers (with AMX in them) may be used; `note` says why not, or ""."""

    is_safe: bool
    note: str = ""


@dataclass(frozen=True, slots=True)
class Build:
    """What a verdict holds for: the library's file as it is, the CPU, and what the model is made of."""

    system_info: str
    library_path: Path
    tensor_types: tuple[str, ...]
    cpu: str
    cpu_flags: frozenset[str]

    @property
    def has_amx(self) -> bool:
        return "AMX_INT8" in build_features(self.system_info)

    @property
    def key(self) -> str:
        status = self.library_path.stat()
        parts = (self.library_path, status.st_size, status.st_mtime_ns, self.cpu, *self.tensor_types)
        return "|".join(map(str, parts))


def this_build(model: Path) -> Build:
    """The loaded runtime, this machine, and the tensors of `model`."""
    from edgeserve import ggml, gguf, llama

    library = Path(str(llama.load_library()._lib._name))
    # The instructions are in the CPU backend, which lies beside the library.
    backend = next(iter(sorted(library.parent.glob("*ggml-cpu*"))), library)
    types = {tensor.type_name for tensor in gguf.read_header(model).tensors}
    # Whether a virtual machine may use AMX is the kernel's matter as well.
    cpu = f"{ggml.cpu_name()} {platform.release()}"
    return Build(ggml.system_info(), backend, tuple(sorted(types)), cpu, cpu_flags())


def judge(
    model: Path,
    n_threads: int,
    *,
    read_build: Callable[[Path], Build] = this_build,
    cache: Path | None = None,
    command: Callable[[Path, int], Sequence[str]] = probe_command,
) -> Verdict:
    """Whether `model` may be loaded with extra buffers. The arguments replace what would be used."""
    build = read_build(model)
    if not build.has_amx:
        return Verdict(True)
    if "AMX_INT8" in missing_features(build_features(build.system_info), build.cpu_flags):
        return Verdict(False, _NOT_LISTED)
    cache = cache or _default_cache()
    is_safe = _read(cache).get(build.key)
    if is_safe is None:
        report = run_probe(command(model, n_threads), _PROBE_TIMEOUT_S)
        is_safe = _survived(report)
        if report.died_of in _BY_INSTRUCTION or report.is_complete:
            _write(cache, {**_read(cache), build.key: is_safe})
    return Verdict(True) if is_safe else Verdict(False, _TRAPPED)


def _survived(report: ProbeReport) -> bool:
    """A child that ended with a sentence, or was killed from outside, says nothing about instructions: the
    load itself will say it again."""
    return report.died_of not in _BY_INSTRUCTION and not report.timed_out


def _default_cache() -> Path:
    from edgeserve.folders import cache_dir

    return cache_dir() / "amx.json"


def _read(cache: Path) -> dict[str, bool]:
    """What is known; nothing when the file is missing or damaged, since it can be found out again."""
    try:
        found = json.loads(cache.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return (
        {key: value for key, value in found.items() if isinstance(value, bool)}
        if isinstance(found, dict)
        else {}
    )


def _write(cache: Path, verdicts: dict[str, bool]) -> None:
    with contextlib.suppress(OSError):  # a read-only home only costs another try
        cache.parent.mkdir(parents=True, exist_ok=True)
        temporary = cache.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(verdicts, indent=1), encoding="utf-8")
        temporary.replace(cache)
