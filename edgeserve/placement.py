"""Which tensors go where, beyond a number of layers: experts on the CPU, tensors by pattern, shares of
devices.

Owns the C structures behind those settings, which must live as long as the model is loaded. What would fit
where is the planner's question.
"""

from __future__ import annotations

import ctypes
from typing import Any

from edgeserve.config import EngineConfig
from edgeserve.errors import UsageError
from edgeserve.ggml import devices, ggml_function
from edgeserve.llama import load_library

EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"
"""The expert tensors of a layer, as llama.cpp's own --cpu-moe names them (common/common.h)."""


class Placement:
    """The placement part of an EngineConfig, ready to be written into llama_model_params."""

    def __init__(self, config: EngineConfig) -> None:
        """Raises UsageError for a device that this build does not have."""
        self._overrides = _overrides(config)
        self._split = _split(config.tensor_split)
        self._devices = _devices(config.devices)

    def __call__(self, params: Any) -> None:
        """Set what was asked for; the rest keeps llama.cpp's defaults."""
        if self._overrides is not None:
            params.tensor_buft_overrides = ctypes.addressof(self._overrides)
        if self._split is not None:
            params.tensor_split = self._split
        if self._devices is not None:
            params.devices = ctypes.addressof(self._devices)


def _overrides(config: EngineConfig) -> Any:
    patterns = [pattern for pattern, _ in config.override_tensor]
    patterns += [rf"blk\.{layer}{EXPERTS}" for layer in range(config.n_cpu_moe)]
    if not patterns:
        return None
    for pattern, target in config.override_tensor:
        if target.upper() != "CPU":
            raise UsageError(
                f"-ot {pattern}={target}: tensors can only be kept on the CPU.", "Use PATTERN=CPU."
            )
    buft = ggml_function("ggml_backend_cpu_buffer_type", ctypes.c_void_p)()
    # The list ends with an entry of nulls, which a fresh ctypes array is.
    array = (_Override * (len(patterns) + 1))()
    for item, pattern in zip(array, patterns, strict=False):
        item.pattern, item.buft = pattern.encode(), buft
    return array


def _split(shares: tuple[float, ...]) -> Any:
    if not shares:
        return None
    size = load_library().llama_max_devices()
    if len(shares) > size:
        raise UsageError(f"-ts names {len(shares)} shares; llama.cpp knows at most {size} devices.")
    return (ctypes.c_float * size)(*shares)


def _devices(names: tuple[str, ...]) -> Any:
    if not names:
        return None
    by_name = ggml_function("ggml_backend_dev_by_name", ctypes.c_void_p, ctypes.c_char_p)
    handles = [None if name == "none" else by_name(name.encode()) for name in names]
    if names != ("none",) and None in handles:
        known = ", ".join(device.name for device in devices() if device.type != "cpu") or "none"
        raise UsageError(f"No device is called {names[handles.index(None)]}.", f"This build sees: {known}.")
    return (ctypes.c_void_p * (len(handles) + 1))(*handles, None)


class _Override(ctypes.Structure):
    """llama_model_tensor_buft_override (llama.h)."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buft", ctypes.c_void_p))
