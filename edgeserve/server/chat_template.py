"""Messages -> prompt text, by the model's own Jinja template.

Owns what a template can do (found out by rendering tiny conversations) and the conversations' bending to it:
system text folded into the first user turn, content as parts, a last turn left open. Does not know tokens;
the rendering itself happens in a process of its own (template_process.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from edgeserve.server.limits import Limits
from edgeserve.server.template_process import TemplateError, TemplateProcess

Messages = Sequence[dict[str, Any]]

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_TOOL = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "probe",
        "parameters": {"type": "object", "properties": {"probe_key": {"type": "string"}}},
    },
}


class Renderer(Protocol):
    def render(
        self, messages: list[dict[str, Any]], variables: dict[str, Any], *, add_generation_prompt: bool
    ) -> str: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class TemplateCaps:
    """What the template makes use of, in llama-server's words."""

    supports_system_role: bool = True
    supports_string_content: bool = True
    supports_typed_content: bool = False
    supports_tools: bool = False
    supports_tool_calls: bool = False
    supports_object_arguments: bool = False
    supports_parallel_tool_calls: bool = False
    supports_preserve_reasoning: bool = False
    supports_reasoning_effort: bool = False
    supports_enable_thinking: bool = False


@dataclass(frozen=True, slots=True)
class Rendered:
    """The prompt, and the part of it that the template adds to make the assistant speak."""

    prompt: str
    generation_prompt: str = ""


class ChatTemplate:
    """One model's template. Methods block (they wait for the rendering process)."""

    def __init__(
        self, source: str, *, bos_token: str = "", eos_token: str = "", limits: Limits | None = None
    ) -> None:
        self.source = source
        self.caps = TemplateCaps()
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._renderer: Renderer = TemplateProcess(source, limits or Limits())

    def close(self) -> None:
        self._renderer.close()

    def probe(self) -> None:
        """Find out `caps`. Raises TemplateError when not even one user message can be rendered."""
        self.caps = probe_caps(self)

    def render(
        self,
        messages: Messages,
        variables: dict[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        return self._renderer.render(
            list(messages), {**self._tokens, **(variables or {})}, add_generation_prompt=add_generation_prompt
        )

    def render_for_answer(self, messages: Messages, variables: dict[str, Any]) -> Rendered:
        """The prompt up to where the answer begins."""
        messages = self.adapt(messages)
        prompt = self.render(messages, variables)
        if "think" not in self.source.lower():
            return Rendered(prompt)
        try:
            closed = self.render(messages, variables, add_generation_prompt=False)
        except TemplateError:
            return Rendered(prompt)
        return Rendered(prompt, prompt[len(closed) :] if prompt.startswith(closed) else "")

    def render_open_ended(self, messages: Messages, variables: dict[str, Any], end_mark: str) -> Rendered:
        """The prompt up to the end of the last message's content, which the answer continues.

        `end_mark` is a character that occurs nowhere else: it shows where the content went, and keeps a
        template from trimming white space before it.
        """
        begun = str(messages[-1]["content"])
        marked = self.adapt([*messages[:-1], {**messages[-1], "content": begun + end_mark}])
        prompt = self.render(marked, variables, add_generation_prompt=False)
        at = prompt.rfind(end_mark)
        if at < 0:
            return Rendered(self.render(self.adapt(messages[:-1]), variables) + begun, begun)
        return Rendered(prompt[:at].replace(end_mark, ""), begun)

    def adapt(self, messages: Messages) -> list[dict[str, Any]]:
        """The same conversation in the form that this template reads."""
        adapted = list(messages)
        if not self.caps.supports_system_role:
            adapted = fold_system(adapted)
        if not self.caps.supports_string_content and self.caps.supports_typed_content:
            adapted = [{**message, "content": _as_parts(message["content"])} for message in adapted]
        return adapted


def _as_parts(content: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": content}]


def fold_system(messages: Messages) -> list[dict[str, Any]]:
    """System text goes before the next user message's own; alone, it becomes a user message."""
    folded: list[dict[str, Any]] = []
    pending = ""
    for message in messages:
        if message["role"] == "system":
            pending += message["content"] + "\n\n"
        elif message["role"] == "user":
            folded.append({**message, "content": pending + message["content"]})
            pending = ""
        else:
            folded.append(message)
    if pending:
        folded.append({"role": "user", "content": pending.rstrip("\n")})
    return folded


def probe_caps(template: ChatTemplate) -> TemplateCaps:
    user: dict[str, Any] = {"role": "user", "content": "probe user"}
    strings, parts = _shows(template, [user], "probe user"), False
    typed: dict[str, Any] = {"role": "user", "content": _as_parts("probe user")}
    if shown := _try(template, [typed]):
        # A template that prints the list itself shows the text too, with its braces.
        parts = "probe user" in shown and "'type'" not in shown and '"type"' not in shown
    if not strings and not parts:
        template.render([user])
    if not strings:
        user = typed
    system = {"role": "system", "content": "probe system" if strings else _as_parts("probe system")}
    return TemplateCaps(
        supports_system_role=_shows(template, [system, user], "probe system"),
        supports_string_content=strings,
        supports_typed_content=parts,
        supports_tools=_shows(template, [user], "probe_key", tools=[_TOOL]),
        supports_tool_calls=_shows_calls(template, user, 1, {"probe_key": "probe value"}),
        supports_object_arguments=_shows_calls(template, user, 1, {"probe_key": "probe value"}),
        supports_parallel_tool_calls=_shows_calls(template, user, 2, {"probe_key": "probe value"}),
        supports_preserve_reasoning=_shows(template, _reasoned(user), "probe thought"),
        supports_reasoning_effort=_shows(template, [user], "probe effort", reasoning_effort="probe effort"),
        supports_enable_thinking=_try(template, [user], enable_thinking=True)
        != _try(template, [user], enable_thinking=False),
    )


def _reasoned(user: dict[str, Any]) -> list[dict[str, Any]]:
    thought = {"role": "assistant", "content": "probe answer", "reasoning_content": "probe thought"}
    return [user, thought, user]


def _shows_calls(template: ChatTemplate, user: dict[str, Any], count: int, arguments: dict[str, str]) -> bool:
    calls = [
        {
            "id": f"call0000{index}",
            "type": "function",
            "function": {"name": f"probe_{index}", "arguments": arguments},
        }
        for index in range(count)
    ]
    shown = _try(template, [user, {"role": "assistant", "content": "", "tool_calls": calls}], end=False) or ""
    return "probe value" in shown and all(f"probe_{index}" in shown for index in range(count))


def _shows(template: ChatTemplate, messages: Messages, needle: str, **variables: Any) -> bool:
    return needle in (_try(template, messages, **variables) or "")


def _try(template: ChatTemplate, messages: Messages, *, end: bool = True, **variables: Any) -> str | None:
    try:
        return template.render(messages, variables, add_generation_prompt=end)
    except TemplateError:
        return None
