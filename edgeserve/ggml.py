"""What the build of ggml can do on this machine: instruction sets, GPU offload, and its own list of devices.

Knows nothing of models. Asking for devices starts their backends: on CUDA that takes some hundred MB.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from edgeserve.llama import load_library

_DEVICE_TYPES = ("cpu", "gpu", "igpu", "accel", "meta")


def ggml_function(name: str, restype: Any, *argtypes: Any) -> Any:
    """A function of ggml that the bindings do not declare, with its types."""
    # ggml's symbols are reached through libllama, which depends on it: opening the wheel's own libggml file
    # would map a second copy with a device registry of its own.
    function = getattr(load_library()._lib, name)
    function.restype, function.argtypes = restype, list(argtypes)
    return function


def system_info() -> str:
    """What the build can do on this CPU, as llama.cpp prints it ("AVX2 = 1 | AVX512 = 1 | ...")."""
    return str(load_library().llama_print_system_info().decode())


def commit() -> str:
    """The commit that ggml was built from; "" where the build does not tell."""
    if not hasattr(load_library()._lib, "ggml_commit"):
        return ""
    return str(ggml_function("ggml_commit", ctypes.c_char_p)().decode())


def supports_gpu_offload() -> bool:
    """Whether this build can place layers on a GPU at all."""
    return bool(load_library().llama_supports_gpu_offload())


@dataclass(frozen=True, slots=True)
class GgmlDevice:
    """One device of ggml's own list. `type` is cpu, gpu, igpu, accel or meta. The CPU's free memory is its
    total."""

    name: str
    description: str
    type: str
    memory_free_bytes: int
    memory_total_bytes: int


def devices() -> tuple[GgmlDevice, ...]:
    """The devices that this build sees. On CUDA the first call makes a context of some hundred MB."""
    count = ggml_function("ggml_backend_dev_count", ctypes.c_size_t)()
    get = ggml_function("ggml_backend_dev_get", ctypes.c_void_p, ctypes.c_size_t)
    return tuple(_device(get(index)) for index in range(count))


def _device(handle: int) -> GgmlDevice:
    text = [
        ggml_function(f"ggml_backend_dev_{what}", ctypes.c_char_p, ctypes.c_void_p)(handle)
        for what in ("name", "description")
    ]
    kind = ggml_function("ggml_backend_dev_type", ctypes.c_int, ctypes.c_void_p)(handle)
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    size_p = ctypes.POINTER(ctypes.c_size_t)
    ggml_function("ggml_backend_dev_memory", None, ctypes.c_void_p, size_p, size_p)(handle, free, total)
    return GgmlDevice(text[0].decode(), text[1].decode(), _DEVICE_TYPES[kind], free.value, total.value)


def cpu_name() -> str:
    """The CPU as ggml describes it, such as "AMD EPYC"; "" where the build lists none."""
    return next((device.description for device in devices() if device.type == "cpu"), "")
