"""A request's body as checked JSON, and JSON as one of the wire models.

Owns the bounds on what is read (size, time, nesting, numbers) and the wording of what is wrong with a field.
Does not know what the fields mean.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from edgeserve.errors import InvalidRequestError
from edgeserve.server.http_errors import (
    ClientLeftError,
    PayloadTooLargeError,
    SlowRequestError,
    UnsupportedMediaTypeError,
)
from edgeserve.server.http_protocol import RECEIVED_KEY

Model = TypeVar("Model", bound=BaseModel)

# Above this, parsing is long enough for other connections to notice.
MAX_INLINE_PARSE_BYTES = 256 << 10


async def read_json(
    request: Request, model: type[Model], max_bytes: int, max_s: float
) -> tuple[Model, float]:
    """The checked body, and the instant (time.perf_counter) when the request's last byte was received.

    Raises a RequestError that names what is wrong.
    """
    raw = await read_body(request, max_bytes, max_s)
    arrival_s: float = request.scope.get("state", {}).get(RECEIVED_KEY) or time.perf_counter()
    check_content_type(request, has_body=bool(raw))
    if len(raw) <= MAX_INLINE_PARSE_BYTES:
        return parse(raw, model), arrival_s
    return await asyncio.to_thread(parse, raw, model), arrival_s


async def read_body(request: Request, max_bytes: int, max_s: float) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    try:
        async with asyncio.timeout(max_s):
            return await _collect(request, max_bytes)
    except TimeoutError:
        raise SlowRequestError(f"The body did not arrive within {max_s:g} s.") from None


async def _collect(request: Request, max_bytes: int) -> bytes:
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > max_bytes:
                raise _too_large(max_bytes)
    except ClientDisconnect:
        raise ClientLeftError("The connection closed in the middle of the body.") from None
    return bytes(body)


def _too_large(max_bytes: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(
        f"The body is larger than {max_bytes} bytes.", "Send less, or start with more."
    )


def check_content_type(request: Request, *, has_body: bool) -> None:
    """A page on another site can send form types without asking the browser's leave, but not JSON."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    is_json = kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))
    if not is_json and (has_body or kind):
        raise UnsupportedMediaTypeError(
            f"The body's content type is {kind or 'missing'}.", "Send Content-Type: application/json."
        )


def parse(raw: bytes, model: type[Model]) -> Model:
    try:
        document = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequestError(f"The body is not valid JSON: {error}.", code="invalid_json") from None
    if not isinstance(document, dict):
        raise InvalidRequestError("The body must be a JSON object.", code="invalid_json")
    return validate(document, model)


def validate(document: dict[str, Any], model: type[Model]) -> Model:
    try:
        return model.model_validate(document)
    except ValidationError as error:
        raise _explain(error) from None


def _explain(error: ValidationError) -> InvalidRequestError:
    first = error.errors(include_url=False, include_input=False)[0]
    path = _path(first["loc"])
    if first["type"] == "missing":
        return InvalidRequestError(f"{path} is missing.", param=path)
    message = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return InvalidRequestError(
        f"{path}: {message}.".replace("..", ".") if path else message, param=path or None
    )


def _path(location: tuple[int | str, ...]) -> str:
    """("messages", 0, "content") -> messages[0].content"""
    text = ""
    for step in location:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text
