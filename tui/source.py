"""The feed of a server over HTTP: facts, then snapshots for as long as it lives, then another try.

    async for update in watch("http://127.0.0.1:8080"):     # Link | ServerFacts | Snapshot

edgeserve streams a snapshot after each step (`/events`); any other server is asked every `POLL_S` seconds.
Owns connecting, telling the kinds of server apart, and reconnecting. Ends only when it is closed.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from edgeserve.client import Client
from edgeserve.errors import RequestError, ServerUnreachableError
from edgeserve.stream_events import RemoteError
from tui import llama_server
from tui.snapshot import Link, LinkState, ServerFacts, ServerKind, Snapshot, read_snapshot

POLL_S = 0.5
GULP_S, WAITED_S = 0.1, 0.002
FIRST_RETRY_S, LAST_RETRY_S = 0.5, 4.0
SILENCE_S = 20.0
"""edgeserve sends a comment every few seconds: a stream silent for longer is dead."""

# No such route, switched off, or (the client's own word) no JSON.
_ABSENT = (404, 405, 501, 502)
_STRANGE = "Something answers there, but not as a server for language models does."

Update = Link | ServerFacts | Snapshot


async def watch(url: str, api_key: str | None = None) -> AsyncGenerator[Update, None]:
    """Everything that can be seen of the server at `url`, for ever: through failures and restarts."""
    retry_s = FIRST_RETRY_S
    yield Link(LinkState.LOOKING)
    while True:
        try:
            async with (
                Client(url, api_key, read_timeout_s=SILENCE_S) as client,
                aclosing(_attached(client)) as updates,
            ):
                async for update in updates:
                    if isinstance(update, Snapshot):
                        retry_s = FIRST_RETRY_S
                    yield update
            failure = Link(LinkState.LOST, "The server ended the stream.")
        except (RequestError, ServerUnreachableError) as error:
            failure = _failure(error)
        except (KeyError, TypeError, ValueError):
            failure = Link(LinkState.REFUSED, _STRANGE)
        yield replace(failure, retry_s=retry_s)
        await asyncio.sleep(retry_s)
        retry_s = min(2 * retry_s, LAST_RETRY_S)


def _failure(error: RequestError | ServerUnreachableError) -> Link:
    if isinstance(error, RemoteError) and error.status == 401:
        return Link(LinkState.REFUSED, "The server asks for an API key: start with --api-key.")
    if isinstance(error, RemoteError) and error.status == 403:
        return Link(LinkState.REFUSED, str(error))
    if isinstance(error, RemoteError) and error.status == 503:
        return Link(LinkState.LOADING, error.message)
    if isinstance(error, RemoteError) and error.status in _ABSENT:
        return Link(LinkState.REFUSED, _STRANGE)
    return Link(LinkState.LOST, error.message)


async def _attached(client: Client) -> AsyncGenerator[Update, None]:
    props = await _optional(client, "/props") or {}
    meta = await _model_meta(client)
    if not meta[0] and "total_slots" not in props:
        raise ValueError("no model, and no slots")
    if isinstance(props.get("engine"), dict):
        facts = _edgeserve_facts(client.root, props, meta)
        async with aclosing(_stream(client, facts)) as updates:
            async for update in updates:
                yield update
        return
    async with aclosing(_poll(client, _polled_facts(client.root, props, meta))) as updates:
        async for update in updates:
            yield update


async def _optional(client: Client, path: str) -> Mapping[str, Any] | None:
    """A JSON object, or None where the server has no such route. Other errors are raised."""
    try:
        answer = await client.get_json(path)
    except RemoteError as error:
        if error.status in _ABSENT:
            return None
        raise
    return answer if isinstance(answer, dict) else None


async def _model_meta(client: Client) -> tuple[str, Mapping[str, Any]]:
    models = await client.models()
    return (models[0].id, models[0].meta) if models else ("", {})


def _edgeserve_facts(url: str, props: Mapping[str, Any], meta: tuple[str, Mapping[str, Any]]) -> ServerFacts:
    engine = props["engine"]
    return ServerFacts(
        url=url,
        kind=ServerKind.EDGESERVE,
        model=meta[0],
        description=str(meta[1].get("description", "")),
        model_path=str(props.get("model_path", "")),
        n_ctx=engine["n_ctx"],
        n_ctx_seq=engine["n_ctx_seq"],
        n_ctx_train=meta[1].get("n_ctx_train"),
        num_slots=engine["n_seq_max"],
        engine=engine,
        itl_target_ms=engine.get("itl_target_ms"),
        request_defaults=_defaults(props),
        build=str(props.get("build_info", "")),
    )


def _polled_facts(url: str, props: Mapping[str, Any], meta: tuple[str, Mapping[str, Any]]) -> ServerFacts:
    defaults = props.get("default_generation_settings")
    n_ctx_seq = defaults.get("n_ctx") if isinstance(defaults, dict) else None
    num_slots = props.get("total_slots")
    return ServerFacts(
        url=url,
        kind=ServerKind.LLAMA_SERVER if num_slots is not None else ServerKind.OTHER,
        model=_short_name(meta[0]),
        model_path=str(props.get("model_path", "")),
        n_ctx_seq=n_ctx_seq or meta[1].get("n_ctx"),
        n_ctx_train=meta[1].get("n_ctx_train"),
        num_slots=num_slots,
        request_defaults=_defaults(props),
        build=str(props.get("build_info", "")),
    )


def _short_name(model: str) -> str:
    """Without the folder, where llama-server gives its file as the name."""
    is_path = model.startswith("/") or model[1:3] == ":\\"
    return re.split(r"[/\\]", model)[-1] if is_path else model


def _defaults(props: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a request gets that names no sampling settings."""
    settings = props.get("default_generation_settings")
    params = settings.get("params") if isinstance(settings, dict) else None
    return params if isinstance(params, dict) else {}


