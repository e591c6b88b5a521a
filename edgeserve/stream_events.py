"""Bytes of a server-sent event stream -> typed events of a chat or completion.

Owns: a tolerant SSE decoder (comments, CR, LF and CRLF, several data lines, events cut anywhere, a last event
without its blank line) and the reading of OpenAI-style chunks, llama-server's extras included.
Does not know: sockets, clocks, or what anybody does with the events.
"""

from __future__ import annotations

import codecs
import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from edgeserve.errors import RequestError

# A line, or an event of lines, that never ends would otherwise fill the memory of whoever reads it.
MAX_LINE_CHARS = 16 * 1024 * 1024
# JSON can name one half of a surrogate pair, which nothing could print, keep or send again.
_HALF_CHARACTER = re.compile("[\ud800-\udfff]")


class RemoteError(RequestError):
    """What a server answered instead of a result, before the stream (HTTP status) or inside it (error event).

    `status` is the HTTP status, or the one named in the error event; `retry_after_s` is None when not given.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 500,
        type: str = "server_error",
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, code=code)
        self.status = status
        self.type = type
        self.retry_after_s = retry_after_s


class StreamBrokenError(RequestError):
    """The connection ended, or sent what is not a stream, before the answer was finished."""

    code = "stream_broken"


class EventKind(StrEnum):
    PING = "ping"  # a comment line: the server is alive
    ROLE = "role"  # the first chunk, without a token
    PROGRESS = "progress"  # prompt tokens done so far
    REASONING = "reasoning"
    TEXT = "text"
    TOOL_CALL = "tool_call"
    FINISH = "finish"
    USAGE = "usage"
    TIMINGS = "timings"
    ERROR = "error"  # the server gave up in mid-stream; nothing follows
    DONE = "done"
    UNKNOWN = "unknown"  # data that is not a chunk; kept as text, never fatal


# The kinds that carry generated tokens.
OUTPUT_KINDS = frozenset({EventKind.REASONING, EventKind.TEXT, EventKind.TOOL_CALL})


@dataclass(frozen=True)
class Usage:
    """Token counts. `cached_tokens` is a part of `prompt_tokens`; None when the server does not say."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


@dataclass(frozen=True)
class Timings:
    """llama-server's account of one answer. `prompt_n` leaves out the `cache_n` tokens found resident."""

    cache_n: int | None
    prompt_n: int
    prompt_ms: float
    predicted_n: int
    predicted_ms: float
    extra: Mapping[str, float]  # every further number, by the server's own name


@dataclass(frozen=True)
class PromptProgress:
    """How far the prompt is. `processed` includes the `cache` tokens that were resident."""

    total: int
    cache: int
    processed: int
    time_ms: float


@dataclass(frozen=True)
class ToolCallDelta:
    index: int
    id: str | None
    name: str | None
    arguments: str


@dataclass(frozen=True)
class StreamEvent:
    """One thing that happened, at `at_s` on the reader's own clock. Only the field of its kind is filled.

    `text` holds the answer's or the reasoning's text, the role, the finish reason or the comment.
    `choice` is the index of the answer when several were asked for.
    """

    kind: EventKind
    at_s: float
    text: str = ""
    choice: int = 0
    usage: Usage | None = None
    timings: Timings | None = None
    progress: PromptProgress | None = None
    tool_calls: tuple[ToolCallDelta, ...] = ()
    error: RemoteError | None = None

    @property
    def is_output(self) -> bool:
        return self.kind in OUTPUT_KINDS


