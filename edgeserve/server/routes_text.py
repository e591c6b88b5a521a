"""The tools around a prompt: tokenize, detokenize, apply-template, counting a chat's input tokens."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from edgeserve.server.body import read_json
from edgeserve.server.prompt import ChatPrompt
from edgeserve.server.protocol import check_token_ids
from edgeserve.server.protocol_chat import ChatRequest
from edgeserve.server.protocol_completions import DetokenizeRequest, TokenizeRequest
from edgeserve.server.serving import Serving
from edgeserve.server.state import state_of


async def tokenize(http: Request) -> Response:
    state = state_of(http)
    serving = await state.awake()
    ask, _ = await read_json(http, TokenizeRequest, state.config.max_body_bytes, state.limits.body_s)
    text = ask.text
    token_ids = await asyncio.to_thread(
        serving.model.tokenize, text, add_special=ask.adds_special, parse_special=ask.parse_special
    )
    tokens = [_with_piece(serving, token) for token in token_ids] if ask.with_pieces else token_ids
    document: dict[str, Any] = {"tokens": tokens}
    if ask.is_vllm:
        document |= {"count": len(token_ids), "max_model_len": serving.engine.config.n_ctx_seq}
    return JSONResponse(document)


def _with_piece(serving: Serving, token_id: int) -> dict[str, Any]:
    """The token's text, or its bytes where they are no text by themselves."""
    raw = serving.model.piece(token_id, special=True)
    try:
        return {"id": token_id, "piece": raw.decode("utf-8")}
    except UnicodeDecodeError:
        return {"id": token_id, "piece": list(raw)}


async def detokenize(http: Request) -> Response:
    state = state_of(http)
    serving = await state.awake()
    ask, _ = await read_json(http, DetokenizeRequest, state.config.max_body_bytes, state.limits.body_s)
    check_token_ids(ask.tokens, serving.model.n_vocab, "tokens")
    raw = await asyncio.to_thread(serving.model.detokenize, ask.tokens, special=True)
    text = raw.decode("utf-8", "replace")
    return JSONResponse({"content": text, "prompt": text})


async def apply_template(http: Request) -> Response:
    return JSONResponse({"prompt": (await _prompt(http)).text})


async def input_tokens(http: Request) -> Response:
    prompt = await _prompt(http)
    return JSONResponse({"object": "response.input_tokens", "input_tokens": len(prompt.token_ids)})


async def _prompt(http: Request) -> ChatPrompt:
    state = state_of(http)
    serving = await state.awake()
    ask, _ = await read_json(http, ChatRequest, state.config.max_body_bytes, state.limits.body_s)
    ask.check_messages(state.limits)
    return await asyncio.to_thread(serving.prompts.chat, ask)
