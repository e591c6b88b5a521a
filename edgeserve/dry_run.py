"""Child process: what llama.cpp itself says a model takes, without allocating it. `python -m
edgeserve.dry_run`

Owns the talk with the library's dry run (`no_alloc`) and the reading of its figures. Knows nothing of plans:
it answers one line of JSON for each settings it is given, in order, so that a crash (a malformed file can
abort the library) costs one answer and names the settings that caused it.

Request, one JSON document on stdin:
    path                 a GGUF file: whole, sparse, or only its header (then a sparse copy is made)
    settings             a list of objects with llama.cpp's own names (n_ctx, n_seq_max, n_batch, n_ubatch,
                         n_outputs_max, n_rs_seq, type_k, type_v, flash_attn, kv_unified, swa_full,
                         offload_kqv, op_offload, embeddings, n_gpu_layers, tensor_split, use_extra_bufts)
                         and n_cpu_moe; what is left out has the library's default
    devices              devices to pretend (fields of VirtualDeviceSpec); [] is the CPU alone, null the
                         devices that this build really has
    memory_limit_bytes   limit of this process: recurrent states are allocated even in a dry run
    no_alloc             false loads for real

Answer, one line for each settings:
    {"buffers": [{"name", "is_host", "model", "context", "compute"}, ...], "exact", "flash_attn",
     "flash_attn_reason", "n_ctx", "n_ctx_seq", "output_mib"}
    or {"error", "stage"}, where stage is "runtime", "load" or "context"

"exact" is false where the C++ map of the library cannot be read (its layout is that of libstdc++, so only
Linux has it): then only compute is given, from the log, to 5 kB.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeserve import llama
from edgeserve.config import CACHE_TYPE_IDS
from edgeserve.errors import EdgeserveError, RuntimeUnavailableError
from edgeserve.gguf import read_header, write_header_copy
from edgeserve.layout_check import check_layouts
from edgeserve.virtual_device import VirtualDevice, VirtualDeviceSpec, device_array

_FLASH_ATTN_IDS = {"auto": -1, "off": 0, "on": 1}
_LOAD_MODE_NONE = 0  # mmap and no_alloc together abort the process
_MAX_BUFFER_TYPES = 64
_MIB = 1 << 20
_LOG_STEP_MIB = 0.005
_CONTEXT_KEYS = {
    "n_ctx", "n_seq_max", "n_batch", "n_ubatch", "n_outputs_max", "n_rs_seq", "kv_unified", "swa_full",
    "offload_kqv", "op_offload", "embeddings",
}  # fmt: skip
_MODEL_KEYS = ("n_gpu_layers", "n_cpu_moe", "tensor_split", "use_extra_bufts")

_COMPUTE_LINE = re.compile(r"sched_reserve: +(\S+) compute buffer size = +([\d.]+) MiB")
_OUTPUT_LINE = re.compile(r"llama_context: +\S+ +output buffer size = +([\d.]+) MiB")
_ELSEWHERE_LINE = re.compile(r"layer \d+ is assigned to device \S+ but Flash Attention.*")

Json = dict[str, Any]


class DryRunError(Exception):
    """The library refused; the message is its own line. `stage` is "load" or "context"."""

    def __init__(self, message: str, stage: str) -> None:
        super().__init__(message)
        self.stage = stage


def main() -> int:
    """Answer the request on stdin. Exit code 0 when every settings has an answer, a refusal included."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever the library prints must not get between
    request = json.load(sys.stdin)
    _limit_memory(request.get("memory_limit_bytes"))
    for answer in answer_all(request):
        print(json.dumps(answer), file=answers, flush=True)
    return 0


def answer_all(request: Json) -> Iterator[Json]:
    """One answer for each settings; neighbours that need the same model share one load."""
    try:
        library = Library(request.get("devices"), bool(request.get("no_alloc", True)))
        with tempfile.TemporaryDirectory(prefix="edgeserve-dry-run-") as directory:
            path = _loadable(request["path"], Path(directory))
            yield from _answers(library, path, request["settings"])
    except EdgeserveError as error:
        stage = "runtime" if isinstance(error, RuntimeUnavailableError) else "load"
        yield from ({"error": str(error), "stage": stage} for _ in request["settings"])


def _answers(library: Library, path: str, all_settings: Sequence[Json]) -> Iterator[Json]:
    loaded: tuple[Json, Any] | None = None
    for settings in all_settings:
        wanted = {key: settings.get(key) for key in _MODEL_KEYS}
        try:
            if loaded is None or loaded[0] != wanted:
                if loaded is not None:
                    library.free_model(loaded[1])
                    loaded = None
                loaded = (wanted, library.load(path, settings))
            yield library.measure(loaded[1], settings)
        except DryRunError as error:
            yield {"error": str(error), "stage": error.stage}
    if loaded is not None:
        library.free_model(loaded[1])