class SSEDecoder:
    """Feed bytes as they come; get the data of each complete event, and comments as None-named pings.

    Yields (is_comment, text). `flush` gives what a stream without a last blank line left behind.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")(errors="replace")
        self._rest: list[str] = []  # pieces of a line that is not complete: joined once, however many
        self._num_rest_chars = 0
        self._data: list[str] = []
        self._num_data_chars = 0

    def feed(self, chunk: bytes) -> Iterator[tuple[bool, str]]:
        text = self._decoder.decode(chunk)
        had_half = bool(text) and "".join(self._rest[-1:]).endswith("\r")
        is_line_over = had_half or "\n" in text or "\r" in text
        self._keep(text)
        for line in self._lines() if is_line_over else ():
            yield from self._line(line)
        if self._num_rest_chars > MAX_LINE_CHARS or self._num_data_chars > MAX_LINE_CHARS:
            raise StreamBrokenError("The server sent a line or an event without an end.")

    def _keep(self, text: str) -> None:
        self._rest.append(text)
        self._num_rest_chars += len(text)

    def _lines(self) -> list[str]:
        text = self._take_rest()
        # A CR at the end may be half of a CRLF: it stays until the next bytes tell.
        held = "\r" if text.endswith("\r") else ""
        lines = text.removesuffix("\r").replace("\r\n", "\n").replace("\r", "\n").split("\n")
        self._keep(lines.pop() + held)
        return lines

    def _take_rest(self) -> str:
        text = "".join(self._rest)
        self._rest, self._num_rest_chars = [], 0
        return text

    def flush(self) -> Iterator[tuple[bool, str]]:
        self._keep(self._decoder.decode(b"", final=True))
        last = self._take_rest().removesuffix("\r")
        yield from self._line(last) if last else ()
        yield from self._line("")

    def _line(self, line: str) -> Iterator[tuple[bool, str]]:
        if not line:
            if self._data:
                data = "\n".join(self._data)
                self._data, self._num_data_chars = [], 0
                yield False, data
            return
        if line.startswith(":"):
            yield True, line[1:].strip()
            return
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "error":
            # Older llama-server builds name the field `error` instead of sending an error object as data.
            field, value = "data", f'{{"error": {value}}}'
        if field == "data":
            self._data.append(value)
            self._num_data_chars += len(value) + 1


def read_event(data: str, at_s: float) -> Iterator[StreamEvent]:
    """The events that one SSE `data` stands for, in the order in which they count."""
    if data.strip() == "[DONE]":
        yield StreamEvent(EventKind.DONE, at_s)
        return
    try:
        chunk = json.loads(data)
    except (ValueError, RecursionError):
        chunk = None
    if not isinstance(chunk, dict):
        yield StreamEvent(EventKind.UNKNOWN, at_s, text=data)
    elif chunk.get("error"):
        yield StreamEvent(EventKind.ERROR, at_s, error=read_error(chunk))
    else:
        yield from _read_chunk(chunk, at_s)


def _read_chunk(chunk: Mapping[str, Any], at_s: float) -> Iterator[StreamEvent]:
    if (progress := read_progress(chunk.get("prompt_progress"))) is not None:
        yield StreamEvent(EventKind.PROGRESS, at_s, progress=progress)
    for choice in _list(chunk.get("choices")):
        yield from _read_choice(choice, at_s)
    if (usage := read_usage(chunk.get("usage"))) is not None:
        yield StreamEvent(EventKind.USAGE, at_s, usage=usage)
    if (timings := read_timings(chunk.get("timings"))) is not None:
        yield StreamEvent(EventKind.TIMINGS, at_s, timings=timings)


def _read_choice(choice: Mapping[str, Any], at_s: float) -> Iterator[StreamEvent]:
    index = _int(choice.get("index"))
    delta = choice.get("delta")
    delta = delta if isinstance(delta, dict) else {}
    reasoning = _text(delta.get("reasoning_content")) or _text(delta.get("reasoning"))
    text = _text(delta.get("content")) or _text(choice.get("text"))
    calls = tuple(_read_tool_call(call) for call in _list(delta.get("tool_calls")))
    if role := _text(delta.get("role")):
        yield StreamEvent(EventKind.ROLE, at_s, text=role, choice=index)
    if reasoning:
        yield StreamEvent(EventKind.REASONING, at_s, text=reasoning, choice=index)
    if text:
        yield StreamEvent(EventKind.TEXT, at_s, text=text, choice=index)
    if calls:
        yield StreamEvent(EventKind.TOOL_CALL, at_s, tool_calls=calls, choice=index)
    if finish := _text(choice.get("finish_reason")):
        yield StreamEvent(EventKind.FINISH, at_s, text=finish, choice=index)


def _read_tool_call(call: Mapping[str, Any]) -> ToolCallDelta:
    function = call.get("function")
    function = function if isinstance(function, dict) else {}
    return ToolCallDelta(
        index=_int(call.get("index")),
        id=_text(call.get("id")) or None,
        name=_text(function.get("name")) or None,
        arguments=_text(function.get("arguments")),
    )


def read_usage(value: object) -> Usage | None:
    """A `usage` object, or None for anything else (null in the chunks before the last)."""
    if not isinstance(value, dict) or "completion_tokens" not in value:
        return None
    prompt_details = value.get("prompt_tokens_details")
    completion_details = value.get("completion_tokens_details")
    return Usage(
        prompt_tokens=_int(value.get("prompt_tokens")),
        completion_tokens=_int(value.get("completion_tokens")),
        cached_tokens=_optional_int(prompt_details, "cached_tokens"),
        reasoning_tokens=_optional_int(completion_details, "reasoning_tokens"),
    )


_TIMING_FIELDS = ("cache_n", "prompt_n", "prompt_ms", "predicted_n", "predicted_ms")


def read_timings(value: object) -> Timings | None:
    """llama-server's `timings` object, or None where a server has none."""
    if not isinstance(value, dict) or "predicted_n" not in value:
        return None
    return Timings(
        cache_n=_optional_int(value, "cache_n"),
        prompt_n=_int(value.get("prompt_n")),
        prompt_ms=_float(value.get("prompt_ms")),
        predicted_n=_int(value.get("predicted_n")),
        predicted_ms=_float(value.get("predicted_ms")),
        extra={
            name: number
            for name, each in value.items()
            if name not in _TIMING_FIELDS and (number := _optional_float(each)) is not None
        },
    )


