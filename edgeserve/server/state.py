"""What the routes share: the loaded model with its template, or how far loading has come; who is running.

Owns the server's life from loading to draining. Touched by the event loop only, except `attach`, `fail` and
`report_progress`, which the loading thread calls. Knows nothing of wire formats.
"""

from __future__ import annotations

import importlib.metadata
import logging
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.requests import HTTPConnection

from edgeserve import ggml
from edgeserve.config import EngineConfig, ServerConfig
from edgeserve.engine.request import EngineStats
from edgeserve.errors import EdgeserveError, UnavailableError
from edgeserve.server.answer import TokenTexts
from edgeserve.server.chat_template import CHATML, ChatTemplate
from edgeserve.server.events import Generation
from edgeserve.server.limits import Limits
from edgeserve.server.metrics_export import Metrics, ModelInfo
from edgeserve.server.prompt import PromptBuilder
from edgeserve.server.protocol import check_defaults
from edgeserve.server.reasoning import ReasoningStyle, style_of
from edgeserve.server.template_process import TemplateError

if TYPE_CHECKING:
    from edgeserve.engine.async_engine import AsyncEngine
    from edgeserve.llama import Model

logger = logging.getLogger(__name__)


class Serving:
    """A running engine and what the front end keeps about its model."""

    def __init__(self, engine: AsyncEngine, config: ServerConfig, limits: Limits) -> None:
        """Starts the template's process and probes it: blocks for some tenths of a second."""
        model: Model = engine.model
        source = config.chat_template or model.chat_template
        if not source:
            logger.warning(
                "The model file has no chat template; ChatML is used, which may not suit the model."
            )
        self.engine = engine
        self.model = model
        self.model_id = config.model_alias or _name_of(model.path)
        self.created = _modified_s(model.path)
        self.version = _version("edgeserve")
        self.bos_token = _token(model, model.bos_id)
        self.eos_token = _token(model, model.eos_id)
        self.template = ChatTemplate(
            source or CHATML,
            bos_token=self.bos_token,
            eos_token=self.eos_token,
            limits=limits,
        )
        self._probe()
        self.prompts = PromptBuilder(
            model, self.template, n_ctx_seq=engine.config.n_ctx_seq, is_fallback=not source
        )
        self.style: ReasoningStyle = style_of(self.template.source)
        self.shows_control_tokens = any(self.prompts.is_control(mark) for mark in self.style.marks)
        # Found by asking for every token of the vocabulary: not while the first request waits.
        self.eog_ids = model.eog_ids
        self.token_texts = TokenTexts(lambda token: model.piece(token, special=True))

    def _probe(self) -> None:
        try:
            self.template.probe()
        except TemplateError as error:
            logger.warning("Chat requests will fail: %s", error)

    @property
    def fingerprint(self) -> str:
        return f"edgeserve-{self.version}"

    def info(self, load_s: float) -> ModelInfo:
        return ModelInfo(
            model=self.model_id,
            arch=self.model.metadata.get("general.architecture", ""),
            version=self.version,
            runtime=_version("llama-cpp-python"),
            # llama.cpp's description is "llama 135M Q4_1".
            quant=self.model.description.split(" ", 2)[-1],
            n_ctx=self.engine.config.n_ctx,
            device=_device_of(self.engine.config),
            commit=ggml.commit(),
            load_s=load_s,
        )


class ServerState:
    """Loading -> ready -> draining -> closing."""

    def __init__(self, config: ServerConfig, limits: Limits | None = None) -> None:
        """Raises UsageError when the configured sampling defaults are not possible."""
        check_defaults(config.request_defaults)
        self.config = config
        self.limits = limits or Limits()
        self.metrics = Metrics(self.engine_stats)
        self.serving: Serving | None = None
        self.load_progress = 0.0
        self.load_error: EdgeserveError | None = None
        self.is_draining = False
        self.is_closing = False
        self._active: dict[str, Generation] = {}
        self._started_s = time.perf_counter()

    def report_progress(self, fraction: float) -> None:
        self.load_progress = fraction

    def attach(self, engine: AsyncEngine) -> None:
        """The model is there: requests are served from now on."""
        serving = Serving(engine, self.config, self.limits)
        self.metrics.describe(serving.info(time.perf_counter() - self._started_s))
        self.serving = serving

    def fail(self, error: EdgeserveError) -> None:
        """Loading came to nothing."""
        self.load_error = error

    def engine_stats(self) -> EngineStats | None:
        return None if self.serving is None else self.serving.engine.stats

    def ready(self) -> Serving:
        """What answers questions about the model. Raises UnavailableError before it is loaded."""
        if self.serving is None:
            if self.load_error is not None:
                raise UnavailableError(
                    "The model could not be loaded.", str(self.load_error), code="load_failed"
                )
            raise UnavailableError(
                "Loading the model.", code="loading", extra={"progress": round(self.load_progress, 3)}
            )
        return self.serving

    def accepting(self) -> Serving:
        """What runs new generations. Raises UnavailableError also while the server drains."""
        if self.is_draining:
            raise UnavailableError("The server is shutting down.", code="draining")
        return self.ready()

    @contextmanager
    def running(self, generation: Generation) -> Iterator[None]:
        self._active[generation.id] = generation
        try:
            yield
        finally:
            del self._active[generation.id]

    @property
    def num_active(self) -> int:
        return len(self._active)

    def cancel(self, request_id: str) -> bool:
        """End a generation by the id of its answer, or one choice of it by the engine's id."""
        if self.serving is None:
            return False
        generation = self._active.get(request_id)
        ids = [request_id] if generation is None else [request.request_id for request in generation.requests]
        known = [self.serving.engine.abort(engine_id) for engine_id in ids]
        return any(known)

    def cancel_all(self) -> None:
        for request_id in list(self._active):
            self.cancel(request_id)

    def stuck_for_s(self) -> float | None:
        """How long the engine has had work and given no sign of life, when that is longer than any step."""
        stats = self.engine_stats()
        if stats is None or not (stats.running or stats.waiting):
            return None
        silent_s = time.perf_counter() - stats.heartbeat_s
        longest_s = max((step.duration_s for step in stats.recent_steps), default=0.0)
        # A machine whose ordinary steps are slow is busy, not stuck.
        return silent_s if silent_s > max(self.limits.engine_stuck_s, 20 * longest_s) else None

    def close(self, *, wait: bool = True) -> None:
        """End the template's process and, unless its step is not to be waited for, the engine's thread."""
        self.is_draining = self.is_closing = True
        if self.serving is not None:
            if wait:
                self.serving.engine.stop()
            self.serving.template.close()


def state_of(request: HTTPConnection) -> ServerState:
    """The state that the application was built around."""
    state = request.app.state.server
    assert isinstance(state, ServerState)
    return state


def _token(model: Model, token_id: int) -> str:
    return model.piece(token_id, special=True).decode("utf-8", "replace") if token_id >= 0 else ""


def _device_of(config: EngineConfig) -> str:
    """Names of the devices that layers were asked onto, in ggml's words."""
    if config.n_gpu_layers == 0 or not ggml.supports_gpu_offload():
        return "CPU"
    gpus = [device.name for device in ggml.devices() if device.type in ("gpu", "igpu")]
    return ",".join(config.devices or gpus) or "CPU"


def _name_of(path: str) -> str:
    return re.sub(r"(-\d{5}-of-\d{5})?\.gguf$", "", Path(path).name)


def _modified_s(path: str) -> int:
    try:
        return int(Path(path).stat().st_mtime)
    except OSError:
        return 0


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
