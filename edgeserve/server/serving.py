"""A running engine with what the front end keeps about its model, and the facts that outlive both.

Owns the lifetime of the template's process. Knows nothing of requests or of HTTP.
"""

from __future__ import annotations

import importlib.metadata
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from edgeserve import ggml
from edgeserve.config import EngineConfig, ServerConfig
from edgeserve.reasoning import ReasoningStyle, style_of
from edgeserve.server.answer import TokenTexts
from edgeserve.server.chat_template import CHATML, ChatTemplate, TemplateCaps
from edgeserve.server.limits import Limits
from edgeserve.server.metrics_export import ModelInfo
from edgeserve.server.prompt import PromptBuilder
from edgeserve.server.template_process import TemplateError

if TYPE_CHECKING:
    from edgeserve.engine.async_engine import AsyncEngine
    from edgeserve.llama import Model

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the API tells of the model, whether or not it is in memory."""

    model_id: str
    path: str
    created: int
    """When the file was changed: stable, unlike the time of the request."""
    version: str
    config: EngineConfig
    n_ctx_train: int
    n_vocab: int
    n_embd: int
    n_params: int
    size_bytes: int
    description: str
    num_layers: int
    """With the output layer, as llama.cpp counts offloaded ones."""
    num_gpu_layers: int
    bos_token: str
    eos_token: str
    template: str
    caps: TemplateCaps

    @property
    def fingerprint(self) -> str:
        return f"edgeserve-{self.version}"

    @property
    def ftype(self) -> str:
        """The quantization. llama.cpp's description is "llama 135M Q4_1"."""
        return self.description.split(" ", 2)[-1]


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
        bos, eos = _token(model, model.bos_id), _token(model, model.eos_id)
        self.engine = engine
        self.model = model
        self.template = ChatTemplate(source or CHATML, bos_token=bos, eos_token=eos, limits=limits)
        self._probe()
        self.facts = _facts(engine, config, self.template, bos, eos)
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
    def model_id(self) -> str:
        return self.facts.model_id

    def info(self, load_s: float) -> ModelInfo:
        return ModelInfo(
            model=self.model_id,
            arch=self.model.metadata.get("general.architecture", ""),
            version=self.facts.version,
            runtime=_version("llama-cpp-python"),
            quant=self.facts.ftype,
            n_ctx=self.engine.config.n_ctx,
            device=_device_of(self.engine.config),
            commit=ggml.commit(),
            load_s=load_s,
        )

    def close(self, *, wait: bool = True) -> None:
        """End the template's process and, unless its step is not to be waited for, the engine's thread."""
        if wait:
            self.engine.stop()
        self.template.close()

    def free(self) -> None:
        """Close, and give the model's memory back. Blocks for the current step."""
        self.close()
        self.model.close()


def _facts(
    engine: AsyncEngine, config: ServerConfig, template: ChatTemplate, bos: str, eos: str
) -> ModelFacts:
    model = engine.model
    return ModelFacts(
        model_id=config.model_alias or _name_of(model.path),
        path=model.path,
        created=_modified_s(model.path),
        version=_version("edgeserve"),
        config=engine.config,
        n_ctx_train=model.n_ctx_train,
        n_vocab=model.n_vocab,
        n_embd=model.n_embd,
        n_params=model.n_params,
        size_bytes=model.size_bytes,
        description=model.description,
        num_layers=model.n_layer + 1,
        num_gpu_layers=model.num_gpu_layers,
        bos_token=bos,
        eos_token=eos,
        template=template.source,
        caps=template.caps,
    )


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
