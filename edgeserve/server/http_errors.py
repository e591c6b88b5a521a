"""A request's error as an HTTP answer: OpenAI's error object, its status, and the headers that go with it.

Owns the errors that only exist because the transport is HTTP. Knows nothing of routes or of the engine.
"""

from __future__ import annotations

import math
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from edgeserve.errors import (
    AuthenticationError,
    InvalidRequestError,
    NotFoundError,
    QueueFullError,
    RequestError,
    UnavailableError,
)


class PayloadTooLargeError(InvalidRequestError):
    """The body is larger than this server reads."""

    status = 413
    code = "payload_too_large"


class SlowRequestError(InvalidRequestError):
    """The request did not arrive in time."""

    status = 408
    code = "request_timeout"


class ClientLeftError(InvalidRequestError):
    """The client closed its connection before it had its answer; there is nobody to tell."""

    status = 499
    code = "client_left"


class UnsupportedMediaTypeError(InvalidRequestError):
    """A body that does not say that it is JSON."""

    status = 415
    code = "unsupported_media_type"


class MethodNotAllowedError(InvalidRequestError):
    """The path exists, but not for this method."""

    status = 405
    code = "method_not_allowed"


class CancelledRequestError(RequestError):
    """Somebody cancelled this request by its id."""

    status = 499
    type = "cancelled_error"
    code = "cancelled"


def error_document(error: RequestError) -> dict[str, Any]:
    """The object that OpenAI's clients read; extra numbers stand beside its four fields."""
    body = {"message": str(error), "type": error.type, "param": error.param, "code": error.code}
    return {"error": {**body, **error.extra}}


def error_response(error: RequestError) -> JSONResponse:
    return JSONResponse(error_document(error), status_code=error.status, headers=_headers(error))


def _headers(error: RequestError) -> dict[str, str]:
    if isinstance(error, QueueFullError):
        return {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
    if isinstance(error, UnavailableError):
        return {"Retry-After": "2"}
    if isinstance(error, AuthenticationError):
        return {"WWW-Authenticate": "Bearer"}
    if isinstance(error, CancelledRequestError):
        # OpenAI's clients retry by status class; what was cancelled on purpose must not come back.
        return {"X-Should-Retry": "false"}
    return {}


async def on_request_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestError)
    return error_response(error)


async def on_http_exception(request: Request, error: Exception) -> JSONResponse:
    """The router's own refusals."""
    assert isinstance(error, HTTPException)
    response = error_response(_from_status(request, error))
    response.headers.update(error.headers or {})
    return response


def _from_status(request: Request, error: HTTPException) -> RequestError:
    path, method = request.url.path, request.method
    if error.status_code == 404:
        return NotFoundError(f"There is nothing at {path}.", code="not_found")
    if error.status_code == 405:
        return MethodNotAllowedError(f"{path} does not answer to {method}.")
    other = InvalidRequestError(str(error.detail))
    other.status = error.status_code
    return other


def bug(error: Exception) -> RequestError:
    """A fault of ours: the client learns that much, the log keeps the traceback."""
    message = f"The server failed on this request ({type(error).__name__}). Its log says more."
    return RequestError(message, code="internal_error")


async def on_bug(_: Request, error: Exception) -> JSONResponse:
    return error_response(bug(error))
