"""The runtime: a thin typed layer over llama-cpp-python's low-level bindings, and the only file that imports
them.

Owns the loaded library, its log, and a model with its vocabulary (contexts: llama_context.py). Knows nothing
of requests, scheduling or text formats.

Threads: ctypes calls release the GIL. A Context belongs to one thread. The vocabulary part of a Model
(tokenize, piece, ...) only reads and may be used from any thread.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import re
import sys
from collections import deque
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

from edgeserve.errors import ModelError, RuntimeUnavailableError

TESTED_VERSIONS = ((0, 3, 36), (0, 3, 37))
"""First tested llama-cpp-python release, and the first that is not: the C structs change between releases."""

WHEEL_INDEX = "https://abetlen.github.io/llama-cpp-python/whl"

_OFFLOADED = re.compile(r"offloaded (\d+)/\d+ layers to GPU")
_ATTR_CONTROL, _ATTR_USER_DEFINED = 1 << 3, 1 << 4


def load_library() -> ModuleType:
    """The `llama_cpp.llama_cpp` module, checked to be a tested release.

    Raises RuntimeUnavailableError, with the remedy, when it is missing, does not load or is another release.
    """
    try:
        package = importlib.import_module("llama_cpp")
        library = importlib.import_module("llama_cpp.llama_cpp")
    except ImportError as error:
        raise RuntimeUnavailableError(
            f"llama-cpp-python is not installed ({error}).",
            f"`make install`, or `pip install llama-cpp-python --extra-index-url {WHEEL_INDEX}/cpu`.",
        ) from error
    except (OSError, RuntimeError) as error:
        raise RuntimeUnavailableError(
            f"llama-cpp-python is installed but its library does not load: {error}.",
            "`edgeserve doctor` says what is missing.",
        ) from error
    check_version(str(package.__version__))
    return library


def check_version(version: str) -> None:
    """Raise RuntimeUnavailableError unless `version` is a tested llama-cpp-python release."""
    low, high = TESTED_VERSIONS
    numbers = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
    if not low <= numbers < high:
        dotted = [".".join(map(str, bound)) for bound in TESTED_VERSIONS]
        raise RuntimeUnavailableError(
            f"llama-cpp-python {version} is not a tested release (its C structs change between releases).",
            f"Install one from {dotted[0]} up to, not including, {dotted[1]}.",
        )


class Log:
    """The library's own messages: the last lines are kept, since they alone say why a load failed.

    The newest Log gets the messages. llama.cpp keeps calling a callback until it is given another one, so
    each is kept with the library itself and outlives the Log that it was made for.
    """

    def __init__(self, num_lines: int = 400, echo: bool = False) -> None:
        self.lines: deque[str] = deque(maxlen=num_lines)
        self._echo = echo
        self._partial = ""
        library = load_library()
        self._callback = library.llama_log_callback(self._on_text)
        library.llama_log_set(self._callback, ctypes.c_void_p(0))
        vars(library).setdefault("edgeserve_log_callbacks", []).append(self._callback)

    def _on_text(self, level: int, text: bytes, _: object) -> None:
        *lines, self._partial = (self._partial + text.decode("utf-8", "replace")).split("\n")
        self.lines.extend(lines)
        if self._echo:
            print(*lines, sep="\n", end="\n" if lines else "", file=sys.stderr)

    def errors(self) -> str:
        """The last line that names a failure, or "" when none does."""
        words = ("error", "failed", "unable", "unknown", "invalid")
        found = [line.strip() for line in self.lines if any(word in line.lower() for word in words)]
        return found[0] if found else ""


class Model:
    """A loaded model file: its weights, its vocabulary and what its header says."""

    def __init__(
        self,
        path: str | Path,
        *,
        n_gpu_layers: int = -1,
        use_mmap: bool = True,
        use_mlock: bool = False,
        use_extra_bufts: bool = True,
        place: Callable[[Any], None] | None = None,
        log: Log | None = None,
        on_progress: Callable[[float], None] | None = None,
    ) -> None:
        """Load. Raises ModelError with llama.cpp's own reason.

        `place` may set the parameters that say which tensors go where (placement.py); `on_progress` gets the
        part done, 0 to 1.
        """
        self.path = str(path)
        self._library = library = load_library()
        self.log = log if log is not None else Log()
        library.llama_backend_init()
        params = library.llama_model_default_params()
        params.n_gpu_layers = n_gpu_layers
        params.load_mode = (1 if use_mmap else 0) | (2 if use_mlock else 0)
        params.use_extra_bufts = use_extra_bufts
        if place is not None:
            place(params)
        progress = library.llama_progress_callback(
            lambda part, _: on_progress is None or on_progress(part) is None
        )
        params.progress_callback = progress
        self.log.lines.clear()
        self.handle = library.llama_model_load_from_file(os.fsencode(self.path), params)
        if not self.handle:
            raise ModelError(
                f"llama.cpp could not load {Path(self.path).name}: {self.log.errors() or 'no reason given'}."
            )
        self.vocab = library.llama_model_get_vocab(self.handle)
        self._pieces: dict[tuple[int, bool], bytes] = {}
        self.num_gpu_layers = _num_gpu_layers(self.log.lines)
        """Layers that went to a GPU, the output layer among them: what became of `n_gpu_layers`."""

    def close(self) -> None:
        """Free the weights. Contexts must be closed first."""
        if self.handle:
            self._library.llama_model_free(self.handle)
            self.handle = None

    # -- what the header says -------------------------------------------------------------------------------

    @cached_property
    def metadata(self) -> dict[str, str]:
        """All scalar metadata, as text."""
        library, buffer = self._library, ctypes.create_string_buffer(1 << 16)
        found: dict[str, str] = {}
        for index in range(library.llama_model_meta_count(self.handle)):
            library.llama_model_meta_key_by_index(self.handle, index, buffer, len(buffer))
            key = buffer.value.decode("utf-8", "replace")
            library.llama_model_meta_val_str_by_index(self.handle, index, buffer, len(buffer))
            found[key] = buffer.value.decode("utf-8", "replace")
        return found

    @cached_property
    def description(self) -> str:
        """Architecture, size and quantization, such as "llama 135M Q4_1"."""
        buffer = ctypes.create_string_buffer(256)
        self._library.llama_model_desc(self.handle, buffer, len(buffer))
        return buffer.value.decode("utf-8", "replace")

    @property
    def n_ctx_train(self) -> int:
        return int(self._library.llama_model_n_ctx_train(self.handle))

    @property
    def n_embd(self) -> int:
        return int(self._library.llama_model_n_embd(self.handle))

    @property
    def n_layer(self) -> int:
        return int(self._library.llama_model_n_layer(self.handle))

    @property
    def n_params(self) -> int:
        return int(self._library.llama_model_n_params(self.handle))

    @property
    def size_bytes(self) -> int:
        return int(self._library.llama_model_size(self.handle))

    @property
    def has_encoder(self) -> bool:
        return bool(self._library.llama_model_has_encoder(self.handle))

    @property
    def keeps_state(self) -> bool:
        """Whether it has recurrent layers, whose state cannot be cut back to a shorter prefix."""
        library = self._library
        return bool(
            library.llama_model_is_recurrent(self.handle) or library.llama_model_is_hybrid(self.handle)
        )

    @property
    def chat_template(self) -> str | None:
        return self.chat_template_named(None)

    def chat_template_named(self, name: str | None) -> str | None:
        """The Jinja source of a template in the file; None names the default one."""
        source = self._library.llama_model_chat_template(self.handle, name.encode() if name else None)
        return source.decode("utf-8", "replace") if source else None

    # -- vocabulary -----------------------------------------------------------------------------------------

    @cached_property
    def n_vocab(self) -> int:
        return int(self._library.llama_vocab_n_tokens(self.vocab))

    @property
    def add_bos(self) -> bool:
        return bool(self._library.llama_vocab_get_add_bos(self.vocab))

    @property
    def bos_id(self) -> int:
        return int(self._library.llama_vocab_bos(self.vocab))

    @property
    def eos_id(self) -> int:
        return int(self._library.llama_vocab_eos(self.vocab))

    @cached_property
    def eog_ids(self) -> frozenset[int]:
        """Every token that ends a generation."""
        is_eog = self._library.llama_vocab_is_eog
        return frozenset(token for token in range(self.n_vocab) if is_eog(self.vocab, token))

    @cached_property
    def special_pieces(self) -> frozenset[str]:
        """The texts that parse as one control or user-defined token, such as "<|im_start|>"."""
        attributes, text = self._library.llama_vocab_get_attr, self._library.llama_vocab_get_text
        special = _ATTR_CONTROL | _ATTR_USER_DEFINED
        found = (
            text(self.vocab, token)
            for token in range(self.n_vocab)
            if attributes(self.vocab, token) & special
        )
        return frozenset(piece.decode("utf-8", "replace") for piece in found if piece)

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Token ids of `text`. `add_special` adds BOS/EOS as the model wants; `parse_special` reads control
        tokens written out in the text as tokens instead of as characters."""
        data = text.encode("utf-8", "replace")
        size = len(data) + 8
        while True:
            buffer = (ctypes.c_int32 * size)()
            count = self._library.llama_tokenize(
                self.vocab, data, len(data), buffer, size, add_special, parse_special
            )
            if count >= 0:
                return list(buffer[:count])
            size = -count

    def piece(self, token_id: int, *, special: bool = False) -> bytes:
        """The bytes of one token; b"" for a control token unless `special`."""
        # Kept: a stream asks for each of its tokens, and the library for a buffer each time.
        found = self._pieces.get((token_id, special))
        if found is None:
            found = self._pieces[token_id, special] = self._piece(token_id, special)
        return found

    def _piece(self, token_id: int, special: bool) -> bytes:
        size = 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            count = self._library.llama_token_to_piece(self.vocab, token_id, buffer, size, 0, special)
            if count >= 0:
                return buffer.raw[:count]
            size = -count

    def detokenize(self, token_ids: Iterable[int], *, special: bool = False) -> bytes:
        """The bytes of many tokens, joined as they are: no space is added or taken away."""
        return b"".join(self.piece(token, special=special) for token in token_ids)


def _num_gpu_layers(log_lines: Iterable[str]) -> int:
    """No call tells; the library only says so in its log, and nothing at all where there is no GPU."""
    found = _OFFLOADED.search("\n".join(log_lines))
    return int(found[1]) if found else 0
