"""The runtime: a thin typed layer over llama-cpp-python's low-level bindings, and the only file that imports
them.

Owns the loaded library, a model with its vocabulary, a context with its memory, and a batch. Knows nothing of
requests, scheduling or text formats.

Threads: ctypes calls release the GIL. A Context belongs to one thread. The vocabulary part of a Model
(tokenize, piece, ...) only reads and may be used from any thread.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from edgeserve.config import EngineConfig
from edgeserve.errors import ModelError, OutOfMemoryError, RuntimeUnavailableError

TESTED_VERSIONS = ((0, 3, 36), (0, 3, 37))
"""First tested llama-cpp-python release, and the first that is not: the C structs change between releases."""

WHEEL_INDEX = "https://abetlen.github.io/llama-cpp-python/whl"

CACHE_TYPE_IDS = {
    "f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "iq4_nl": 20, "bf16": 30,
}  # fmt: skip
"""ggml_type numbers (ggml.h) of the cache types that llama.cpp accepts."""

_FLASH_ATTN_IDS = {"auto": -1, "off": 0, "on": 1}
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

    One Log must live as long as the library is used: llama.cpp keeps the callback.
    """

    def __init__(self, num_lines: int = 400, echo: bool = False) -> None:
        self.lines: deque[str] = deque(maxlen=num_lines)
        self._echo = echo
        self._partial = ""
        library = load_library()
        self._callback = library.llama_log_callback(self._on_text)
        library.llama_log_set(self._callback, ctypes.c_void_p(0))

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
        log: Log | None = None,
        on_progress: Callable[[float], None] | None = None,
    ) -> None:
        """Load. Raises ModelError with llama.cpp's own reason. `on_progress` gets the part done, 0 to 1."""
        self.path = str(path)
        self._library = library = load_library()
        self._log = log if log is not None else Log()
        library.llama_backend_init()
        params = library.llama_model_default_params()
        params.n_gpu_layers = n_gpu_layers
        params.load_mode = (1 if use_mmap else 0) | (2 if use_mlock else 0)
        params.use_extra_bufts = use_extra_bufts
        progress = library.llama_progress_callback(
            lambda part, _: on_progress is None or on_progress(part) is None
        )
        params.progress_callback = progress
        self._log.lines.clear()
        self.handle = library.llama_model_load_from_file(os.fsencode(self.path), params)
        if not self.handle:
            raise ModelError(
                f"llama.cpp could not load {Path(self.path).name}: {self._log.errors() or 'no reason given'}."
            )
        self.vocab = library.llama_model_get_vocab(self.handle)

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


class Batch:
    """Room for one step's tokens. Rows are filled through numpy; llama.cpp reads the same memory."""

    def __init__(self, num_tokens: int) -> None:
        self.capacity = num_tokens
        self._token = np.zeros(num_tokens, np.int32)
        self._pos = np.zeros(num_tokens, np.int32)
        self._num_seq_ids = np.ones(num_tokens, np.int32)
        self._seq_id = np.zeros(num_tokens, np.int32)
        self._logits = np.zeros(num_tokens, np.int8)
        # Each row points at its own entry of _seq_id: one sequence a token, set up once.
        self._seq_id_rows = self._seq_id.ctypes.data + 4 * np.arange(num_tokens, dtype=np.uint64)
        self.num_tokens = 0
        library = load_library()
        self.struct = library.llama_batch()
        for name, array in (
            ("token", self._token),
            ("pos", self._pos),
            ("n_seq_id", self._num_seq_ids),
            ("seq_id", self._seq_id_rows),
            ("logits", self._logits),
        ):
            field_type = dict(library.llama_batch._fields_)[name]
            setattr(self.struct, name, ctypes.cast(array.ctypes.data, field_type))

    def clear(self) -> None:
        self.num_tokens = 0

    def add(self, token_ids: Sequence[int], first_pos: int, seq_id: int, *, last_logits: bool) -> int:
        """Append consecutive tokens of one sequence; returns the row of the last. One row of logits at
        most."""
        start, end = self.num_tokens, self.num_tokens + len(token_ids)
        assert end <= self.capacity, "the scheduler keeps a step within the batch"
        self._token[start:end] = token_ids
        self._pos[start:end] = np.arange(first_pos, first_pos + len(token_ids))
        self._seq_id[start:end] = seq_id
        self._logits[start:end] = 0
        self._logits[end - 1] = last_logits
        self.num_tokens = end
        return end - 1


