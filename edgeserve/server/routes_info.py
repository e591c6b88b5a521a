"""The endpoints that only tell: health, models, props, slots, metrics, events. And the one that cancels.

None of them waits for the engine: they read its last published statistics.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from edgeserve.engine.request import EngineStats
from edgeserve.engine.sampling_params import SamplingParams
from edgeserve.errors import NotFoundError, UnavailableError
from edgeserve.server.body import check_content_type, read_body
from edgeserve.server.http_errors import error_response
from edgeserve.server.metrics_export import CONTENT_TYPE
from edgeserve.server.serving import ModelFacts, Serving
from edgeserve.server.sse import HEADERS, EventStreamResponse, frame
from edgeserve.server.state import ServerState, state_of
from edgeserve.server.stats_view import slots_document, snapshot_document


async def root(http: Request) -> Response:
    state = state_of(http)
    model = state.facts().model_id if state.serving or state.is_asleep else None
    return JSONResponse({"name": "edgeserve", "model": model, "api": "/v1"})


async def health(http: Request) -> Response:
    """200 when a request would be served; otherwise 503 and why (loading, draining, stuck, stopped)."""
    state = state_of(http)
    try:
        state.check_accepting()
        facts = state.facts()
        _check_engine(state)
    except UnavailableError as error:
        response = error_response(error)
        response.headers["Cache-Control"] = "no-store"
        return response
    stats = state.engine_stats()
    return JSONResponse(
        {
            "status": "ok",
            "is_sleeping": state.is_asleep,
            "running": len(stats.running) if stats else 0,
            "waiting": len(stats.waiting) if stats else 0,
            "heartbeat_age_s": _age_s(stats) if stats else None,
            "layers": facts.num_layers,
            "gpu_layers": facts.num_gpu_layers,
        }
    )


def _age_s(stats: EngineStats) -> float:
    return round(max(0.0, time.perf_counter() - stats.heartbeat_s), 3)


def _check_engine(state: ServerState) -> None:
    if state.is_asleep:
        return
    if not state.ready().engine.is_alive:
        raise UnavailableError("The engine has stopped.", code="engine_stopped")
    if (silent_s := state.stuck_for_s()) is not None:
        raise UnavailableError(
            f"The engine has work and has given no sign of life for {silent_s:.0f} s.",
            code="engine_stuck",
            extra={"silent_s": round(silent_s, 1)},
        )


async def models(http: Request) -> Response:
    facts = state_of(http).facts()
    listed = {"name": facts.model_id, "model": facts.model_id, "capabilities": ["completion"]}
    return JSONResponse({"object": "list", "data": [_model_entry(facts)], "models": [listed]})


async def model(http: Request) -> Response:
    """One entry; any name is answered by the loaded model, as generation is."""
    return JSONResponse(_model_entry(state_of(http).facts()))


def _model_entry(facts: ModelFacts) -> dict[str, Any]:
    return {
        "id": facts.model_id,
        "object": "model",
        "created": facts.created,
        "owned_by": "edgeserve",
        "root": facts.model_id,
        "max_model_len": facts.config.n_ctx_seq,
        "architecture": {"input_modalities": ["text"], "output_modalities": ["text"]},
        "meta": {
            "n_ctx": facts.config.n_ctx_seq,
            "n_ctx_pool": facts.config.n_ctx,
            "n_ctx_train": facts.n_ctx_train,
            "n_vocab": facts.n_vocab,
            "n_embd": facts.n_embd,
            "n_params": facts.n_params,
            "size": facts.size_bytes,
            "ftype": facts.ftype,
            "description": facts.description,
        },
    }


async def props(http: Request) -> Response:
    state = state_of(http)
    facts = state.facts()
    return JSONResponse(
        {
            "default_generation_settings": {
                "n_ctx": facts.config.n_ctx_seq,
                "params": _default_params(state, facts),
            },
            "total_slots": facts.config.n_seq_max,
            "model_alias": facts.model_id,
            "model_path": facts.path,
            "model_ftype": facts.ftype,
            "modalities": {"vision": False, "audio": False, "video": False},
            "chat_template": facts.template,
            "chat_template_caps": _caps(facts),
            "bos_token": facts.bos_token,
            "eos_token": facts.eos_token,
            "build_info": facts.fingerprint,
            "is_sleeping": state.is_asleep,
            "endpoint_slots": True,
            "endpoint_props": False,
            "endpoint_metrics": True,
            "engine": asdict(facts.config),
        }
    )


def _default_params(state: ServerState, facts: ModelFacts) -> dict[str, Any]:
    defaults: dict[str, Any] = dict(state.config.request_defaults)
    params = asdict(SamplingParams(**defaults))
    return {**params, "max_tokens": params["max_tokens"] or facts.config.n_predict}


def _caps(facts: ModelFacts) -> dict[str, bool]:
    """What the template and this server can do together: tools are not served, whatever the template says."""
    return {
        **asdict(facts.caps),
        "supports_tools": False,
        "supports_tool_calls": False,
        "supports_parallel_tool_calls": False,
    }


async def slots(http: Request) -> Response:
    stats = state_of(http).ready().engine.stats
    if http.query_params.get("fail_on_no_slot") and len(stats.running) >= stats.num_slots:
        raise UnavailableError("No slot is free.", code="no_slot_available")
    return JSONResponse(slots_document(stats))


async def metrics(http: Request) -> Response:
    return Response(state_of(http).metrics.render(), headers={"Content-Type": CONTENT_TYPE})


async def events(http: Request) -> Response:
    """The engine after each step, as server-sent events; a slow reader misses some snapshots."""
    state = state_of(http)
    serving = state.ready()
    if http.method == "HEAD":
        return Response(headers=HEADERS)
    return EventStreamResponse(_snapshots(state, serving), state.config.sse_ping_s)


async def _snapshots(state: ServerState, serving: Serving) -> AsyncGenerator[bytes, None]:
    engine = serving.engine
    stats = engine.stats
    yield frame(snapshot_document(stats))
    updates: AsyncIterator[EngineStats] = engine.subscribe()
    try:
        async for update in updates:
            if state.is_closing:
                return
            yield frame(snapshot_document(update, after_step=stats.num_steps))
            stats = update
    finally:
        if isinstance(updates, AsyncGenerator):
            await updates.aclose()


async def cancel(http: Request) -> Response:
    state = state_of(http)
    body = await read_body(http, state.config.max_body_bytes, state.limits.body_s)
    check_content_type(http, has_body=bool(body))
    request_id = http.path_params["request_id"]
    if not state.cancel(request_id):
        raise NotFoundError("No request of that id is running.", code="request_not_found")
    return JSONResponse({"id": request_id, "cancelled": True})
