"""Ask llama.cpp's own dry run for memory figures, in a child process, and make reports of its answers.

Owns the child: its request, its limits, its crashes. The runtime is never imported here; whatever goes wrong
in the child becomes a `DryRunFailure`, and the caller falls back to the estimate.

    results = measure(header, [Settings(n_ctx=8192), Settings(n_ctx=16384)], devices)
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from edgeserve.gguf import write_header_copy
from edgeserve.gguf_header import GGUFHeader
from edgeserve.planner.extras import Extras
from edgeserve.planner.library_figures import BufferBytes, DryRun
from edgeserve.planner.memory import ModelMemory
from edgeserve.planner.placement import Accelerator
from edgeserve.planner.report import MemoryReport
from edgeserve.planner.settings import Settings

DEFAULT_TIMEOUT_S = 60.0
# Recurrent states are really allocated in a dry run, so the child is kept from taking the machine's memory.
DEFAULT_MEMORY_LIMIT_BYTES = 2 << 30

_REFUSALS = (
    (r"does not support different K .* and V .* cache types", "kv_types_differ"),
    (r"quantized V cache requires flash_attn", "quantized_v_without_flash_attn"),
    (r"K cache type .* does not divide n_embd_head_k", "k_block"),
    (r"V cache type .* does not divide n_embd_head_v", "v_block"),
    (r"n_batch and n_ubatch cannot both be zero", "no_batch"),
    (r"n_ctx and .* cannot both be zero", "no_context"),
    (r"n_seq_max must be <=", "n_seq_max"),
)

FailureKind = Literal["refused", "not loaded", "crashed", "timed out", "too large", "no runtime"]


@dataclass(frozen=True, slots=True)
class DryRunFailure:
    """No figure for one settings. `code` is that of `settings.Rejection` when llama.cpp refused them."""

    kind: FailureKind
    message: str
    code: str = ""


def measure(
    header: GGUFHeader,
    all_settings: Sequence[Settings],
    devices: Sequence[Accelerator] = (),
    *,
    extras: Extras | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    memory_limit_bytes: int = DEFAULT_MEMORY_LIMIT_BYTES,
    allocate: bool = False,
    pretend: bool = True,
    python: str = sys.executable,
) -> list[MemoryReport | DryRunFailure]:
    """One report for each settings, compute from the library itself.

    `devices` are pretended, so any will do; with `pretend` False the library uses the devices that are really
    there, which `devices` must then describe by the same names. `allocate` really loads the model and makes
    the contexts, and reports what they then take.
    """
    model = ModelMemory(header)
    results = dry_run(
        header,
        all_settings,
        devices,
        timeout_s=timeout_s,
        memory_limit_bytes=memory_limit_bytes,
        allocate=allocate,
        pretend=pretend,
        python=python,
        model=model,
    )
    return [
        result if isinstance(result, DryRunFailure) else model.report(settings, devices, result, extras)
        for settings, result in zip(all_settings, results, strict=True)
    ]


def dry_run(
    header: GGUFHeader,
    all_settings: Sequence[Settings],
    devices: Sequence[Accelerator] = (),
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    memory_limit_bytes: int = DEFAULT_MEMORY_LIMIT_BYTES,
    allocate: bool = False,
    pretend: bool = True,
    python: str = sys.executable,
    model: ModelMemory | None = None,
) -> list[DryRun | DryRunFailure]:
    """The library's figures for each settings, in order. A settings that crashes the child costs only
    itself."""
    too_large = _too_large(model or ModelMemory(header), all_settings, memory_limit_bytes)
    asked = [settings for settings, failure in zip(all_settings, too_large, strict=True) if failure is None]
    with tempfile.TemporaryDirectory(prefix="edgeserve-measure-") as directory:
        path = _path(header, Path(directory))
        child = _Child(python, timeout_s, memory_limit_bytes, path, devices if pretend else None, allocate)
        answers = iter([_allocated(answer) if allocate else answer for answer in child.ask(asked)])
        return [failure if failure is not None else next(answers) for failure in too_large]


def _allocated(answer: DryRun | DryRunFailure) -> DryRun | DryRunFailure:
    return replace(answer, allocated=True) if isinstance(answer, DryRun) else answer


def _too_large(
    model: ModelMemory, all_settings: Sequence[Settings], memory_limit_bytes: int
) -> list[DryRunFailure | None]:
    failures: list[DryRunFailure | None] = []
    for settings in all_settings:
        state_bytes = model.report(settings).state_bytes
        failures.append(None)
        if 2 * state_bytes > memory_limit_bytes:
            message = f"A dry run would really allocate {state_bytes >> 20} MiB of recurrent state."
            failures[-1] = DryRunFailure("too large", message)
    return failures


def _path(header: GGUFHeader, directory: Path) -> str:
    """A file that the library accepts: the model itself, or a sparse file with its header."""
    complete = all(shard.local and shard.file_bytes >= shard.expected_bytes for shard in header.shards)
    if complete:
        return header.source
    return str(write_header_copy(header, directory / "header.gguf"))


@dataclass(frozen=True, slots=True)
class _Child:
    """How to start the child; each start answers as many settings as it survives."""

    python: str
    timeout_s: float
    memory_limit_bytes: int
    path: str
    devices: Sequence[Accelerator] | None
    allocate: bool

    def ask(self, all_settings: Sequence[Settings]) -> Iterator[DryRun | DryRunFailure]:
        remaining = list(all_settings)
        while remaining:
            answers, failure = self._run(remaining)
            yield from answers
            remaining = remaining[len(answers) :]
            if failure is not None and remaining:
                yield failure
                remaining = remaining[1:]
                if failure.kind == "no runtime":
                    yield from (failure for _ in remaining)
                    return

    def _run(
        self, all_settings: Sequence[Settings]
    ) -> tuple[list[DryRun | DryRunFailure], DryRunFailure | None]:
        """Answers in order, and what ended the child before it had given them all."""
        command = [self.python, "-m", "edgeserve.dry_run"]
        try:
            done = subprocess.run(
                command,
                input=json.dumps(self._request(all_settings)),
                env=_environment(),
                capture_output=True,
                text=True,
                timeout=self.timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            output = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
            message = f"The dry run did not answer within {self.timeout_s:g} s."
            return _answers(output), DryRunFailure("timed out", message)
        except OSError as error:
            return [], DryRunFailure("no runtime", f"The dry run cannot be started: {error}.")
        answers = _answers(done.stdout)
        return answers, _ending(done.returncode, done.stderr) if len(answers) < len(all_settings) else None

    def _request(self, all_settings: Sequence[Settings]) -> dict[str, Any]:
        return {
            "path": self.path,
            "settings": [settings_to_json(settings) for settings in all_settings],
            "devices": None if self.devices is None else [device_to_json(d) for d in self.devices],
            # A real device's driver maps far more than it uses.
            "memory_limit_bytes": None if self.devices is None else self.memory_limit_bytes,
            "no_alloc": not self.allocate,
        }


def _environment() -> dict[str, str]:
    """Ours, with the way to this package, and without the debugger that ggml starts before it aborts."""
    package = str(Path(__file__).resolve().parents[2])
    inherited = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([package, *([inherited] if inherited else [])])
    return {**os.environ, "PYTHONPATH": path, "GGML_NO_BACKTRACE": "1"}


def settings_to_json(settings: Settings) -> dict[str, Any]:
    """The fields that `edgeserve.dry_run` reads."""
    fields = asdict(settings)
    if fields["n_outputs_max"] is None:
        fields["n_outputs_max"] = settings.n_seq_max
    return fields


def device_to_json(device: Accelerator) -> dict[str, Any]:
    """The fields of `VirtualDeviceSpec`."""
    fields = asdict(device)
    del fields["overhead_bytes"]
    return fields


def _answers(output: str) -> list[DryRun | DryRunFailure]:
    answers = []
    for line in output.splitlines():
        try:
            answers.append(_answer(json.loads(line)))
        except ValueError:  # the last line of a child that died while writing it
            break
    return answers


def _answer(answer: dict[str, Any]) -> DryRun | DryRunFailure:
    if "error" in answer:
        return _refusal(answer["error"], answer["stage"])
    buffers = tuple(
        BufferBytes(buffer["name"], buffer["model"], buffer["context"], buffer["compute"])
        for buffer in answer["buffers"]
    )
    return DryRun(
        buffers=buffers,
        exact=answer["exact"],
        flash_attn=answer["flash_attn"],
        flash_attn_reason=answer["flash_attn_reason"],
        n_ctx=answer["n_ctx"],
        n_ctx_seq=answer["n_ctx_seq"],
    )


def _refusal(message: str, stage: str) -> DryRunFailure:
    for pattern, code in _REFUSALS:
        if re.search(pattern, message):
            return DryRunFailure("refused", message, code)
    kinds: dict[str, FailureKind] = {"load": "not loaded", "runtime": "no runtime"}
    return DryRunFailure(kinds.get(stage, "refused"), message)


def _ending(returncode: int, stderr: str) -> DryRunFailure:
    last = (stderr.strip().splitlines() or ["no message"])[-1]
    if "No module named" in last:
        return DryRunFailure("no runtime", last)
    how = f"by signal {-returncode}" if returncode < 0 else f"with exit code {returncode}"
    return DryRunFailure("crashed", f"The dry run ended {how}: {last}")