class Context:
    """A model's KV cache and compute buffers. Belongs to one thread."""

    def __init__(self, model: Model, config: EngineConfig) -> None:
        """`config` must be resolved: no zeros left. Raises OutOfMemoryError or ModelError."""
        self._library = library = load_library()
        self.model = model
        params = library.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = config.n_ctx, config.n_batch, config.n_ubatch
        params.n_seq_max = config.n_seq_max
        # One row of logits per sequence and step is all that is ever asked for; the library's default keeps
        # room for n_batch rows, which costs 4 * n_vocab * n_ubatch bytes.
        params.n_outputs_max = config.n_seq_max
        params.n_threads, params.n_threads_batch = config.n_threads, config.n_threads_batch
        params.flash_attn_type = _FLASH_ATTN_IDS[config.flash_attn]
        params.type_k, params.type_v = CACHE_TYPE_IDS[config.type_k], CACHE_TYPE_IDS[config.type_v]
        params.kv_unified, params.swa_full = config.kv_unified, config.swa_full
        params.offload_kqv = config.offload_kqv
        params.no_perf = True
        model._log.lines.clear()
        self.handle = library.llama_init_from_model(model.handle, params)
        if not self.handle:
            raise _context_error(model._log, config)
        self._memory = library.llama_get_memory(self.handle)
        self._logits_ith = library.llama_get_logits_ith
        self._window = 0 if config.swa_full else int(library.llama_model_n_swa(model.handle))

    def close(self) -> None:
        if self.handle:
            self._library.llama_free(self.handle)
            self.handle = None

    @property
    def n_ctx(self) -> int:
        """Cells in all, after llama.cpp's own rounding."""
        return int(self._library.llama_n_ctx(self.handle))

    @property
    def n_ctx_seq(self) -> int:
        """Cells that one sequence can use."""
        return int(self._library.llama_n_ctx_seq(self.handle))

    def decode(self, batch: Batch, *, warm_up: bool = False) -> int:
        """Run one step: 0 done, 1 no free cells, 2 aborted, negative on a bad batch or a failed computation.

        After anything but 0 micro-batches already computed may stay in memory: see `seq_pos_max`. `warm_up`
        touches every expert of a mixture, where a token would touch a few.
        """
        batch.struct.n_tokens = batch.num_tokens
        if warm_up:
            self._library.llama_set_warmup(self.handle, True)
        code = int(self._library.llama_decode(self.handle, batch.struct))
        if warm_up:
            self._library.llama_set_warmup(self.handle, False)
        return code

    def logits(self, row: int) -> NDArray[np.float32]:
        """The logits of a row that asked for them, shape (n_vocab,): a view, valid until the next decode."""
        pointer = self._logits_ith(self.handle, row)
        return np.ctypeslib.as_array(pointer, shape=(self.model.n_vocab,))

    def seq_rm(self, seq_id: int, first_pos: int, end_pos: int = -1) -> bool:
        """Drop a sequence's tokens from `first_pos` on. False where the model cannot drop a part."""
        if not self._memory:
            return True
        return bool(self._library.llama_memory_seq_rm(self._memory, seq_id, first_pos, end_pos))

    @property
    def can_cut_back(self) -> bool:
        """Whether any sequence can always be cut back to any prefix."""
        return not self._window and not self.model.keeps_state

    def cut_back(self, seq_id: int, num_tokens: int) -> bool:
        """Keep only a sequence's first `num_tokens` tokens. False where that cannot be done faithfully:
        recurrent state cannot go back, and a sliding window may have dropped cells that the kept tokens
        attend to."""
        if self._window and num_tokens <= self.seq_pos_max(seq_id):
            oldest = int(self._library.llama_memory_seq_pos_min(self._memory, seq_id))
            if oldest > max(0, num_tokens - self._window):
                return False
        return self.seq_rm(seq_id, num_tokens)

    def share_prefix(self, source: int, target: int) -> None:
        """Let `target` hold what `source` holds, in place of what it held: to be cut back to the shared part.

        With unified cells the two share them. With split cells the whole stream is copied at the next decode;
        a part cannot be (the library aborts the process).
        """
        self.seq_rm(target, 0)
        self._library.llama_memory_seq_cp(self._memory, source, target, -1, -1)

    def seq_pos_max(self, seq_id: int) -> int:
        """The last position that a sequence holds; -1 when empty."""
        return int(self._library.llama_memory_seq_pos_max(self._memory, seq_id)) if self._memory else -1

    def clear(self) -> None:
        """Forget every sequence."""
        if self._memory:
            self._library.llama_memory_clear(self._memory, False)

    @property
    def can_shift(self) -> bool:
        return bool(self._memory and self._library.llama_memory_can_shift(self._memory))


def _context_error(log: Log, config: EngineConfig) -> ModelError:
    reason = log.errors() or "no reason given"
    if any("alloc" in line for line in log.lines):
        return OutOfMemoryError(
            f"No memory for a context of {config.n_ctx:,} tokens, {config.n_seq_max} sequences: {reason}.",
            "Ask for a smaller -c or fewer sequences (-np).",
        )
    return ModelError(f"llama.cpp could not make a context: {reason}.")
