"""Chat messages and options as they arrive on /v1/chat/completions.

Owns the request side: which messages are well formed, content parts flattened to text, prefill of the
assistant's turn. The answer's side is chat_answer.py; templates are chat_template.py's.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from edgeserve.errors import InvalidRequestError
from edgeserve.server.limits import Limits
from edgeserve.server.protocol import Int, OpenAIRequest, Wire, unsupported

_TEXT_PARTS = {"text", "input_text", "output_text"}
_MEDIA_PARTS = {
    "image_url",
    "input_image",
    "image",
    "input_audio",
    "audio_url",
    "video_url",
    "file",
    "input_file",
}

# A template's variables that are the server's to set.
_OWN_VARIABLES = {"messages", "add_generation_prompt", "bos_token", "eos_token", "tools", "documents"}


def _flatten(content: object) -> object:
    """Parts to one string, a line each. Nothing is ever fetched: a part that is not text is refused."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError("must be a string or a list of parts")
    return "\n".join(_part_text(part) for part in content)


def _part_text(part: object) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        raise ValueError("each part must be an object with a type")
    if kind in _MEDIA_PARTS:
        raise ValueError(f"this model reads text only; a part of type {kind} cannot be used")
    text = part.get("refusal" if kind == "refusal" else "text")
    if kind not in _TEXT_PARTS | {"refusal"}:
        raise ValueError(f"parts of type {kind[:40]!r} are not known; use text")
    if not isinstance(text, str):
        raise ValueError(f"a part of type {kind} must have a text")
    return text


Content = Annotated[str, BeforeValidator(_flatten)]


class FunctionCall(Wire):
    name: str
    arguments: str | dict[str, Any] = "{}"


class ToolCall(Wire):
    id: str = ""
    type: str = "function"
    function: FunctionCall


class ChatMessage(Wire):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content | None = None
    reasoning_content: str | None = None
    name: str | None = None
    tool_calls: list[ToolCall] = Field(default_factory=list)
    tool_call_id: str | None = None

    def for_template(self) -> dict[str, Any]:
        """The dict that chat templates expect: roles they know, arguments as an object."""
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.content or "",
        }
        for name in ("reasoning_content", "name", "tool_call_id"):
            if (value := getattr(self, name)) is not None:
                message[name] = value
        if self.tool_calls:
            message["tool_calls"] = [_call_for_template(call) for call in self.tool_calls]
        return message


def _call_for_template(call: ToolCall) -> dict[str, Any]:
    arguments = call.function.arguments
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            arguments = {"arguments": arguments}
    return {
        "id": call.id,
        "type": call.type,
        "function": {"name": call.function.name, "arguments": arguments},
    }


class ChatRequest(OpenAIRequest):
    messages: list[ChatMessage]
    max_completion_tokens: Int | None = None
    logprobs: bool = False
    top_logprobs: Int | None = None
    tools: list[dict[str, Any]] = Field(default_factory=list)
    functions: list[dict[str, Any]] = Field(default_factory=list)
    tool_choice: str | dict[str, Any] = "auto"
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    reasoning_effort: str | None = None
    reasoning_format: Literal["auto", "deepseek", "none"] = "auto"
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None

    def max_output_tokens(self) -> int | None:
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise InvalidRequestError(
                f"max_tokens ({old}) and max_completion_tokens ({new}) differ.",
                "They mean the same; send one.",
                param="max_completion_tokens",
            )
        return old if new is None else new

    def logprobs_wanted(self) -> int | None:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs: true.", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self, limits: Limits) -> None:
        """What the types cannot say. Raises InvalidRequestError."""
        self.check_n(limits.max_n)
        self.check_messages(limits)

    def check_messages(self, limits: Limits) -> None:
        if not self.messages:
            raise InvalidRequestError("messages is empty.", param="messages")
        if len(self.messages) > limits.max_messages:
            raise InvalidRequestError(
                f"There are {len(self.messages)} messages; at most {limits.max_messages} are allowed.",
                param="messages",
            )
        for index, message in enumerate(self.messages):
            if message.content is None and message.role != "assistant":
                param = f"messages[{index}].content"
                raise InvalidRequestError(f"{param} is missing.", param=param)
        if (self.tools or self.functions) and self.tool_choice != "none":
            raise unsupported("tools")

    @property
    def continues_last(self) -> bool:
        """Whether the last message is an answer begun, to be continued word for word."""
        wanted, last = self.continue_final_message, self.messages[-1]
        if wanted and last.role != "assistant":
            raise InvalidRequestError(
                "continue_final_message needs a last message of role assistant.",
                param="continue_final_message",
            )
        if wanted and self.add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt exclude each other.",
                param="continue_final_message",
            )
        if last.role != "assistant" or last.tool_calls:
            return False
        return not self.add_generation_prompt if wanted is None else wanted

    def template_variables(self) -> dict[str, Any]:
        variables = {k: v for k, v in self.chat_template_kwargs.items() if k not in _OWN_VARIABLES}
        if self.reasoning_effort is not None:
            variables.setdefault("reasoning_effort", self.reasoning_effort)
        return variables
