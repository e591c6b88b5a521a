"""The HTTP application: which path leads to which route, behind which guard.

create_app(engine, config)        for an engine that is there already
build_app(ServerState(config))    answers 503 until `state.attach(engine)` has been called
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from edgeserve.config import ServerConfig
from edgeserve.errors import RequestError
from edgeserve.server import routes_generate, routes_info, routes_text
from edgeserve.server.http_errors import on_bug, on_http_exception, on_request_error
from edgeserve.server.limits import Limits
from edgeserve.server.linger import Linger
from edgeserve.server.security import Guard
from edgeserve.server.sleep import InUse
from edgeserve.server.state import ServerState

if TYPE_CHECKING:
    from edgeserve.engine.async_engine import AsyncEngine

Endpoint = Callable[[Request], Awaitable[Response]]

_GET: dict[str, Endpoint] = {
    "/": routes_info.root,
    "/health": routes_info.health,
    "/v1/health": routes_info.health,
    "/models": routes_info.models,
    "/v1/models": routes_info.models,
    "/v1/models/{model:path}": routes_info.model,
    "/props": routes_info.props,
    "/slots": routes_info.slots,
    "/metrics": routes_info.metrics,
    "/events": routes_info.events,
}

_POST: dict[str, Endpoint] = {
    "/chat/completions": routes_generate.chat_completions,
    "/v1/chat/completions": routes_generate.chat_completions,
    "/completions": routes_generate.completions,
    "/v1/completions": routes_generate.completions,
    "/completion": routes_generate.native_completion,
    "/tokenize": routes_text.tokenize,
    "/detokenize": routes_text.detokenize,
    "/apply-template": routes_text.apply_template,
    "/chat/completions/input_tokens": routes_text.input_tokens,
    "/v1/chat/completions/input_tokens": routes_text.input_tokens,
    "/requests/{request_id}/cancel": routes_info.cancel,
}


def create_app(engine: AsyncEngine, config: ServerConfig, *, limits: Limits | None = None) -> Starlette:
    """Blocks for some tenths of a second: the chat template is tried out first."""
    state = ServerState(config, limits)
    state.attach(engine)
    return build_app(state)


def build_app(state: ServerState) -> Starlette:
    app = Starlette(
        routes=[
            *(Route(path, endpoint, methods=["GET"]) for path, endpoint in _GET.items()),
            *(Route(path, endpoint, methods=["POST"]) for path, endpoint in _POST.items()),
        ],
        middleware=[
            Middleware(Linger, max_bytes=state.config.max_body_bytes),
            Middleware(Guard, config=state.config),
            Middleware(InUse, state=state),
        ],
        exception_handlers={
            RequestError: on_request_error,
            HTTPException: on_http_exception,
            Exception: on_bug,
        },
    )
    app.router.redirect_slashes = False
    app.state.server = state
    return app
