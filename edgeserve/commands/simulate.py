"""`edgeserve simulate`: what a machine would do with N users, without the model.

Owns where the cost of a step is taken from: measured rows, a device's profile, or figures as typed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from edgeserve import models
from edgeserve.bench import read_options, report, step_model
from edgeserve.bench.results import summary_json
from edgeserve.bench.simulated_result import simulate
from edgeserve.bench.step_model import StepModel
from edgeserve.commands.progress import ProgressLine
from edgeserve.errors import UsageError
from edgeserve.gguf import read_header
from edgeserve.model_list import read_models_list
from edgeserve.planner.device_search import find_profile
from edgeserve.planner.model_work import model_work
from edgeserve.planner.speed import Interval, predict
from edgeserve.planner.speed_terms import SpeedSettings
from edgeserve.planner.target import described_target

Typed = Mapping[str, bool | str | list[str] | None]


def run(reference: str | None, typed: Typed, *, as_json: bool) -> int:
    """The exit code. Raises UsageError for what cannot be simulated."""
    options, machine = read_options.read_simulated(typed), read_options.read_machine(typed)
    model = _step_model(reference, typed)
    result = simulate(options, machine, model, sys.argv)
    if out := typed.get("out"):
        for path in report.write_files(result, Path(str(out))):
            print(path, file=sys.stderr)
    if as_json:
        print(json.dumps(summary_json(result), indent=1, ensure_ascii=False))
    else:
        print(report.text_report(result), end="")
    return 0


def _step_model(reference: str | None, typed: Typed) -> StepModel:
    rows, device, decode_ms = typed.get("rows"), typed.get("device"), typed.get("decode_ms")
    given = [
        name for name, value in (("--rows", rows), ("--device", device), ("--decode-ms", decode_ms)) if value
    ]
    if len(given) != 1:
        what = f"{' and '.join(given)} were given" if given else "nothing says what a step costs"
        raise UsageError(
            f"Only one source of costs is possible, and {what}.",
            "--rows engine.json (from `edgeserve bench --engine --out`), --device NAME, or --decode-ms X"
            " --prefill-tok-s X.",
        )
    if isinstance(rows, list) and rows:
        return step_model.from_engine_bench([_document(Path(path)) for path in rows])
    return _from_device(str(device), reference) if device else _from_figures(typed)


def _document(path: Path) -> dict[str, object]:
    path = path / "engine.json" if path.is_dir() else path
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}.") from error
    if not isinstance(document, dict):
        raise UsageError(f"{path} is no result of `edgeserve bench --engine`.")
    return document


def _from_figures(typed: Typed) -> StepModel:
    if not typed.get("prefill_tok_s"):
        raise UsageError("--decode-ms needs --prefill-tok-s beside it.")
    names = ("decode_ms", "prefill_tok_s", "each_ms", "depth_ms")
    values = [read_options.milliseconds(str(typed.get(name) or 0)) for name in names]
    return step_model.from_figures(*values)


def _from_device(name: str, reference: str | None) -> StepModel:
    """All layers on the device's first accelerator, or on its processor."""
    target = described_target(find_profile(name))
    device = target.speeds[target.accelerators[0].name if target.accelerators else next(iter(target.speeds))]
    with closing(ProgressLine()) as progress:
        path = models.locate(reference or read_models_list()[0].name, progress=progress)
    work = model_work(read_header(str(path)))

    def decode_s(num_sequences: int, num_resident: int) -> float:
        settings = SpeedSettings(num_sequences=num_sequences, num_resident=num_resident)
        return num_sequences / _known(predict(work, device, settings).total_decode_tok_s, name).mid

    def prefill_token_s(size: int) -> float:
        return 1 / _known(predict(work, device, SpeedSettings(n_prompt=size)).prefill_tok_s, name).mid

    source = f"expected of {path.stem} on {target.name}"
    return step_model.from_prediction(decode_s, prefill_token_s, source)


def _known(value: Interval | None, name: str) -> Interval:
    if value is None:
        raise UsageError(f"The profile of {name} does not allow a prediction of speed.")
    return value
