"""The runtime's working memory: a context with its KV cache and compute buffers, and the batch it decodes.

Belongs to one thread. Knows nothing of requests or scheduling.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeserve.config import CACHE_TYPE_IDS, EngineConfig
from edgeserve.errors import ModelError, OutOfMemoryError
from edgeserve.llama import Log, Model, load_library

_FLASH_ATTN_IDS = {"auto": -1, "off": 0, "on": 1}


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

    def add(
        self,
        token_ids: Sequence[int],
        first_pos: int,
        seq_id: int,
        *,
        last_logits: bool = False,
        all_logits: bool = False,
    ) -> int:
        """Append consecutive tokens of one sequence, with logits of the last of them, of all or of none;
        returns the row of the last."""
        start, end = self.num_tokens, self.num_tokens + len(token_ids)
        assert end <= self.capacity, "the scheduler keeps a step within the batch"
        self._token[start:end] = token_ids
        self._pos[start:end] = np.arange(first_pos, first_pos + len(token_ids))
        self._seq_id[start:end] = seq_id
        self._logits[start:end] = all_logits
        self._logits[end - 1] = last_logits or all_logits
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
        # One row of logits per sequence and step, and one a drafted token, is all that is ever asked for; the
        # library's default keeps room for n_batch rows, which costs 4 * n_vocab * n_ubatch bytes.
        params.n_outputs_max = config.n_seq_max + config.num_draft_rows
        params.n_threads, params.n_threads_batch = config.n_threads, config.n_threads_batch
        params.flash_attn_type = _FLASH_ATTN_IDS[config.flash_attn]
        params.type_k, params.type_v = CACHE_TYPE_IDS[config.type_k], CACHE_TYPE_IDS[config.type_v]
        params.kv_unified, params.swa_full = config.kv_unified, config.swa_full
        params.offload_kqv = config.offload_kqv
        params.no_perf = True
        model.log.lines.clear()
        self.handle = library.llama_init_from_model(model.handle, params)
        if not self.handle:
            raise _context_error(model.log, config)
        self._memory = library.llama_get_memory(self.handle)
        self._logits_ith = library.llama_get_logits_ith
        self._rows = np.empty((0, 0), np.float32)
        self._rows_key = (0, 0)
        self._window = 0 if config.swa_full else int(library.llama_model_n_swa(model.handle))
        self._streams = 1 if config.kv_unified else config.n_seq_max
        # With split cells a copy between sequences is only made by the next decode.
        self._copied_from: set[int] = set()
        self._copied_to: set[int] = set()

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
        if code == 0:
            self._copied_from.clear()
            self._copied_to.clear()
        return code

    def set_threads(self, n_threads: int, n_threads_batch: int) -> None:
        """Threads of later steps: for those of one token, and for those of more."""
        self._library.llama_set_n_threads(self.handle, n_threads, n_threads_batch)

    def repeat_prefix(self, num_tokens: int, num_times: int) -> bool:
        """Let sequence 0, which holds so many tokens, hold them `num_times` times over, one behind the other:
        as deep a context as measurements want, without computing it. Unified cells only, and a seq_id for
        each repetition. False where the model's memory cannot be moved like that; it is then undefined."""
        library = self._library
        if not (self.can_shift and self.can_cut_back):
            return False
        size = library.llama_state_seq_get_size(self.handle, 0)
        state = (ctypes.c_uint8 * size)()
        size = library.llama_state_seq_get_data(self.handle, state, size, 0)
        for copy in range(1, num_times):
            if not library.llama_state_seq_set_data(self.handle, state, size, copy):
                return False
            library.llama_memory_seq_add(self._memory, copy, 0, -1, copy * num_tokens)
            library.llama_memory_seq_cp(self._memory, copy, 0, -1, -1)
            self.seq_rm(copy, 0)
        return True

    def synchronize(self) -> None:
        """Wait for the last step: on a GPU, decode returns before it is done."""
        self._library.llama_synchronize(self.handle)

    def logits(self, row: int) -> NDArray[np.float32]:
        """The logits of a row that asked for them, shape (n_vocab,): a view, valid until the next decode."""
        pointer = self._logits_ith(self.handle, row)
        return np.ctypeslib.as_array(pointer, shape=(self.model.n_vocab,))

    def logits_rows(self, num_rows: int) -> NDArray[np.float32]:
        """The logits of all rows that asked for them, in the order of the batch, shape (num_rows, n_vocab): a
        view, valid until the next decode. Waits for the step."""
        pointer = self._library.llama_get_logits(self.handle)
        # The library keeps its buffer from step to step: a view is made anew only when that has moved.
        key = (ctypes.addressof(pointer.contents), num_rows)
        if key != self._rows_key:
            self._rows = np.ctypeslib.as_array(pointer, shape=(num_rows, self.model.n_vocab))
            self._rows_key = key
        return self._rows

    def seq_rm(self, seq_id: int, first_pos: int, end_pos: int = -1) -> bool:
        """Drop a sequence's tokens from `first_pos` on. False where the model cannot drop a part."""
        if not self._memory:
            return True
        return bool(self._library.llama_memory_seq_rm(self._memory, seq_id, first_pos, end_pos))

    @property
    def can_cut_back(self) -> bool:
        """Whether any sequence can always be cut back to any prefix."""
        return not self._window and not self.model.keeps_state

    def can_cut(self, seq_id: int, num_tokens: int) -> bool:
        """Whether a sequence can be cut back to its first `num_tokens` tokens faithfully: recurrent state
        cannot go back, and a sliding window may have dropped cells that the kept tokens attend to."""
        if num_tokens > self.seq_pos_max(seq_id):
            return True
        if self.model.keeps_state:
            return num_tokens == 0
        if not self._window:
            return True
        oldest = int(self._library.llama_memory_seq_pos_min(self._memory, seq_id))
        return oldest <= max(0, num_tokens - self._window)

    def cut_back(self, seq_id: int, num_tokens: int) -> bool:
        """Keep only a sequence's first `num_tokens` tokens. False, with nothing changed, where that cannot be
        done."""
        return self.can_cut(seq_id, num_tokens) and self.seq_rm(seq_id, num_tokens)

    def can_share(self, seq_id: int, num_tokens: int) -> bool:
        """Whether another sequence that holds the same can be cut back to so many tokens."""
        # Cells that two sequences share are not used again when a window has moved on: with unified cells a
        # window's few cells would run out.
        has_own_cells = not self._window or self._streams > 1
        return has_own_cells and not self.model.keeps_state and self.can_cut(seq_id, num_tokens)

    def cut_from(self, num_tokens: int) -> int:
        """The shortest prefix that a saved state of so many tokens can be cut back to once it is loaded."""
        if self.can_cut_back or (not self.model.keeps_state and num_tokens <= self._window):
            return 0
        return num_tokens

    def share_prefix(self, source: int, target: int) -> None:
        """Let `target` hold what `source` holds, in place of what it held: to be cut back to the shared part.

        With unified cells the two share them. With split cells the whole stream is copied at the next decode;
        a part cannot be (the library aborts the process).
        """
        self.seq_rm(target, 0)
        self._library.llama_memory_seq_cp(self._memory, source, target, -1, -1)
        if self._streams > 1:
            self._copied_from.add(source)
            self._copied_to.add(target)

    def state_bytes(self, seq_id: int, *, partial: bool = False) -> int:
        """Size of a sequence's saved state; 0 while a copy into it has not been made, or without a memory.
        `partial` leaves out what can be cut back: of a model with recurrent layers or windows, only these."""
        if not self._memory or seq_id in self._copied_to:
            return 0
        return int(self._library.llama_state_seq_get_size_ext(self.handle, seq_id, int(partial)))

    def save_state(self, seq_id: int, *, partial: bool = False) -> NDArray[np.uint8] | None:
        """A copy of a sequence's state in host memory; None when there is none."""
        size = self.state_bytes(seq_id, partial=partial)
        if not size:
            return None
        state = np.empty(size, np.uint8)
        get_data = self._library.llama_state_seq_get_data_ext
        written = int(get_data(self.handle, _bytes_of(state), size, seq_id, int(partial)))
        return state if written == size else None

    def load_state(self, seq_id: int, state: NDArray[np.uint8], *, partial: bool = False) -> bool:
        """Put a saved state in place of what a sequence holds. False, and the sequence is to be emptied, when
        it does not fit into this context or no cells are free."""
        # A copy not yet made would take what is loaded here, or lay itself over it.
        if not self._memory or seq_id in self._copied_from or seq_id in self._copied_to:
            return False
        set_data = self._library.llama_state_seq_set_data_ext
        return bool(set_data(self.handle, _bytes_of(state), state.nbytes, seq_id, int(partial)))

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


def _bytes_of(array: NDArray[np.uint8]) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))


def _context_error(log: Log, config: EngineConfig) -> ModelError:
    reason = log.errors() or "no reason given"
    if any("alloc" in line for line in log.lines):
        return OutOfMemoryError(
            f"No memory for a context of {config.n_ctx:,} tokens, {config.n_seq_max} sequences: {reason}.",
            "Ask for a smaller -c or fewer sequences (-np).",
        )
    return ModelError(f"llama.cpp could not make a context: {reason}.")
