"""The process that renders chat templates: started as a script, one JSON line in, one JSON line out.

A template comes out of a model file that nobody has read, and is a program: it may loop for ever, build
gigabytes or look for a way out. So it runs in Jinja's immutable sandbox, and the sandbox in a process of
its own that has little memory, holds nothing worth stealing and can be killed. Jinja alone cannot be
bounded from inside: one expression may take all memory, or hold the interpreter for minutes.

This file imports nothing of the package, so that the process stays small. Protocol:
    {"source", "max_chars", "max_memory_bytes", "max_s"}    -> {"ok": true} | {"error"}
    {"messages", "variables", "add_generation_prompt"}      -> {"prompt"} | {"raised"} | {"error"}
"raised" is what the template says itself about the conversation; "error" is a fault of the template.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from datetime import date, datetime
from typing import Any

from jinja2 import Environment, Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_INT_BITS = 256


class RefusedByTemplateError(Exception):
    """raise_exception was called: the conversation is not one that the template accepts."""


class GenerationTag(Extension):
    """{% generation %} marks the assistant's words for training; here it only passes its body through."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Refuses the operators that make much from little, before they run."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self, max_chars: int) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationTag]
        )
        self.max_chars = max_chars
        self.filters["tojson"] = to_json
        self.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            self._check_product(left, right)
        elif operator == "**" and not (abs(left) <= 2**16 and 0 <= right <= 16):
            raise TemplateError("a power is too large")
        return super().call_binop(context, operator, left, right)

    def _check_product(self, left: Any, right: Any) -> None:
        for value, times in ((left, right), (right, left)):
            if (
                isinstance(value, str | list | tuple)
                and isinstance(times, int)
                and len(value) * times > self.max_chars
            ):
                raise TemplateError("a repetition is too long")
        are_ints = isinstance(left, int) and isinstance(right, int)
        if are_ints and left.bit_length() + right.bit_length() > MAX_INT_BITS:
            raise TemplateError("a product is too large")


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON, as templates are written against: Jinja's own filter escapes for HTML and sorts keys."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def raise_exception(message: object) -> None:
    raise RefusedByTemplateError(str(message)[:500])


def strftime_now(pattern: str) -> str:
    """Today at midnight: a prompt that changes with the minute would never find its own prefix again."""
    return datetime.combine(date.today(), datetime.min.time()).strftime(pattern)


def limit_process(max_memory_bytes: int) -> None:
    """Bound the address space where the system can, and leave Ctrl-C to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (max_memory_bytes, max_memory_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def render(template: Template, job: dict[str, Any], max_chars: int) -> str:
    """The text, given up as soon as it grows past its bound."""
    pieces, size = [], 0
    variables = {"tools": None, "documents": None, **job["variables"]}
    for piece in template.generate(
        messages=job["messages"], add_generation_prompt=job["add_generation_prompt"], **variables
    ):
        size += len(piece)
        if size > max_chars:
            raise TemplateError(f"the prompt is longer than {max_chars} characters")
        pieces.append(piece)
    return "".join(pieces)


def guarded(max_s: float, work: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """The outcome of `work` as an answer. The alarm ends a loop whose parent is no longer there to do so."""
    if sys.platform != "win32":
        signal.alarm(int(max_s) + 5)
    try:
        return work(*args)
    except RefusedByTemplateError as error:
        return {"raised": str(error)}
    except MemoryError:
        return {"error": "it wants too much memory"}
    except RecursionError:
        return {"error": "it nests or recurses too deeply"}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:500]}


def answer(document: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


def main() -> None:
    set_up = json.loads(sys.stdin.readline())
    max_chars, max_s = int(set_up["max_chars"]), float(set_up["max_s"])
    limit_process(int(set_up["max_memory_bytes"]))
    compiled: list[Template] = []

    def compile_it() -> dict[str, Any]:
        compiled.append(BoundedEnvironment(max_chars).from_string(set_up["source"]))
        return {"ok": True}

    def render_it(job: dict[str, Any]) -> dict[str, Any]:
        return {"prompt": render(compiled[0], job, max_chars)}

    answer(guarded(max_s, compile_it))
    for line in sys.stdin:
        answer(guarded(max_s, render_it, json.loads(line)))
        if sys.platform != "win32":
            signal.alarm(0)


if __name__ == "__main__":
    main()
