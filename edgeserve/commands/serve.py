"""`edgeserve serve`: one model behind an address, until a signal ends it.

Owns what is said at the start, all on standard error.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

from edgeserve.commands.engine_start import Started, make_engine
from edgeserve.commands.first_tune import FirstTune
from edgeserve.commands.model_file import check_reference, find
from edgeserve.commands.version import version_line
from edgeserve.config import EngineConfig, ServerConfig
from edgeserve.engine.async_engine import AsyncEngine
from edgeserve.host import format_gib
from edgeserve.llama import Model
from edgeserve.server.run import run_server
from edgeserve.server.security import is_exposed
from edgeserve.settings.sources import Settings
from edgeserve.settings.values import server_config

_LABEL_COLUMNS = 11


def run(settings: Settings, *, is_insecure: bool) -> int:
    """Serve until a signal; 0 after a requested stop. Raises UsageError, ModelError and so on."""
    logging.basicConfig(
        level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    config = server_config(settings)
    # Before anything listens: a mistyped name must not look like a server that is about to come.
    check_reference(settings)

    # A model that slept is loaded again, with nothing new to say about it.
    is_first = True
    first_tune = FirstTune()

    def load(on_progress: Callable[[float], None]) -> AsyncEngine:
        nonlocal is_first
        started = make_engine(settings, find(settings), on_progress, first_tune)
        if is_first:
            say(*started.notes, *engine_lines(started))
        is_first = False
        return started.engine

    run_server(
        config,
        load,
        on_listening=lambda url: say(*address_lines(url, config)),
        on_ready=lambda url: say(line("ready", f"{url}/v1")),
        on_interrupt=first_tune.skip,
        is_insecure=is_insecure,
    )
    return 0


def say(*lines: str) -> None:
    for text in lines:
        print(text, file=sys.stderr, flush=True)


def line(label: str, text: str) -> str:
    return f"{label:{_LABEL_COLUMNS}}{text}"


def address_lines(url: str, config: ServerConfig) -> list[str]:
    """Where it listens and who may come: known before the model is there."""
    return [
        version_line(),
        line("address", url),
        line("access", access_text(config)),
    ]


def access_text(config: ServerConfig) -> str:
    reach = "reachable from other machines" if is_exposed(config.host) else "loopback only"
    if config.api_keys:
        return f"{reach}, API key required"
    return (
        f"{reach}, no key: anybody there can use it" if is_exposed(config.host) else f"{reach}, no key needed"
    )


def engine_lines(started: Started) -> list[str]:
    """Model, context, threads, attention and offload, as they came out."""
    engine = started.engine
    config, model = engine.config, engine.model
    attention = {"on": "on", "off": "off", "auto": "where the backend has it"}[config.flash_attn]
    return [
        line("model", model_text(model)),
        line("context", context_text(config, model.n_ctx_train)),
        line("threads", f"{config.n_threads}: {started.threads_reason}"),
        line("attention", f"flash attention {attention}, KV cache {config.type_k}/{config.type_v}"),
        line("offload", str(started.offload)),
    ]


def model_text(model: Model) -> str:
    """File, parameters, quantization and size. llama.cpp's own description guesses the parameters from the
    layers, so they are counted."""
    size, parts = model.size_bytes, model.description.split(" ", 2)
    shown = f"{format_gib(size)} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
    n_params = model.n_params
    parameters = f"{n_params / 1e9:.1f}B" if n_params >= 1e9 else f"{n_params / 1e6:.0f}M"
    return f"{model.path} ({parameters} parameters, {parts[-1]}, {shown})"


def context_text(config: EngineConfig, n_ctx_train: int) -> str:
    """Tokens a request, sequences and pool; and that the model was trained for less, where it was."""
    sequences = "1 sequence" if config.n_seq_max == 1 else f"{config.n_seq_max} sequences"
    text = f"{config.n_ctx_seq:,} tokens a request, {sequences}, {config.n_ctx:,} in all"
    if config.n_ctx_seq > n_ctx_train:
        text += f"; trained for {n_ctx_train:,}, longer texts get worse"
    return text
