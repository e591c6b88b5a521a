"""Made-up headers and machines for tests of plans: real shapes, no weights, and memory as a test wants it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf_builder as build

from edgeserve.gguf import GGUFHeader, read_header
from edgeserve.host import CpuBudget, MemoryBudget
from edgeserve.planner.goals import FixedSettings, Goals
from edgeserve.planner.plan import Plan, make_plan
from edgeserve.planner.target import Target, measured_target
from edgeserve.planner.this_machine import GgmlDevice, this_machine

GIB, MIB = 1 << 30, 1 << 20
Q4_K, F32, F16 = 12, 0, 1
CPU = CpuBudget(4, "4 physical cores.", 8, 8, 4, 4)


def weight(name: str, columns: int, rows: int, count: int = 1) -> tuple[str, tuple[int, ...], int, int]:
    """A Q4_K tensor: 144 bytes for 256 values."""
    shape = (columns, rows) if count == 1 else (columns, rows, count)
    return name, shape, Q4_K, columns * rows * count // 256 * 144


def dense(
    *,
    n_layer: int = 32,
    n_embd: int = 4096,
    n_ff: int = 14336,
    n_head: int = 32,
    n_head_kv: int | Sequence[int] = 8,
    n_ctx_train: int = 131072,
    arch: str = "llama",
    n_vocab: int = 32000,
    metadata: Mapping[str, Any] | None = None,
    num_experts: int = 0,
) -> tuple[dict[str, Any], list[tuple[str, tuple[int, ...], int, int]]]:
    """Metadata and tensors of a model with that shape."""
    pairs: dict[str, Any] = {
        "general.architecture": arch,
        "general.name": "Made up",
        f"{arch}.block_count": n_layer,
        f"{arch}.context_length": n_ctx_train,
        f"{arch}.embedding_length": n_embd,
        f"{arch}.feed_forward_length": n_ff,
        f"{arch}.attention.head_count": n_head,
        f"{arch}.attention.head_count_kv": n_head_kv if isinstance(n_head_kv, int) else list(n_head_kv),
        f"{arch}.vocab_size": n_vocab,
    }
    pairs |= {f"{arch}.expert_count": num_experts, f"{arch}.expert_used_count": 2} if num_experts else {}
    pairs |= metadata or {}
    width = n_embd // 4 if not isinstance(n_head_kv, int) else n_embd * n_head_kv // n_head
    tensors = [weight("token_embd.weight", n_embd, n_vocab), weight("output.weight", n_embd, n_vocab)]
    for il in range(n_layer):
        tensors += [
            weight(f"blk.{il}.attn_q.weight", n_embd, n_embd),
            weight(f"blk.{il}.attn_k.weight", n_embd, width),
            weight(f"blk.{il}.attn_v.weight", n_embd, width),
            weight(f"blk.{il}.attn_output.weight", n_embd, n_embd),
        ]
        kinds = ("gate", "up", "down")
        suffix = "_exps" if num_experts else ""
        tensors += [
            weight(
                f"blk.{il}.ffn_{kind}{suffix}.weight",
                *((n_ff, n_embd) if kind == "down" else (n_embd, n_ff)),
                max(1, num_experts),
            )
            for kind in kinds
        ]
    return pairs, tensors


def header(folder: Path, name: str = "Made-up-Q4_K_M.gguf", **shape: Any) -> GGUFHeader:
    """A bare header, as a file without its weights."""
    metadata, tensors = dense(**shape)
    path = folder / name
    path.write_bytes(build.header_bytes(metadata, tensors))
    return read_header(path)


def host(available_bytes: int, total_bytes: int = 16 * GIB, limit_bytes: int | None = None) -> MemoryBudget:
    """A machine's memory; with a limit, a control group holds it."""
    said = "The cgroup limit of 0.5 GiB (memory.max) leaves 0.2 GiB."
    return MemoryBudget(total_bytes, available_bytes, limit_bytes, said if limit_bytes else "told")


def cpu_machine(available_bytes: int, **memory: Any) -> Target:
    machine = this_machine((), cpu=CPU, memory=host(available_bytes, **memory), host_name="")
    return measured_target(machine)


def gpu_machine(
    free_bytes: int,
    total_bytes: int,
    available_bytes: int = 24 * GIB,
    goals: Goals | None = None,
    description: str = "NVIDIA GeForce RTX 4060 Laptop GPU",
) -> Target:
    """A card of which others use a part, in a machine with plenty of RAM."""
    card = GgmlDevice("CUDA0", description, "gpu", free_bytes, total_bytes)
    memory = host(available_bytes, total_bytes=32 * GIB)
    return measured_target(this_machine((card,), cpu=CPU, memory=memory, host_name=""), goals)


def estimate(
    model: GGUFHeader, target: Target, goals: Goals | None = None, fixed: FixedSettings | None = None
) -> Plan:
    """A plan by closed forms."""
    return make_plan(model, target, goals, fixed, dry_run=False)
