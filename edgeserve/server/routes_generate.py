"""The endpoints that generate: chat, completions, and llama.cpp's native completion.

Owns each one's way from a wire request to engine requests. Errors raised here are the client's answer.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from edgeserve.engine.request import Request
from edgeserve.engine.sampling_params import MAX_SEED, SamplingParams
from edgeserve.reasoning import ReasoningStyle
from edgeserve.server.answer import Identity
from edgeserve.server.body import read_json
from edgeserve.server.chat_answer import ChatAnswer
from edgeserve.server.completion_answer import CompletionAnswer
from edgeserve.server.events import Generation
from edgeserve.server.native_answer import NativeAnswer
from edgeserve.server.protocol import GenerationRequest, check_token_ids
from edgeserve.server.protocol_chat import ChatRequest
from edgeserve.server.protocol_completions import CompletionRequest, NativeCompletionRequest, RawPrompt
from edgeserve.server.respond import Job, respond
from edgeserve.server.security import NAMESPACE_KEY
from edgeserve.server.serving import Serving
from edgeserve.server.state import ServerState


async def chat_completions(http: HttpRequest) -> Response:
    return await respond(http, "chat", _chat)


async def completions(http: HttpRequest) -> Response:
    return await respond(http, "completions", _completions)


async def native_completion(http: HttpRequest) -> Response:
    return await respond(http, "completion", _native_completion)


async def _chat(http: HttpRequest, state: ServerState) -> Job:
    state.check_accepting()
    ask, arrival_s = await read_json(http, ChatRequest, state.config.max_body_bytes, state.limits.body_s)
    ask.check(state.limits)
    # After the arrival: what waking a sleeping model takes is part of the time to the first token.
    serving = await state.accepting()
    sampling = _sampling(ask, state, serving, shows_control_tokens=serving.shows_control_tokens)
    prompt = await asyncio.to_thread(serving.prompts.chat, ask)
    generation_id = f"chatcmpl-{uuid.uuid4().hex}"
    requests = _requests(http, generation_id, [prompt.token_ids], ask.n, sampling, arrival_s, ask)
    generation = Generation(
        generation_id,
        "chat",
        requests,
        style=_style(ask, state, serving),
        generation_prompt=prompt.generation_prompt,
        eog_ids=serving.eog_ids,
    )
    answer = ChatAnswer(ask, generation, _identity(generation_id, serving, arrival_s), serving.token_texts)
    return Job(serving, generation, answer, ask.stream)


async def _completions(http: HttpRequest, state: ServerState) -> Job:
    state.check_accepting()
    ask, arrival_s = await read_json(
        http, CompletionRequest, state.config.max_body_bytes, state.limits.body_s
    )
    ask.check(state.limits)
    serving = await state.accepting()
    sampling = _sampling(ask, state, serving)
    prompts = await asyncio.to_thread(_raw_prompts, serving, ask.prompt)
    generation_id = f"cmpl-{uuid.uuid4().hex}"
    requests = _requests(http, generation_id, prompts, ask.n, sampling, arrival_s, ask)
    generation = Generation(generation_id, "completions", requests, len(prompts), eog_ids=serving.eog_ids)
    identity = _identity(generation_id, serving, arrival_s)
    answer = CompletionAnswer(ask, generation, identity, serving.token_texts, _echoes(ask, serving))
    return Job(serving, generation, answer, ask.stream)


async def _native_completion(http: HttpRequest, state: ServerState) -> Job:
    state.check_accepting()
    ask, arrival_s = await read_json(
        http, NativeCompletionRequest, state.config.max_body_bytes, state.limits.body_s
    )
    ask.check()
    serving = await state.accepting()
    sampling = _sampling(ask, state, serving)
    prompts = await asyncio.to_thread(_raw_prompts, serving, ask.prompt)
    generation_id = f"native-{uuid.uuid4().hex}"
    requests = _requests(http, generation_id, prompts, 1, sampling, arrival_s, ask)
    generation = Generation(generation_id, "completion", requests, eog_ids=serving.eog_ids)
    answer = NativeAnswer(ask, _identity(generation_id, serving, arrival_s), serving.token_texts)
    return Job(serving, generation, answer, ask.stream)


def _sampling(
    ask: GenerationRequest, state: ServerState, serving: Serving, *, shows_control_tokens: bool = False
) -> SamplingParams:
    sampling = ask.sampling(state.config.request_defaults, special_tokens=shows_control_tokens)
    check_token_ids([token for token, _ in sampling.logit_bias], serving.model.n_vocab, "logit_bias")
    return sampling


def _raw_prompts(serving: Serving, prompts: Sequence[RawPrompt]) -> list[tuple[int, ...]]:
    return [serving.prompts.raw(prompt) for prompt in prompts]


def _requests(
    http: HttpRequest,
    generation_id: str,
    prompts: Sequence[tuple[int, ...]],
    n: int,
    sampling: SamplingParams,
    arrival_s: float,
    ask: GenerationRequest,
) -> tuple[Request, ...]:
    num_choices = len(prompts) * n
    urgency = ask.urgency()
    front_end_s = time.perf_counter() - arrival_s
    return tuple(
        Request(
            request_id=generation_id if num_choices == 1 else f"{generation_id}-{index}",
            prompt_token_ids=prompts[index // n],
            sampling=_of_choice(sampling, index % n),
            arrival_s=arrival_s,
            cache_namespace=http.scope[NAMESPACE_KEY],
            cache_prompt=ask.cache_prompt,
            front_end_s=front_end_s,
            urgency=urgency,
        )
        for index in range(num_choices)
    )


def _of_choice(sampling: SamplingParams, index: int) -> SamplingParams:
    """With one seed for all, n choices would be the same text n times."""
    if sampling.seed is None or index == 0:
        return sampling
    return replace(sampling, seed=(sampling.seed + index) % MAX_SEED)


def _style(ask: ChatRequest, state: ServerState, serving: Serving) -> ReasoningStyle | None:
    wanted = state.config.reasoning_format if ask.reasoning_format == "auto" else ask.reasoning_format
    return None if wanted == "none" else serving.style


def _echoes(ask: CompletionRequest, serving: Serving) -> list[str]:
    texts = [_echo(prompt, serving) if ask.echo else "" for prompt in ask.prompt]
    return [text for text in texts for _ in range(ask.n)]


def _echo(prompt: RawPrompt, serving: Serving) -> str:
    if isinstance(prompt, str):
        return prompt
    return serving.model.detokenize(prompt, special=True).decode("utf-8", "replace")


def _identity(generation_id: str, serving: Serving, arrival_s: float) -> Identity:
    return Identity(generation_id, serving.model_id, int(time.time()), serving.facts.fingerprint, arrival_s)