def read_progress(value: object) -> PromptProgress | None:
    if not isinstance(value, dict) or "total" not in value:
        return None
    return PromptProgress(
        total=_int(value.get("total")),
        cache=_int(value.get("cache")),
        processed=_int(value.get("processed")),
        time_ms=_float(value.get("time_ms")),
    )


def read_error(body: object, status: int = 500, retry_after_s: float | None = None) -> RemoteError:
    """An error object in any of the shapes in use: {"error": {...}}, {"error": "..."}, {"detail": ...}."""
    content = body if isinstance(body, dict) else {}
    error = content.get("error") or content.get("detail") or content.get("message") or body
    if not isinstance(error, dict):
        return RemoteError(str(error) or f"HTTP {status}", status=status, retry_after_s=retry_after_s)
    code = error.get("code")
    return RemoteError(
        _text(error.get("message")) or f"HTTP {status}",
        # llama-server puts the HTTP status into `code` of an error event.
        status=code if isinstance(code, int) and 400 <= code <= 599 else status,
        type=_text(error.get("type")) or "server_error",
        code=str(code) if code is not None else None,
        retry_after_s=retry_after_s,
    )


def _list(value: object) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _text(value: object) -> str:
    if not isinstance(value, str):
        return ""
    return value if value.isascii() else _HALF_CHARACTER.sub("\ufffd", value)


def _float(value: object) -> float:
    number = _optional_float(value)
    return 0.0 if number is None else number


def _optional_float(value: object) -> float | None:
    """None for what is no number, among it what Python's JSON knows as NaN and Infinity."""
    with suppress(OverflowError):  # a whole number of hundreds of digits
        if isinstance(value, int | float) and math.isfinite(number := float(value)):
            return number
    return None


def _int(value: object) -> int:
    return int(_float(value))


def _optional_int(value: object, key: str) -> int | None:
    number = _optional_float(value.get(key)) if isinstance(value, dict) else None
    return None if number is None else int(number)
