"""What was typed after `edgeserve bench` -> one BenchOptions for each scenario, checked before anything runs.

Owns the words: lists of numbers, durations, objectives, request fields. Does not know: flags and help
(settings/bench_flags.py), or where the server comes from.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from edgeserve.bench.engine_rows import EnginePoints
from edgeserve.bench.options import BenchOptions, Scenario
from edgeserve.bench.simulate import Machine
from edgeserve.bench.thresholds import Condition
from edgeserve.bench.workload import Arrivals, Lengths
from edgeserve.errors import UsageError
from edgeserve.metrics import SLO, SLO_PRESETS

Typed = Mapping[str, bool | str | list[str] | None]

DEFAULT_SCENARIOS = "decode,stall,turns"
ALIASES: Mapping[str, Scenario] = {"poisson": Scenario.LOAD}
_DURATION = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*(us|ms|s|m|h)?")
_SECONDS: Mapping[str, float] = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def read_options(typed: Typed, url: str, api_key: str | None, model: str | None) -> tuple[BenchOptions, ...]:
    """One benchmark a scenario, in the order given. Raises UsageError for what cannot be understood."""
    given = {
        field: read(typed[name])
        for name, (field, read) in _READERS.items()
        if typed.get(name) not in (None, [], "")
    }
    for condition in given.get("fail_if", ()):
        Condition.parse(condition)
    return tuple(
        BenchOptions(url, scenario, api_key=api_key, model=model, **given)
        for scenario in scenarios(_text(typed.get("scenario")) or DEFAULT_SCENARIOS)
    )


def read_points(typed: Typed) -> EnginePoints:
    """What --engine measures. Raises UsageError."""
    given = {
        field: read(typed[name])
        for name, (field, read) in _POINT_READERS.items()
        if typed.get(name) not in (None, "")
    }
    return EnginePoints(**given)


def read_simulated(typed: Typed) -> BenchOptions:
    """The workload of a simulation: --rate is an open loop, --users (or nothing) a closed one."""
    if typed.get("rate") and typed.get("users"):
        raise UsageError("--rate and --users are two kinds of load.", "Simulate one after the other.")
    scenario = "load" if typed.get("rate") else "closed"
    given = {**typed, "scenario": scenario, "concurrency": typed.get("users"), "repeats": "1"}
    (options,) = read_options(given, "simulated", None, None)
    return options


def read_machine(typed: Typed) -> Machine:
    """The engine's settings of a simulation."""
    given = {
        field: read(typed[name])
        for name, (field, read) in _MACHINE_READERS.items()
        if typed.get(name) not in (None, "")
    }
    return Machine(**given)


def milliseconds(text: str) -> float:
    """A plain number of milliseconds, from 0 on."""
    value = _number(text)
    if value < 0:
        raise UsageError(f"{text!r} is below 0.")
    return value


def scenarios(text: str) -> list[Scenario]:
    """`decode,stall` in the order given, each once."""
    names = [name.strip().lower() for name in text.split(",") if name.strip()]
    known = {**{scenario.value: scenario for scenario in Scenario}, **ALIASES}
    if unknown := [name for name in names if name not in known]:
        raise UsageError(f"There is no scenario {unknown[0]}.", f"One of: {', '.join(known)}.")
    if not names:
        raise UsageError("No scenario was named.", f"One of: {', '.join(known)}.")
    return list(dict.fromkeys(known[name] for name in names))


def seconds(text: str) -> float:
    """`30`, `500ms`, `2m`."""
    match = _DURATION.fullmatch(text.strip().lower())
    if match is None:
        raise UsageError(f"{text!r} is not a duration.", "Write 30, 500ms, 30s or 2m.")
    return float(match[1]) * _SECONDS[match[2] or "s"]


