"""From a plan's settings to what starts: an EngineConfig, and command lines for edgeserve and llama-server.

Owns the spelling. A command line names what matters or differs from the program's own default, so that it can
be pasted as it is. Knows nothing of how settings were chosen.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import asdict, fields

from edgeserve.config import EngineConfig
from edgeserve.planner.settings import Settings

_LLAMA_SERVER_N_BATCH, _LLAMA_SERVER_N_UBATCH = 2048, 512


def engine_config(settings: Settings, model_path: str = "") -> EngineConfig:
    """The engine's configuration at these settings, everything else by default."""
    known = {field.name for field in fields(EngineConfig)}
    return EngineConfig(model_path, **{k: v for k, v in asdict(settings).items() if k in known})


def edgeserve_flags(settings: Settings, *, on_gpu: bool, has_window: bool) -> list[str]:
    """Flags of `edgeserve serve` for these settings."""
    flags = list(_common(settings, on_gpu=on_gpu))
    if has_window:
        flags.append("--swa-full" if settings.swa_full else "--no-swa-full")
    return flags + list(_rare(settings))


def llama_server_flags(settings: Settings, *, on_gpu: bool, has_window: bool) -> list[str]:
    """Flags of `llama-server` that give the same memory. Its own fitting is switched off."""
    flags = list(_common(settings, on_gpu=on_gpu))
    flags += ["--swa-full"] if has_window and settings.swa_full else []
    flags += [] if settings.kv_unified else ["--no-kv-unified"]
    return [*flags, *_rare(settings), "--fit", "off"]


def _common(settings: Settings, *, on_gpu: bool) -> Iterator[str]:
    yield from ("-c", str(settings.n_ctx), "-np", str(settings.n_seq_max))
    if on_gpu:
        yield from ("-ngl", "99" if settings.n_gpu_layers < 0 else str(settings.n_gpu_layers))
        if settings.n_cpu_moe:
            yield from ("--n-cpu-moe", str(settings.n_cpu_moe))
    if (settings.type_k, settings.type_v) != ("f16", "f16"):
        yield from ("-ctk", settings.type_k, "-ctv", settings.type_v)
    yield from ("-fa", settings.flash_attn)
    if settings.n_batch != _LLAMA_SERVER_N_BATCH:
        yield from ("-b", str(settings.n_batch))
    if settings.n_ubatch != _LLAMA_SERVER_N_UBATCH:
        yield from ("-ub", str(settings.n_ubatch))


def _rare(settings: Settings) -> Iterator[str]:
    if settings.kv_unified:
        yield "--kv-unified"
    if not settings.offload_kqv:
        yield "--no-kv-offload"
    if not settings.use_mmap:
        yield "--no-mmap"
    if not settings.use_extra_bufts:
        yield "--no-repack"


def edgeserve_command(
    reference: str, settings: Settings, *, on_gpu: bool, has_window: bool, command: str = "serve"
) -> str:
    """The line that starts edgeserve with this plan."""
    flags = edgeserve_flags(settings, on_gpu=on_gpu, has_window=has_window)
    return shlex.join(["edgeserve", command, reference, *flags])


def llama_server_command(
    reference: str, settings: Settings, *, on_gpu: bool, has_window: bool, repo: str = ""
) -> str:
    """The line that starts llama-server with the same memory.

    `reference`: a path or an address; `repo`: a hub reference, ORG/REPO:QUANT, which is taken instead.
    """
    where = ["-hf", repo] if repo else ["-mu" if "://" in reference else "-m", reference]
    flags = llama_server_flags(settings, on_gpu=on_gpu, has_window=has_window)
    return shlex.join(["llama-server", *where, *flags])
