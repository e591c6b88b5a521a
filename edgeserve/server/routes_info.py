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
from edgeserve.server.sse import HEADERS, EventStreamResponse, frame
from edgeserve.server.state import ServerState, Serving, state_of
from edgeserve.server.stats_view import slots_document, snapshot_document


async def root(http: Request) -> Response:
    state = state_of(http)
    model = state.serving.model_id if state.serving else None
    return JSONResponse({"name": "edgeserve", "model": model, "api": "/v1"})


async def health(http: Request) -> Response:
    """200 when a request would be served; otherwise 503 and why (loading, draining, stuck, stopped)."""
    state = state_of(http)
    try:
        serving = state.accepting()
        _check_engine(state, serving)
    except UnavailableError as error:
        response = error_response(error)
        response.headers["Cache-Control"] = "no-store"
        return response
    stats, model = serving.engine.stats, serving.model
    return JSONResponse(
        {
            "status": "ok",
            "running": len(stats.running),
            "waiting": len(stats.waiting),
            "heartbeat_age_s": round(max(0.0, time.perf_counter() - stats.heartbeat_s), 3),
            "layers": model.n_layer + 1,
            "gpu_layers": model.num_gpu_layers,
        }
    )


def _check_engine(state: ServerState, serving: Serving) -> None:
    if not serving.engine.is_alive:
        raise UnavailableError("The engine has stopped.", code="engine_stopped")
    if (silent_s := state.stuck_for_s()) is not None:
        raise UnavailableError(
            f"The engine has work and has given no sign of life for {silent_s:.0f} s.",
            code="engine_stuck",
            extra={"silent_s": round(silent_s, 1)},
        )


async def models(http: Request) -> Response:
    serving = state_of(http).ready()
    entry = _model_entry(serving)
    listed = {"name": serving.model_id, "model": serving.model_id, "capabilities": ["completion"]}
    return JSONResponse({"object": "list", "data": [entry], "models": [listed]})


async def model(http: Request) -> Response:
    """One entry; any name is answered by the loaded model, as generation is."""
    return JSONResponse(_model_entry(state_of(http).ready()))


def _model_entry(serving: Serving) -> dict[str, Any]:
    model, config = serving.model, serving.engine.config
    return {
        "id": serving.model_id,
        "object": "model",
        "created": serving.created,
        "owned_by": "edgeserve",
        "root": serving.model_id,
        "max_model_len": config.n_ctx_seq,
        "meta": {
            "n_ctx": config.n_ctx_seq,
            "n_ctx_pool": config.n_ctx,
            "n_ctx_train": model.n_ctx_train,
            "n_vocab": model.n_vocab,
            "n_embd": model.n_embd,
            "n_params": model.n_params,
            "size": model.size_bytes,
            "description": model.description,
        },
    }


async def props(http: Request) -> Response:
    state = state_of(http)
    serving = state.ready()
    config = serving.engine.config
    return JSONResponse(
        {
            "default_generation_settings": {
                "n_ctx": config.n_ctx_seq,
                "params": _default_params(state, serving),
            },
            "total_slots": config.n_seq_max,
            "model_alias": serving.model_id,
            "model_path": serving.model.path,
            "modalities": {"vision": False, "audio": False, "video": False},
            "chat_template": serving.template.source,
            "chat_template_caps": _caps(serving),
            "bos_token": serving.bos_token,
            "eos_token": serving.eos_token,
            "build_info": serving.fingerprint,
            "is_sleeping": False,
            "endpoint_slots": True,
            "endpoint_props": False,
            "endpoint_metrics": True,
            "engine": asdict(config),
        }
    )


def _default_params(state: ServerState, serving: Serving) -> dict[str, Any]:
    defaults: dict[str, Any] = dict(state.config.request_defaults)
    params = asdict(SamplingParams(**defaults))
    return {**params, "max_tokens": params["max_tokens"] or serving.engine.config.n_predict}


def _caps(serving: Serving) -> dict[str, bool]:
    """What the template and this server can do together: tools are not served, whatever the template says."""
    caps = asdict(serving.template.caps)
    return {
        **caps,
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
