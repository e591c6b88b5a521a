"""A ggml device that is not there: llama.cpp places layers on it, and even computes, without the hardware.

Owns the C tables that make ggml believe in it (buffer type, backend, device, registry entry), all callbacks
into Python. With a model loaded under `no_alloc` nothing is allocated, so any size of device can be
pretended; with a real load its memory is ordinary memory and its graphs run on the CPU backend. Knows nothing
of models.

By default it counts bytes as CUDA does: 128-byte alignment, rows of quantized types padded to 512 values, F16
copies of a cache that is not F16 inside flash attention, big operations on host weights pulled over
(ggml-cuda.cu, fattn.cu). Unlike CUDA it supports every operation.

Layouts: ggml-backend-impl.h and ggml.h of llama.cpp 0c1e57098, backend API version 2.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from edgeserve import llama

_PTR, _SIZE, _BOOL, _INT, _I64, _TEXT = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_bool, ctypes.c_int, ctypes.c_int64, ctypes.c_char_p
)  # fmt: skip
_SIZE_P = ctypes.POINTER(_SIZE)

_BUFFER_TYPE = ("get_name", "alloc_buffer", "get_alignment", "get_max_size", "get_alloc_size", "is_host")
_BACKEND = (
    "get_name", "free", "set_tensor_async", "get_tensor_async", "set_tensor_2d_async", "get_tensor_2d_async",
    "cpy_tensor_async", "synchronize", "graph_plan_create", "graph_plan_free", "graph_plan_update",
    "graph_plan_compute", "graph_compute", "event_record", "event_wait", "graph_optimize",
)  # fmt: skip
_DEVICE = (
    "get_name", "get_description", "get_memory", "get_type", "get_props", "init_backend", "get_buffer_type",
    "get_host_buffer_type", "buffer_from_host_ptr", "supports_op", "supports_buft", "offload_op", "event_new",
    "event_free", "event_synchronize",
)  # fmt: skip
_REGISTRY = ("get_name", "get_device_count", "get_device", "get_proc_address")
_API_VERSION = 2
_DEVICE_TYPE_CPU, DEVICE_TYPE_GPU = 0, 1
REGISTRY_NAME = "Virtual"

# Byte offsets in ggml_backend_buffer (eleven function pointers come first) and in ggml_tensor.
_BUFFER_FREE, _BUFFER_TYPE_AT, _BUFFER_CONTEXT, _BUFFER_SIZE = 0, 88, 96, 104
_TENSOR_TYPE, _TENSOR_NE, _TENSOR_OP, _TENSOR_SRC, _TENSOR_VIEW_SRC = 0, 16, 80, 152, 232
GGML_TYPE_F16 = 1
_QUANTIZED_ROW_STEP = 512
_CUDA_OFFLOAD_BATCH = 32


class _Caps(ctypes.Structure):
    _fields_ = (
        ("async", _BOOL), ("host_buffer", _BOOL), ("buffer_from_host_ptr", _BOOL), ("events", _BOOL),
        ("mmap_support", _BOOL),
    )  # fmt: skip


class _Props(ctypes.Structure):
    _fields_ = (
        ("name", _TEXT), ("description", _TEXT), ("memory_free", _SIZE), ("memory_total", _SIZE),
        ("type", _INT), ("device_id", _TEXT), ("caps", _Caps),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class VirtualDeviceSpec:
    """What to pretend. `attention_copies`: flash attention converts a cache that is not F16."""

    name: str
    free_bytes: int
    total_bytes: int
    alignment: int = 128
    pads_quantized_rows: bool = True
    has_host_buffer: bool = True
    attention_copies: bool = True


class VirtualDevice:
    """One pretended GPU. `handle` is its `ggml_backend_dev_t`; the object must outlive every use of it."""

    def __init__(self, spec: VirtualDeviceSpec) -> None:
        self.spec = spec
        self._library = llama.load_library()._lib
        self._keep: list[Any] = []
        self._names = {
            text: self._text(text) for text in (spec.name, f"{spec.name}_Host", "virtual", REGISTRY_NAME)
        }
        self._real_buffers: dict[int, tuple[int, int, int]] = {}
        self._free_address = self._callback(self._free, None, _PTR)
        self._cpu_backend: int | None = None
        # The other tables hold the address of the device, so its words come first and are filled last.
        self._device = self._words([0] * (len(_DEVICE) + 2))
        self._buffer_type = self._words(self._buffer_type_words(host=False))
        self._host_buffer_type = self._words(self._buffer_type_words(host=True))
        registry = ctypes.addressof(self._words(self._registry_words()))
        for index, word in enumerate((*_table(_DEVICE, self._device_functions()), registry, 0)):
            self._device[index] = word

    @property
    def handle(self) -> int:
        return ctypes.addressof(self._device)

    # --- building blocks

    def _words(self, words: Sequence[int]) -> Any:
        block = (_PTR * len(words))(*words)
        self._keep.append(block)
        return block

    def _text(self, text: str) -> int:
        """Address of a C string: callbacks must return one that stays where it is."""
        buffer = ctypes.create_string_buffer(text.encode())
        self._keep.append(buffer)
        return ctypes.addressof(buffer)

    def _callback(self, function: Callable[..., Any], restype: Any, *argtypes: Any) -> int:
        callback = ctypes.CFUNCTYPE(restype, *argtypes)(function)
        self._keep.append(callback)
        return ctypes.cast(callback, _PTR).value or 0

    def _call(self, name: str, restype: Any, *arguments: tuple[Any, Any]) -> Any:
        function = getattr(self._library, name)
        function.restype, function.argtypes = restype, [argtype for argtype, _ in arguments]
        return function(*(value for _, value in arguments))

    def _named(self, text: str) -> int:
        address = self._names[text]
        return self._callback(lambda _: address, _PTR, _PTR)

    # --- memory

    def _buffer_type_words(self, host: bool) -> list[int]:
        functions = {
            "get_name": self._named(f"{self.spec.name}_Host" if host else self.spec.name),
            "alloc_buffer": self._callback(self._allocate, _PTR, _PTR, _SIZE),
            "get_alignment": self._callback(lambda _: 32 if host else self.spec.alignment, _SIZE, _PTR),
        }
        if host:
            functions["is_host"] = self._callback(lambda _: True, _BOOL, _PTR)
        else:
            functions["get_alloc_size"] = self._callback(self._alloc_size, _SIZE, _PTR, _PTR)
        return [*_table(_BUFFER_TYPE, functions), ctypes.addressof(self._device), 0]

    def _allocate(self, buffer_type: int, size: int) -> int | None:
        """Memory of the CPU backend with our name on it, its start moved to our alignment."""
        cpu_type = self._call("ggml_backend_cpu_buffer_type", _PTR)
        padded = size + self.spec.alignment
        buffer: int | None = self._call(
            "ggml_backend_buft_alloc_buffer", _PTR, (_PTR, cpu_type), (_SIZE, padded)
        )
        if buffer is None:
            return None
        real = buffer_fields(buffer)
        start = real.context
        self._real_buffers[buffer] = (start, _word(buffer + _BUFFER_FREE), real.size)
        _set_word(buffer + _BUFFER_TYPE_AT, buffer_type)
        _set_word(buffer + _BUFFER_CONTEXT, -(-start // self.spec.alignment) * self.spec.alignment)
        _set_word(buffer + _BUFFER_SIZE, size)
        _set_word(buffer + _BUFFER_FREE, self._free_address)
        return buffer

    def _free(self, buffer: int) -> None:
        start, real_free, size = self._real_buffers.pop(buffer)
        _set_word(buffer + _BUFFER_CONTEXT, start)
        _set_word(buffer + _BUFFER_SIZE, size)
        ctypes.CFUNCTYPE(None, _PTR)(real_free)(buffer)

    def _alloc_size(self, _: int, tensor: int) -> int:
        size = int(self._call("ggml_nbytes", _SIZE, (_PTR, tensor)))
        if self.spec.attention_copies and self._op_name(tensor) == "FLASH_ATTN_EXT":
            size = self._with_f16_copies(tensor, size)
        type_id, row = tensor_type(tensor), tensor_shape(tensor)[0]
        if self.spec.pads_quantized_rows and row % _QUANTIZED_ROW_STEP and self._is_quantized(type_id):
            missing = _QUANTIZED_ROW_STEP - row % _QUANTIZED_ROW_STEP
            size += int(self._call("ggml_row_size", _SIZE, (_INT, type_id), (_I64, missing)))
        return size

    def _with_f16_copies(self, attention: int, size: int) -> int:
        """Room for F16 copies of keys and values (`ggml_cuda_flash_attn_ext_get_f16_extra_data`)."""
        keys, values = (tensor_source(attention, index) for index in (1, 2))
        shared = tensor_view_source(values) in (keys, tensor_view_source(keys) or keys)
        for source in (keys,) if shared else (keys, values):
            if tensor_type(source) != GGML_TYPE_F16:
                elements = int(self._call("ggml_nelements", _I64, (_PTR, source)))
                size = -(-size // 128) * 128 + 2 * elements
        return size

    def _is_quantized(self, type_id: int) -> bool:
        return bool(self._call("ggml_is_quantized", _BOOL, (_INT, type_id)))

    # --- computing

    def _init_backend(self, _device: int, _params: int) -> int:
        guid = (ctypes.c_uint8 * 16)(*f"{self.spec.name:16.16}".encode()[:16])
        self._keep.append(guid)
        functions = {
            "get_name": self._named(self.spec.name),
            "free": self._callback(lambda _: None, None, _PTR),
            "graph_compute": self._callback(self._compute, _INT, _PTR, _PTR),
        }
        words = [ctypes.addressof(guid), *_table(_BACKEND, functions), self.handle, 0]
        return ctypes.addressof(self._words(words))

    def _compute(self, _: int, graph: int) -> int:
        if self._cpu_backend is None:
            self._cpu_backend = self._call(
                "ggml_backend_init_by_type", _PTR, (_INT, _DEVICE_TYPE_CPU), (_PTR, None)
            )
            # One thread: several would wait for each other, and for those of the real CPU backend, at every
            # node.
            self._call("ggml_backend_cpu_set_n_threads", None, (_PTR, self._cpu_backend), (_INT, 1))
        return int(self._call("ggml_backend_graph_compute", _INT, (_PTR, self._cpu_backend), (_PTR, graph)))

    def _op_name(self, tensor: int) -> str:
        name: bytes = self._call("ggml_op_name", _TEXT, (_INT, tensor_op(tensor)))
        return name.decode()

    def _offload_op(self, _: int, tensor: int) -> bool:
        """Whether an operation on host weights is worth copying them (`get_op_batch_size`, ggml-cuda.cu)."""
        name, ne = self._op_name(tensor), tensor_shape(tensor)
        if name == "GET_ROWS":
            return False
        if name == "MUL_MAT":
            return ne[1] >= _CUDA_OFFLOAD_BATCH
        batch = ne[2] if name in ("MUL_MAT_ID", "ROPE", "ROPE_BACK") else ne[1] * ne[2] * ne[3]
        return batch >= _CUDA_OFFLOAD_BATCH

    # --- the device

    def _device_functions(self) -> dict[str, int]:
        buffer_type = ctypes.addressof(self._buffer_type)
        host_type = ctypes.addressof(self._host_buffer_type)
        functions = {
            "get_name": self._named(self.spec.name),
            "get_description": self._named("virtual"),
            "get_memory": self._callback(self._memory, None, _PTR, _SIZE_P, _SIZE_P),
            "get_type": self._callback(lambda _: DEVICE_TYPE_GPU, _INT, _PTR),
            "get_props": self._callback(self._properties, None, _PTR, ctypes.POINTER(_Props)),
            "init_backend": self._callback(self._init_backend, _PTR, _PTR, _PTR),
            "get_buffer_type": self._callback(lambda _: buffer_type, _PTR, _PTR),
            "supports_op": self._callback(lambda _device, _op: True, _BOOL, _PTR, _PTR),
            "supports_buft": self._callback(lambda _device, other: other == buffer_type, _BOOL, _PTR, _PTR),
            "offload_op": self._callback(self._offload_op, _BOOL, _PTR, _PTR),
        }
        if self.spec.has_host_buffer:
            functions["get_host_buffer_type"] = self._callback(lambda _: host_type, _PTR, _PTR)
        return functions

    def _memory(self, _: int, free: Any, total: Any) -> None:
        free[0], total[0] = self.spec.free_bytes, self.spec.total_bytes

    def _properties(self, _: int, props: Any) -> None:
        # Only addresses are written: a bytes object assigned here would be freed with the callback's frame.
        free, total = self.spec.free_bytes, self.spec.total_bytes
        name, description = self._names[self.spec.name], self._names["virtual"]
        caps = _Caps(False, self.spec.has_host_buffer, False, False, True)
        props[0] = _Props(
            ctypes.cast(name, _TEXT),
            ctypes.cast(description, _TEXT),
            free,
            total,
            DEVICE_TYPE_GPU,
            None,
            caps,
        )

    def _registry_words(self) -> list[int]:
        functions = {
            "get_name": self._named(REGISTRY_NAME),
            "get_device_count": self._callback(lambda _: 1, _SIZE, _PTR),
            "get_device": self._callback(lambda _, __: self.handle, _PTR, _PTR, _SIZE),
            "get_proc_address": self._callback(lambda _, __: None, _PTR, _PTR, _PTR),
        }
        return [_API_VERSION, *_table(_REGISTRY, functions), 0]


def device_array(devices: Sequence[VirtualDevice]) -> Any:
    """What `llama_model_params.devices` points to: the handles, then a null."""
    return (_PTR * (len(devices) + 1))(*(device.handle for device in devices), None)


def _table(order: Sequence[str], functions: dict[str, int]) -> list[int]:
    return [functions.get(name, 0) for name in order]


def _word(address: int) -> int:
    return ctypes.c_uint64.from_address(address).value


def _set_word(address: int, value: int) -> None:
    ctypes.c_uint64.from_address(address).value = value


def _int(address: int) -> int:
    return ctypes.c_int32.from_address(address).value


# --- fields read by their offsets; layout_check.py compares them with what ggml says


@dataclass(frozen=True, slots=True)
class BufferFields:
    """What is read of a ggml_backend_buffer."""

    buffer_type: int
    context: int
    size: int


def buffer_fields(buffer: int) -> BufferFields:
    return BufferFields(
        _word(buffer + _BUFFER_TYPE_AT), _word(buffer + _BUFFER_CONTEXT), _word(buffer + _BUFFER_SIZE)
    )


def tensor_type(tensor: int) -> int:
    return _int(tensor + _TENSOR_TYPE)


def tensor_shape(tensor: int) -> tuple[int, int, int, int]:
    n0, n1, n2, n3 = (ctypes.c_int64 * 4).from_address(tensor + _TENSOR_NE)
    return n0, n1, n2, n3


def tensor_op(tensor: int) -> int:
    return _int(tensor + _TENSOR_OP)


def tensor_source(tensor: int, index: int) -> int:
    return _word(tensor + _TENSOR_SRC + 8 * index)


def tensor_view_source(tensor: int) -> int:
    return _word(tensor + _TENSOR_VIEW_SRC)
