"""Are ggml's C structs laid out as virtual_device.py takes for granted? Asked before its device is used.

Releases of llama.cpp change these structs. Each field that is read or written by its offset is compared with
what the library's own functions say of the same object. Knows nothing of models.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

from edgeserve import llama, virtual_device
from edgeserve.errors import RuntimeUnavailableError
from edgeserve.virtual_device import VirtualDevice

_PTR, _SIZE, _INT, _I64 = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int64
_ROWS, _COLUMNS = 3, 5
_ARENA_BYTES = 16 * 1024


class _InitParams(ctypes.Structure):
    """`ggml_init_params`: a public struct of ggml.h."""

    _fields_ = (("mem_size", _SIZE), ("mem_buffer", _PTR), ("no_alloc", ctypes.c_bool))


def check_layouts(device: VirtualDevice) -> None:
    """Raises RuntimeUnavailableError naming the fields that are elsewhere in this release."""
    differing = [
        name
        for name, is_same in (*_tensor_fields(), *_buffer_fields(), *_device_fields(device))
        if not is_same
    ]
    if differing:
        raise RuntimeUnavailableError(
            f"This release of llama.cpp lays out its structs differently ({', '.join(differing)}).",
            "Install the release of llama-cpp-python that edgeserve asks for.",
        )


def _call(name: str, restype: Any, *arguments: tuple[Any, Any]) -> Any:
    function = getattr(llama.load_library()._lib, name)
    function.restype, function.argtypes = restype, [argtype for argtype, _ in arguments]
    return function(*(value for _, value in arguments))


def _tensor_fields() -> Iterator[tuple[str, bool]]:
    """A sum of two tensors, and a view of one, in an arena without data."""
    arena = ctypes.create_string_buffer(_ARENA_BYTES)
    params = _InitParams(_ARENA_BYTES, ctypes.addressof(arena), True)
    context = _call("ggml_init", _PTR, (_InitParams, params))
    try:
        f16 = virtual_device.GGML_TYPE_F16
        a, b = (
            _call("ggml_new_tensor_2d", _PTR, (_PTR, context), (_INT, f16), (_I64, _ROWS), (_I64, _COLUMNS))
            for _ in range(2)
        )
        total = _call("ggml_add", _PTR, (_PTR, context), (_PTR, a), (_PTR, b))
        view = _call("ggml_view_1d", _PTR, (_PTR, context), (_PTR, a), (_I64, 2), (_SIZE, 0))
        yield "tensor type", virtual_device.tensor_type(a) == f16
        yield "tensor shape", virtual_device.tensor_shape(a) == (_ROWS, _COLUMNS, 1, 1)
        op = _call("ggml_op_name", ctypes.c_char_p, (_INT, virtual_device.tensor_op(total)))
        yield "tensor operation", op == b"ADD"
        yield "tensor sources", [virtual_device.tensor_source(total, index) for index in range(2)] == [a, b]
        yield "tensor view", virtual_device.tensor_view_source(view) == a
    finally:
        _call("ggml_free", None, (_PTR, context))


def _buffer_fields() -> Iterator[tuple[str, bool]]:
    """A small buffer of the CPU backend, whose context is the memory itself."""
    size = 1000
    cpu_type = _call("ggml_backend_cpu_buffer_type", _PTR)
    buffer = _call("ggml_backend_buft_alloc_buffer", _PTR, (_PTR, cpu_type), (_SIZE, size))
    try:
        fields = virtual_device.buffer_fields(buffer)
        yield "buffer size", fields.size == _call("ggml_backend_buffer_get_size", _SIZE, (_PTR, buffer))
        yield "buffer type", fields.buffer_type == cpu_type
        base = _call("ggml_backend_buffer_get_base", _PTR, (_PTR, buffer))
        yield "buffer context", 0 <= base - fields.context < 64
    finally:
        _call("ggml_backend_buffer_free", None, (_PTR, buffer))


def _device_fields(device: VirtualDevice) -> Iterator[tuple[str, bool]]:
    """What ggml reads out of our own tables."""
    handle, spec = (_PTR, device.handle), device.spec
    free, total = _SIZE(), _SIZE()
    _call(
        "ggml_backend_dev_memory",
        None,
        handle,
        (_PTR, ctypes.addressof(free)),
        (_PTR, ctypes.addressof(total)),
    )
    yield "device name", _call("ggml_backend_dev_name", ctypes.c_char_p, handle) == spec.name.encode()
    yield "device memory", (free.value, total.value) == (spec.free_bytes, spec.total_bytes)
    yield "device kind", _call("ggml_backend_dev_type", _INT, handle) == virtual_device.DEVICE_TYPE_GPU
    registry = _call("ggml_backend_dev_backend_reg", _PTR, handle)
    name = _call("ggml_backend_reg_name", ctypes.c_char_p, (_PTR, registry))
    yield "registry", name == virtual_device.REGISTRY_NAME.encode()
    buffer_type = _call("ggml_backend_dev_buffer_type", _PTR, handle)
    alignment = _call("ggml_backend_buft_get_alignment", _SIZE, (_PTR, buffer_type))
    yield "buffer type functions", alignment == spec.alignment
