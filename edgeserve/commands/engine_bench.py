"""`edgeserve bench --engine`: the model on this machine without scheduler, sampling and HTTP.

Owns the points that are asked for and where the rows go. `python -m edgeserve.commands.engine_bench` is the
child that measures: a crash of the library ends it, not the command.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgeserve.bench import engine_rows, environment
from edgeserve.bench.engine_rows import EnginePoints
from edgeserve.bench.session import ProgressLine
from edgeserve.commands.child import Child, answer_parent
from edgeserve.commands.child_server import ServeCommand, settings_of
from edgeserve.commands.model_file import find
from edgeserve.errors import UsageError

if TYPE_CHECKING:
    from edgeserve.commands.engine_start import Loaded
    from edgeserve.config import EngineConfig
    from edgeserve.engine.batched_bench import Point
    from edgeserve.settings.sources import Settings

EXIT_INTERRUPTED = 130

Tell = Callable[[Mapping[str, Any]], None]


def run(command: ServeCommand, points: EnginePoints, out: Path | None, *, as_json: bool) -> int:
    """The exit code. Rows measured before a Ctrl-C are shown, and the code is 130."""
    find(settings_of(command.request()))
    progress = ProgressLine(sys.stderr, dict(os.environ))
    timings: list[Mapping[str, Any]] = []
    facts: dict[str, Any] = {}
    notes: list[str] = []
    is_interrupted = False
    try:
        for answer in _answers(command, points, progress):
            timings += [answer["timing"]] if "timing" in answer else []
            facts |= answer.get("facts", {})
            notes += answer.get("notes", [])
    except KeyboardInterrupt:
        is_interrupted = True
    finally:
        progress.clear()
    rows = engine_rows.rows_of(timings)
    facts |= {"command": environment.command_line(sys.argv), "client": environment.machine()}
    document = engine_rows.json_report(rows, facts, notes, is_partial=is_interrupted)
    if out is not None:
        _write(document, out / "engine.json")
    print(
        json.dumps(document, indent=1, ensure_ascii=False)
        if as_json
        else engine_rows.text_report(rows, facts, notes).rstrip("\n")
    )
    return EXIT_INTERRUPTED if is_interrupted else 0


def _answers(
    command: ServeCommand, points: EnginePoints, progress: ProgressLine
) -> Iterator[Mapping[str, Any]]:
    request = command.request(points=asdict(points))
    module = "edgeserve.commands.engine_bench"
    progress("loading")
    with Child(module, request, is_verbose=command.is_verbose) as child:
        for answer in child.answers():
            progress(answer.get("progress", ""))
            yield answer


def _write(document: Mapping[str, Any], path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error}.") from error
    print(path, file=sys.stderr)


# --- the child ---------------------------------------------------------------------------------------------


def measure(request: Mapping[str, Any], tell: Tell) -> None:
    """Load, make one context for all points, and tell each run as it ends."""
    from edgeserve.commands.engine_start import load_model
    from edgeserve.engine.batched_bench import BatchedBench, Point
    from edgeserve.engine.resolve import resolve
    from edgeserve.llama_context import Context

    wanted = EnginePoints(**{name: _tuple(value) for name, value in request["points"].items()})
    settings = settings_of(request)
    loaded = load_model(settings, find(settings), lambda fraction: None)
    config = resolve(_with_room(loaded.config, settings, wanted), loaded.model)
    context = Context(loaded.model, config)
    room = (context.n_ctx, context.n_ctx_seq, config.n_seq_max)
    asked = [Point(*lengths, wanted.is_shared) for lengths in product(wanted.npp, wanted.ntg, wanted.npl)]
    points = [point for point in asked if point.fits(*room)]
    left_out = [_does_not_fit(point, *room) for point in asked if not point.fits(*room)]
    facts = _facts(config, loaded) | {"n_ctx": context.n_ctx, "is_pp_shared": wanted.is_shared}
    tell({"facts": facts, "notes": [*loaded.notes, *left_out], "progress": "warming up"})
    bench = BatchedBench(context, config.n_batch, wanted.seed)
    bench.warm_up()
    for number, timing in enumerate(bench.rows(points, wanted.repeats), start=1):
        progress = f"{number} of {len(points) * wanted.repeats} runs done"
        tell({"timing": asdict(timing), "progress": progress})
    context.close()


def _with_room(config: EngineConfig, settings: Settings, wanted: EnginePoints) -> EngineConfig:
    """What was not asked for is as large as the points need."""
    if not settings.is_given("n_seq_max"):
        config = replace(config, n_seq_max=max(wanted.npl))
    if not settings.is_given("n_ctx"):
        config = replace(config, n_ctx=config.n_seq_max * (max(wanted.npp) + max(wanted.ntg)))
    return config


def _does_not_fit(point: Point, n_ctx: int, n_ctx_seq: int, n_seq_max: int) -> str:
    return (
        f"PP {point.pp}, TG {point.tg}, B {point.pl} was left out: the context has {n_ctx:,} tokens, "
        f"{n_ctx_seq:,} for each of {n_seq_max} sequences."
    )


def _facts(config: EngineConfig, loaded: Loaded) -> dict[str, Any]:
    path = Path(loaded.model.path)
    return {
        "model": path.name,
        "model_file": environment.model_file(path),
        "offloaded_layers": loaded.offload.num_layers,
        **{name: value for name, value in asdict(config).items() if name in _SHOWN},
    }


_SHOWN = (
    "n_batch", "n_ubatch", "n_seq_max", "n_gpu_layers", "n_threads", "n_threads_batch", "flash_attn",
    "type_k", "type_v", "kv_unified", "use_extra_bufts",
)  # fmt: skip


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


if __name__ == "__main__":
    raise SystemExit(answer_parent(measure))