def objective(text: str) -> SLO:
    """A preset's name, or `ttft=2s,tpot=100ms`."""
    if text in SLO_PRESETS:
        return SLO_PRESETS[text]
    known = {field.name.removesuffix("_s"): field.name for field in fields(SLO)}
    bounds: dict[str, float] = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if not equals or name not in known:
            raise UsageError(
                f"{part.strip()!r} is not a bound.",
                f"Write {', '.join(SLO_PRESETS)}, or bounds such as ttft=2s,tpot=100ms ({', '.join(known)}).",
            )
        bounds[known[name]] = seconds(value)
    return SLO(**bounds)


def _text(value: bool | str | list[str] | None) -> str:
    return value if isinstance(value, str) else ""


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UsageError(f"{text!r} is not a number.")
    return value


def _whole(text: str) -> int:
    try:
        return int(text.replace("_", "").replace(",", ""))
    except ValueError:
        raise UsageError(f"{text!r} is not a whole number.") from None


def _several(read: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    return lambda text: tuple(read(part.strip()) for part in text.split(",") if part.strip())


def _arrivals(text: str) -> Arrivals:
    try:
        return Arrivals(text)
    except ValueError:
        raise UsageError(f"There are no {text} arrivals.", f"One of: {', '.join(Arrivals)}.") from None


def _share(text: str) -> float:
    value = _number(text.rstrip(" %"))
    return value / 100 if text.endswith("%") else value


def _params(texts: Sequence[str]) -> dict[str, object]:
    """`top_k=1`: JSON where it is JSON, otherwise a string."""
    found: dict[str, object] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise UsageError(f"{text!r} is not a request field.", "Write NAME=VALUE, such as top_k=1.")
        try:
            found[name.strip()] = json.loads(value)
        except ValueError:
            found[name.strip()] = value
    return found


_READERS: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "vs": ("against", str),
    "vs_api_key": ("against_api_key", str),
    "prompt": ("prompt", Lengths.parse),
    "output_tokens": ("output", Lengths.parse),
    "shared_prefix": ("shared_prefix_tokens", _whole),
    "streams": ("streams", _several(_whole)),
    "depths": ("depths", _several(_whole)),
    "stall_prompt": ("stall_prompt_tokens", _whole),
    "turns": ("num_turns", _whole),
    "chats": ("num_chats", _whole),
    "ignore_eos": ("ignore_eos", bool),
    "param": ("extra_params", _params),
    "rate": ("rates_per_s", _several(_number)),
    "arrivals": ("arrivals", _arrivals),
    "burstiness": ("burstiness", _number),
    "duration": ("duration_s", seconds),
    "warmup": ("warmup_s", seconds),
    "concurrency": ("concurrency", _several(_whole)),
    "requests": ("num_requests", _whole),
    "trace": ("trace", Path),
    "probe_rate": ("probe_rate_per_s", _number),
    "repeats": ("repeats", _whole),
    "pause": ("pause_s", seconds),
    "timeout": ("timeout_s", seconds),
    "seed": ("seed", _whole),
    "slo": ("slo", objective),
    "attainment": ("attainment_target", _share),
    "fail_if": ("fail_if", tuple),
}
"""Option -> field of BenchOptions, and how its text is read."""

_POINT_READERS: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "npp": ("npp", _several(_whole)),
    "ntg": ("ntg", _several(_whole)),
    "npl": ("npl", _several(_whole)),
    "pps": ("is_shared", bool),
    "repeats": ("repeats", _whole),
    "seed": ("seed", _whole),
}
"""Likewise, for EnginePoints."""

_MACHINE_READERS: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "n_seq_max": ("n_seq_max", _whole),
    "n_ctx": ("n_ctx", _whole),
    "n_batch": ("n_batch", _whole),
    "kv_unified": ("kv_unified", bool),
    "itl_target_ms": ("itl_target_ms", milliseconds),
    "prefill_chunk": ("prefill_chunk", _whole),
    "max_waiting": ("max_waiting", _whole),
    "overhead_ms": ("overhead_s", lambda text: milliseconds(text) / 1e3),
}
"""Likewise, for a simulated Machine."""