async def _stream(client: Client, facts: ServerFacts) -> AsyncGenerator[Update, None]:
    yield facts
    yield Link(LinkState.LIVE)
    async with aclosing(client.get_events("/events")) as documents:
        asked_s = time.monotonic()
        async for document in documents:
            now_s = time.monotonic()
            yield read_snapshot(json.loads(document), now_s)
            if now_s - asked_s > WAITED_S:
                # Everything is read. The next steps gather meanwhile: reading them in gulps costs a fraction
                # of reading each as it comes, and none grows older than this.
                await asyncio.sleep(GULP_S)
            asked_s = time.monotonic()


async def _poll(client: Client, facts: ServerFacts) -> AsyncGenerator[Update, None]:
    slots, metrics = await _slots(client), await _metrics(client)
    unknown = [llama_server.NO_STEPS, llama_server.NO_QUEUE, llama_server.NO_CELLS]
    unknown += [llama_server.NO_SLOTS] if slots is None else []
    unknown += [llama_server.NO_METRICS] if metrics is None else []
    yield replace(facts, unknown=tuple(unknown))
    yield Link(LinkState.LIVE)
    has_slots, has_metrics = slots is not None, metrics is not None
    while True:
        yield llama_server.read_poll(slots, metrics, time.monotonic())
        await asyncio.sleep(POLL_S)
        slots = await _slots(client) if has_slots else None
        metrics = await _metrics(client) if has_metrics else None
        if not has_slots and not has_metrics:
            await client.health()  # the only sign of life there is


async def _slots(client: Client) -> list[Mapping[str, Any]] | None:
    try:
        answer = await client.get_json("/slots")
    except RemoteError as error:
        if error.status in _ABSENT:
            return None
        raise
    return [slot for slot in answer if isinstance(slot, dict)] if isinstance(answer, list) else None


async def _metrics(client: Client) -> dict[str, float] | None:
    try:
        return llama_server.read_metrics(await client.get_text("/metrics"))
    except RemoteError as error:
        if error.status in _ABSENT:
            return None
        raise
