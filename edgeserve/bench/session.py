"""One benchmark from the first contact to the result: repeats, the second server, interruption.

Owns: the order A B A B, the pauses, priming of shared prefixes, what survives a Ctrl-C, and progress.
Does not know: tables, files, command lines.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TextIO

from edgeserve.bench import environment
from edgeserve.bench.energy import joules_between, read_counters
from edgeserve.bench.figures import Run, RunFigures
from edgeserve.bench.kinds import figures_of
from edgeserve.bench.lane import Lane, Progress, Stopwatch, clipped
from edgeserve.bench.options import BenchOptions, Scenario
from edgeserve.bench.results import BenchResult, CaseResult, sum_up
from edgeserve.bench.runner import Record, Request
from edgeserve.bench.scenarios import Case, cases_of, load
from edgeserve.bench.self_test import client_cost
from edgeserve.bench.sweep import find_capacity
from edgeserve.bench.workload import Planned
from edgeserve.client import Client
from edgeserve.ink import can_redraw


def run_bench(
    options: BenchOptions, progress: Progress | None = None, arguments: Sequence[str] | None = None
) -> BenchResult:
    """Measure, and return what was found. Ctrl-C gives a result with `is_partial` instead of an exception.

    `progress` gets one line of text now and then. Raises `ServerUnreachableError`, `RequestError` (the first
    contact fails) and `UsageError`; what goes wrong later is part of the result.
    """
    session = Session(options, progress or (lambda text: None))
    command = environment.command_line(sys.argv if arguments is None else arguments)
    return asyncio.run(session.run(command))


class ProgressLine:
    """A line on a terminal that overwrites itself and disappears; nothing anywhere else."""

    def __init__(self, stream: TextIO, env: dict[str, str]) -> None:
        self._stream = stream
        self._is_shown = can_redraw(stream, env)

    def __call__(self, text: str) -> None:
        if self._is_shown:
            # A line that wraps could not be taken back.
            width = shutil.get_terminal_size().columns
            self._stream.write(f"\r\x1b[2K{text[: width - 1]}")
            self._stream.flush()

    def clear(self) -> None:
        self("")


class Session:
    """The state of one benchmark. `runs` grows; it is complete up to the moment of an interruption."""

    def __init__(self, options: BenchOptions, progress: Progress) -> None:
        self.options = options
        self.progress = progress
        self.runs: list[tuple[Run, RunFigures]] = []
        self.warnings: list[str] = []
        self.lanes: list[Lane] = []

    async def run(self, command: str) -> BenchResult:
        started_at = datetime.now(UTC).isoformat(timespec="seconds")
        is_partial = False
        async with AsyncExitStack() as stack:
            before = await self._open(stack)
            try:
                await self._measure_all()
            except asyncio.CancelledError:
                is_partial = True
                if (task := asyncio.current_task()) is not None:
                    task.uncancel()
            record = {**before, "state_after": environment.state()}
        return BenchResult(
            scenario=self.options.scenario.value,
            started_at=started_at,
            command=command,
            options=self.options.public(),
            environment=record,
            servers={lane.name: lane.client.root for lane in self.lanes},
            cases=sum_up(self.runs),
            runs=tuple(run for run, _ in self.runs),
            is_partial=is_partial,
            warnings=tuple(dict.fromkeys(self.warnings)),
            attainment_target=self.options.attainment_target,
        )

    async def _open(self, stack: AsyncExitStack) -> dict[str, object]:
        options = self.options
        addresses = [("A", options.url, options.api_key)]
        if options.against is not None:
            addresses.append(("B", options.against, options.key_against))
        busy = environment.busy_processes()
        if busy:
            names = ", ".join(f"{process['name']} ({process['cpu_share']:.0%})" for process in busy)
            self.warnings.append(f"Other programs were busy before the first request: {names}.")
        for name, url, key in addresses:
            client = await stack.enter_async_context(Client(url, key, model=options.model))
            lane = Lane(name, client, options, self.progress)
            await lane.prepare()
            self.lanes.append(lane)
        return {
            "client": environment.machine(),
            "client_cost": asdict(await client_cost()),
            "busy_processes": busy,
            "servers": {lane.name: await environment.server_facts(lane) for lane in self.lanes},
            "salts": {lane.name: lane.salt for lane in self.lanes},
            "state_before": environment.state(),
        }

    async def _measure_all(self) -> None:
        if self.options.scenario is Scenario.SWEEP:
            await self._sweep()
        for case in cases_of(self.options):
            await self._measure(case)

    async def _sweep(self) -> None:
        async def keeps_up(rate_per_s: float) -> bool:
            case = load(self.options, rate_per_s)
            await self._measure(case)
            found = next(result for result in sum_up(self.runs) if result.label == case.label)
            return self._meets_target(found)

        await find_capacity(self.options.rates_per_s[0], keeps_up)

    def _meets_target(self, case: CaseResult) -> bool:
        attainment = case.median("attainment") or 0.0
        return not case.is_saturated and attainment >= self.options.attainment_target

    async def _measure(self, case: Case) -> None:
        """All repeats of one case, the servers in turns, so that a warming machine slows both alike."""
        lanes = [lane for lane in self.lanes if self._fits(case, lane)]
        for repeat in range(self.options.repeats):
            for lane in lanes:
                if self.runs and self.options.pause_s:
                    await asyncio.sleep(self.options.pause_s)
                await self._measure_once(case, lane, repeat)

    def _fits(self, case: Case, lane: Lane) -> bool:
        if lane.n_ctx is None or case.needed_tokens <= lane.n_ctx:
            return True
        self.warnings.append(
            f"{case.label} was left out on {lane.name}: it needs {case.needed_tokens:,} tokens of context, "
            f"one request may hold {lane.n_ctx:,}."
        )
        return False

    async def _measure_once(self, case: Case, lane: Lane, repeat: int) -> None:
        maker = lane.maker(case.label, repeat)
        if self.options.shared_prefix_tokens:
            length = self.options.shared_prefix_tokens
            prime = Planned(-1, length, 1, shared_prefix_tokens=length, label="prime")
            await lane.start("priming").send(Request(-1, maker.messages(prime), 1))
        counted_before = await lane.server_tokens()
        lane.runner = None
        energy_before = read_counters() if lane.is_local else {}
        watch = Stopwatch()
        try:
            await case.send(lane, maker)
        except asyncio.CancelledError:
            self._keep(case, lane, repeat, watch.cpu_share, None, is_cut=True)
            raise
        cpu_share = watch.cpu_share
        energy_j = joules_between(energy_before, read_counters()) if lane.is_local else None
        counted = await lane.server_tokens()
        new = counted - counted_before if counted is not None and counted_before is not None else None
        self._keep(case, lane, repeat, cpu_share, new, energy_j)

    def _keep(
        self,
        case: Case,
        lane: Lane,
        repeat: int,
        cpu_share: float | None,
        server_tokens: float | None,
        energy_j: float | None = None,
        is_cut: bool = False,
    ) -> None:
        records = tuple(lane.runner.records) if lane.runner else ()
        if not records or lane.runner is None:
            return
        run = Run(
            case=case.label,
            kind=case.kind,
            mode=case.mode,
            target=lane.name,
            repeat=repeat,
            window_s=window_of(case, records),
            records=records,
            rate_per_s=case.rate_per_s,
            is_cold_meant=case.is_cold_meant and not self.options.shared_prefix_tokens,
            client_cpu_share=cpu_share,
            server_tokens=None if any(record.usage is None for record in records) else server_tokens,
            energy_j=energy_j,
            is_cut_short=lane.runner.is_cut_short,
        )
        run = clipped(run, lane.runner.now_s()) if is_cut else run
        self.runs.append((run, figures_of(run, self.options.slo)))


def window_of(case: Case, records: Sequence[Record]) -> tuple[float, float]:
    """The case's own window; for a closed loop from the first answer's end to the last request's start, when
    every client was busy; for the rest everything."""
    last_s = max(record.end_s for record in records)
    if case.kind == "closed":
        sent = sorted(record.sent_s for record in records)
        first_end_s = min(record.end_s for record in records)
        if first_end_s < sent[-1]:
            return (first_end_s, sent[-1])
    start_s, end_s = case.window_s
    return (start_s, min(end_s, last_s) if start_s < last_s else end_s)