def _loadable(path: str, directory: Path) -> str:
    header = read_header(path)
    if all(shard.file_bytes >= shard.expected_bytes for shard in header.shards):
        return path
    return str(write_header_copy(header, directory / "header.gguf"))


def _limit_memory(limit_bytes: int | None) -> None:
    if not limit_bytes:
        return
    try:
        import resource
    except ImportError:  # Windows has no limits of this kind
        return
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = limit_bytes if hard == resource.RLIM_INFINITY else min(limit_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


class _Map(ctypes.Structure):
    """`std::map` of libstdc++, 48 bytes: the header node (colour, parent, left, right) and the count."""

    _fields_ = (
        ("compare", ctypes.c_uint64),
        ("color", ctypes.c_uint64),
        ("parent", ctypes.c_void_p),
        ("left", ctypes.c_void_p),
        ("right", ctypes.c_void_p),
        ("count", ctypes.c_size_t),
    )


class _Node(ctypes.Structure):
    """One entry: buffer type -> `llama_memory_breakdown_data` (llama-ext.h)."""

    _fields_ = (
        ("color", ctypes.c_uint64),
        ("parent", ctypes.c_void_p),
        ("left", ctypes.c_void_p),
        ("right", ctypes.c_void_p),
        ("key", ctypes.c_void_p),
        ("model", ctypes.c_size_t),
        ("context", ctypes.c_size_t),
        ("compute", ctypes.c_size_t),
    )


class _Override(ctypes.Structure):
    _fields_ = (("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p))


@dataclass(frozen=True, slots=True)
class BufferUse:
    """Bytes in one buffer type."""

    name: str
    is_host: bool
    model: int
    context: int
    compute: int


class Library:
    """The library with the devices it shall see. `devices` None: the real ones."""

    def __init__(self, devices: Sequence[Json] | None, no_alloc: bool = True) -> None:
        self._library = llama.load_library()
        self._log = llama.Log(num_lines=4000)
        self._no_alloc = no_alloc
        self._library.llama_backend_init()
        self._devices = None
        if devices is not None:
            self._devices = [VirtualDevice(VirtualDeviceSpec(**device)) for device in devices]
            for device in self._devices[:1]:
                check_layouts(device)
            self._device_array = device_array(self._devices)

    # --- model

    def load(self, path: str, settings: Json) -> Any:
        params = self._library.llama_model_default_params()
        params.no_alloc, params.load_mode = self._no_alloc, _LOAD_MODE_NONE
        params.n_gpu_layers = settings.get("n_gpu_layers", 0)
        params.use_extra_bufts = settings.get("use_extra_bufts", True)
        if self._devices is not None:
            params.devices = ctypes.cast(self._device_array, ctypes.c_void_p)
        overrides = self._overrides(settings.get("n_cpu_moe", 0))
        params.tensor_buft_overrides = ctypes.cast(overrides, ctypes.c_void_p) if overrides else None
        split = settings.get("tensor_split") or ()
        if split:
            # llama.cpp copies as many entries as there may be devices, however many there are.
            params.tensor_split = (ctypes.c_float * self._library.llama_max_devices())(*split)
        self._log.lines.clear()
        model = self._library.llama_model_load_from_file(os.fsencode(path), params)
        if not model:
            raise DryRunError(self._load_error(), "load")
        return model

    def free_model(self, model: Any) -> None:
        self._library.llama_model_free(model)

    def _overrides(self, n_cpu_moe: int) -> Any:
        if not n_cpu_moe:
            return None
        cpu = self._function("ggml_backend_cpu_buffer_type", ctypes.c_void_p)()
        patterns = [rf"blk\.{il}\.ffn_(up|down|gate|gate_up)_(ch|)exps".encode() for il in range(n_cpu_moe)]
        entries = [_Override(pattern, cpu) for pattern in patterns]
        return (_Override * (n_cpu_moe + 1))(*entries, _Override(None, None))

    # --- context

    def measure(self, model: Any, settings: Json) -> Json:
        """Make one context, read its figures, free it."""
        self._log.lines.clear()
        context = self._library.llama_init_from_model(model, self._context_params(settings))
        if not context:
            raise DryRunError(self._last_line(), "context")
        try:
            return self._figures(context, settings)
        finally:
            self._library.llama_free(context)

    def _context_params(self, settings: Json) -> Any:
        params = self._library.llama_context_default_params()
        for name in _CONTEXT_KEYS & settings.keys():
            setattr(params, name, settings[name])
        params.type_k = CACHE_TYPE_IDS[settings.get("type_k", "f16")]
        params.type_v = CACHE_TYPE_IDS[settings.get("type_v", "f16")]
        params.flash_attn_type = _FLASH_ATTN_IDS[settings.get("flash_attn", "auto")]
        params.n_threads = params.n_threads_batch = 1
        return params

    def _figures(self, context: Any, settings: Json) -> Json:
        lines = list(self._log.lines)
        logged = [(name, float(mib)) for name, mib in _matches(_COMPUTE_LINE, lines)]
        buffers = self._breakdown(context)
        exact = buffers is not None and _agrees(buffers, logged)
        if buffers is None or not exact:
            buffers = [BufferUse(name, False, 0, 0, round(mib * _MIB)) for name, mib in logged]
        output = [float(mib) for (mib,) in _matches(_OUTPUT_LINE, lines)]
        flash_attn, reason = _flash_attn(lines, settings)
        return {
            "buffers": [
                {
                    "name": b.name,
                    "is_host": b.is_host,
                    "model": b.model,
                    "context": b.context,
                    "compute": b.compute,
                }
                for b in buffers
            ],
            "exact": exact,
            "flash_attn": flash_attn,
            "flash_attn_reason": reason,
            "n_ctx": int(self._library.llama_n_ctx(context)),
            "n_ctx_seq": int(self._library.llama_n_ctx_seq(context)),
            "output_mib": output[0] if output else None,
        }

    def _breakdown(self, context: Any) -> list[BufferUse] | None:
        """Bytes by buffer type, None where the map's layout is not the known one."""
        symbol = "_Z26llama_get_memory_breakdownPK13llama_context"
        if not sys.platform.startswith("linux") or not hasattr(self._library._lib, symbol):
            return None
        result = self._function(symbol, _Map, ctypes.c_void_p)(context)
        if not 0 < result.count <= _MAX_BUFFER_TYPES:
            return None
        buffers = [self._buffer(node) for node in _walk(result.parent, result.count)]
        return buffers if len(buffers) == result.count else None

    def _buffer(self, node: _Node) -> BufferUse:
        name = self._function("ggml_backend_buft_name", ctypes.c_char_p, ctypes.c_void_p)(node.key)
        is_host = self._function("ggml_backend_buft_is_host", ctypes.c_bool, ctypes.c_void_p)(node.key)
        return BufferUse(name.decode(), bool(is_host), node.model, node.context, node.compute)

    def _function(self, name: str, restype: Any, *argtypes: Any) -> Any:
        function = self._library._lib[name]
        function.restype, function.argtypes = restype, list(argtypes)
        return function

    def _load_error(self) -> str:
        """The line that names the fault; others say "unknown" or "failed" of harmless things."""
        faults = [line.strip() for line in self._log.lines if "error loading model" in line]
        return faults[0].split("error loading model: ", 1)[-1] if faults else self._last_line()

    def _last_line(self) -> str:
        lines = [line.strip() for line in self._log.lines if line.strip()]
        return lines[-1] if lines else "no reason given"


def _walk(address: int | None, limit: int) -> Iterator[_Node]:
    """Nodes below `address`, at most `limit`: a wrong layout must not lead anywhere far."""
    stack, seen = [address], 0
    while stack and seen < limit:
        if (here := stack.pop()) is not None:
            node = _Node.from_address(here)
            seen += 1
            yield node
            stack += [node.right, node.left]


def _agrees(buffers: Sequence[BufferUse], logged: Sequence[tuple[str, float]]) -> bool:
    """Whether the map's figures are those of the log: the proof that it was read as what it is."""
    known = {buffer.name: buffer.compute / _MIB for buffer in buffers}
    return all(abs(known.get(name, 0.0) - mib) <= 2 * _LOG_STEP_MIB for name, mib in logged)


def _matches(pattern: re.Pattern[str], lines: Sequence[str]) -> list[tuple[str, ...]]:
    return [match.groups() for line in lines if (match := pattern.search(line))]


def _flash_attn(lines: Sequence[str], settings: Json) -> tuple[bool, str]:
    """Whether flash attention is used, and the line that says why it is not although it was left to
    llama.cpp."""
    choice = settings.get("flash_attn", "auto")
    reasons = [match[0] for line in lines if (match := _ELSEWHERE_LINE.search(line))]
    if any("Flash Attention not supported" in line for line in lines):
        return False, reasons[0] if reasons else ""
    forced_on = any("enabling flash_attn since it is required" in line for line in lines)
    forced_off = any("flash_attn is not compatible" in line for line in lines)
    return (choice != "off" or forced_on) and not forced_off, ""


if __name__ == "__main__":
    raise SystemExit(main())
