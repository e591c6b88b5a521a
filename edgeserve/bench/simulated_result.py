"""Simulated runs as a benchmark's result, so that tables, plots, thresholds and comparisons are the same.

Owns the cases of a simulation and what their result says of itself: `servers` names no address, and `extra`
holds the step model and the engine's settings. The same seed, lengths and labels as a real benchmark's make
`edgeserve bench compare` put the two side by side.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime

from edgeserve.bench import environment
from edgeserve.bench.figures import Run, RunFigures
from edgeserve.bench.kinds import figures_of
from edgeserve.bench.options import BenchOptions, Scenario
from edgeserve.bench.results import BenchResult, sum_up
from edgeserve.bench.scenarios import TAIL_SHARE, Case, cases_of, planned_closed, planned_load
from edgeserve.bench.session import window_of
from edgeserve.bench.simulate import Machine, Simulation
from edgeserve.bench.step_model import StepModel

SIMULATED = "simulated"


def simulate(
    options: BenchOptions, machine: Machine, model: StepModel, arguments: Sequence[str]
) -> BenchResult:
    """Every rate or number of users, one after the other on an engine that has learned nothing yet."""
    runs: list[tuple[Run, RunFigures]] = []
    busy: dict[str, float | None] = {}
    for case, load in zip(cases_of(options), _loads(options), strict=True):
        simulation = Simulation(machine, model)
        _send(simulation, case, options, load)
        run = _run(case, simulation)
        runs.append((run, figures_of(run, options.slo)))
        busy[case.label] = simulation.busy_s / simulation.now_s if simulation.now_s else None
    return BenchResult(
        scenario=options.scenario.value,
        started_at=datetime.now(UTC).isoformat(timespec="seconds"),
        command=environment.command_line(arguments),
        options=options.public(),
        environment={},
        servers={"A": f"{SIMULATED}, {model.source}"},
        cases=sum_up(runs),
        runs=tuple(run for run, _ in runs),
        warnings=("Simulated: HTTP, tokenizing and other programs are not in it.",),
        attainment_target=options.attainment_target,
        extra={"simulated": {"step_model": asdict(model), "machine": asdict(machine), "busy_share": busy}},
    )


def _loads(options: BenchOptions) -> Sequence[float]:
    return options.rates_per_s if options.scenario is Scenario.LOAD else options.concurrency


def _send(simulation: Simulation, case: Case, options: BenchOptions, load: float) -> None:
    if options.scenario is Scenario.CLOSED:
        simulation.closed_loop(planned_closed(options, int(load)), int(load))
        return
    end_s = case.window_s[1]
    assert math.isfinite(end_s), "an open loop has a window"
    simulation.open_loop(planned_load(options, load, end_s + TAIL_SHARE * options.duration_s))


def _run(case: Case, simulation: Simulation) -> Run:
    records = tuple(simulation.records)
    return Run(
        case=case.label,
        kind=case.kind,
        mode=case.mode,
        target="A",
        repeat=0,
        window_s=window_of(case, records) if records else case.window_s,
        records=records,
        rate_per_s=case.rate_per_s,
    )
