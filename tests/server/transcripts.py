"""Golden transcripts: a request as data, and what must come back, event by event.

The files in tests/data/transcripts hold lists of them. In what is expected, "<name>" stands for a value that
differs from run to run: MARKERS says what it must be, and those in BOUND must be the same throughout one
transcript. Tokens are forced by logit_bias, so that the answers are the same on every machine. "<long>" in a
request is a text of more tokens than one request may hold.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

LONG_TEXT = "word " * 9000
FOLDER = Path(__file__).resolve().parent.parent / "data" / "transcripts"


@dataclass(frozen=True)
class Transcript:
    """One request and its answer. `each` is what every event of a stream has beside its own keys."""

    name: str
    rule: str
    request: dict[str, Any]
    status: int = 200
    headers: dict[str, str | None] = field(default_factory=dict)
    body: Any = None
    events: list[Any] | None = None
    each: dict[str, Any] = field(default_factory=dict)

    @property
    def documents(self) -> list[Any]:
        """What must be read from the answer, in order."""
        if self.events is None:
            return [self.body]
        return [event if isinstance(event, str) else {**self.each, **event} for event in self.events]


@dataclass(frozen=True)
class Reply:
    status: int
    headers: httpx2.Headers
    documents: list[Any]


def load(name: str) -> list[Transcript]:
    """The transcripts of one file, by its name without ".json"."""
    return [Transcript(**item) for item in json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))]


def perform(http: httpx2.Client, transcript: Transcript) -> Reply:
    request = transcript.request
    body = request.get("raw")
    headers = dict(request.get("headers", {}))
    if "json" in request:
        body = json.dumps(request["json"]).replace("<long>", LONG_TEXT)
        headers.setdefault("Content-Type", "application/json")
    response = http.request(request["method"], request["path"], content=body, headers=headers)
    kind = response.headers.get("content-type", "")
    if kind.startswith("text/event-stream") and response.content:
        documents = list(sse(response.content))
    elif kind.startswith("application/json") and response.content:
        documents = [response.json()]
    else:
        documents = [response.text or None]
    return Reply(response.status_code, response.headers, documents)


def sse(body: bytes) -> Iterator[Any]:
    """The documents of a stream, "[DONE]" as it stands; the framing must be exact: one line of data and a
    blank one for each, comments aside."""
    *blocks, rest = body.decode("utf-8").split("\n\n")
    assert rest == "", f"the stream ends in mid-event: {rest!r}"
    for block in blocks:
        if block.startswith(":"):
            continue
        assert block.startswith("data: ") and "\n" not in block, f"framing: {block!r}"
        data = block.removeprefix("data: ")
        yield data if data == "[DONE]" else json.loads(data)


# -- comparing ----------------------------------------------------------------------------------------------


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_rate(value: Any) -> bool:
    return value is None or (_is_number(value) and value > 0)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_ms(value: Any) -> bool:
    return _is_number(value) and value >= 0


TIMINGS: dict[str, Callable[[Any], bool]] = {
    "cache_n": _is_count,
    "prompt_n": _is_count,
    "prompt_ms": _is_ms,
    "prompt_per_token_ms": _is_rate,
    "prompt_per_second": _is_rate,
    "predicted_n": _is_count,
    "predicted_ms": _is_ms,
    "predicted_per_token_ms": _is_rate,
    "predicted_per_second": _is_rate,
    "queue_ms": _is_ms,
    "ttft_ms": _is_ms,
    "front_end_ms": _is_ms,
    "restore_ms": _is_ms,
    "decode_ms": _is_ms,
    "stalled_ms": _is_ms,
    "delivery_ms": _is_ms,
    "e2e_ms": _is_ms,
}
PARTS = ("front_end_ms", "queue_ms", "restore_ms", "prompt_ms", "decode_ms", "stalled_ms", "delivery_ms")


MARKERS: dict[str, Callable[[Any], bool]] = {
    "id": _is_text,
    "created": lambda value: type(value) is int and value > 1_600_000_000,
    "model": _is_text,
    "fingerprint": _is_text,
    "text": _is_text,
    "count": _is_count,
    "ms": _is_ms,
    "rate": _is_rate,
    "logprob": lambda value: _is_number(value) and value <= 0,
    "logprobs": lambda value: isinstance(value, dict) and all(map(MARKERS["logprob"], value.values())),
    "dict": lambda value: isinstance(value, dict),
    "bool": lambda value: isinstance(value, bool),
}
BOUND = frozenset({"id", "created", "model", "fingerprint"})


def differences(transcript: Transcript, reply: Reply) -> list[str]:
    """What is not as it must be, each with its place; empty when all is."""
    found: list[str] = []
    if reply.status != transcript.status:
        found.append(f"status: {transcript.status} expected, {reply.status} came")
    for name, value in transcript.headers.items():
        got = reply.headers.get(name)
        if got != value and not (value == "<text>" and got):
            found.append(f"header {name}: {value!r} expected, {got!r} came")
    bound: dict[str, Any] = {}
    expected = transcript.documents
    if len(expected) != len(reply.documents):
        found.append(f"documents: {len(expected)} expected, {len(reply.documents)} came")
    for index, (want, got) in enumerate(zip(expected, reply.documents, strict=False)):
        place = "body" if transcript.events is None else f"event[{index}]"
        found += _compare(want, got, place, bound)
    return found


def _compare(want: Any, got: Any, place: str, bound: dict[str, Any]) -> list[str]:
    if want == "<any>":
        return []
    if want == "<timings>":
        return _compare_timings(got, place)
    if isinstance(want, str) and want.startswith("<") and want.endswith(">") and want[1:-1] in MARKERS:
        return _compare_marker(want[1:-1], got, place, bound)
    if isinstance(want, dict) and isinstance(got, dict):
        return [*_compare_keys(want, got, place), *_compare_items(want, got, place, bound)]
    if isinstance(want, list) and isinstance(got, list) and len(want) == len(got):
        pairs = enumerate(zip(want, got, strict=True))
        return [line for i, (a, b) in pairs for line in _compare(a, b, f"{place}[{i}]", bound)]
    is_same = want == got and isinstance(want, bool) == isinstance(got, bool)
    return [] if is_same else [f"{place}: {want!r} expected, {got!r} came"]


def _compare_marker(name: str, got: Any, place: str, bound: dict[str, Any]) -> list[str]:
    if not MARKERS[name](got):
        return [f"{place}: <{name}> expected, {got!r} came"]
    if name in BOUND and bound.setdefault(name, got) != got:
        return [f"{place}: {bound[name]!r} as before expected, {got!r} came"]
    return []


def _compare_keys(want: dict[str, Any], got: dict[str, Any], place: str) -> list[str]:
    missing = [f"{place}.{key}: missing" for key in want if key not in got]
    return missing + [f"{place}.{key}: not expected ({got[key]!r})" for key in got if key not in want]


def _compare_items(want: dict[str, Any], got: dict[str, Any], place: str, bound: dict[str, Any]) -> list[str]:
    return [
        line
        for key, value in want.items()
        if key in got
        for line in _compare(value, got[key], f"{place}.{key}", bound)
    ]


def _compare_timings(got: Any, place: str) -> list[str]:
    """The right keys with the right kinds of values, and parts that add up."""
    if not isinstance(got, dict):
        return [f"{place}: timings expected, {got!r} came"]
    found = _compare_keys(TIMINGS, got, place)
    found += [
        f"{place}.{key}: {got[key]!r}" for key, holds in TIMINGS.items() if key in got and not holds(got[key])
    ]
    if not found and got["e2e_ms"] and abs(sum(got[part] for part in PARTS) - got["e2e_ms"]) > 1:
        found.append(f"{place}: the parts do not add up to e2e_ms")
    return found
