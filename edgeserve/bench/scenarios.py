"""The scenarios: which requests a case consists of, and in which order they go out.

Owns: one coroutine for each kind of case, and the order of cases of a scenario.
Does not know: repeats and the second server (session.py), or figures (figures.py, kinds.py).
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from edgeserve.bench import workload
from edgeserve.bench.figures import is_good
from edgeserve.bench.lane import Lane
from edgeserve.bench.options import BenchOptions, Scenario
from edgeserve.bench.prompts import PromptMaker, with_answer
from edgeserve.bench.runner import AHEAD_S, Record, Request, Runner
from edgeserve.bench.workload import Planned, Shape
from edgeserve.metrics import SLO

# Stream A has settled by then.
STALL_AFTER_CHUNKS = 20
# What a probe takes on the idle server, before the long prompt comes.
NUM_PROBES_ALONE = 8
# Load goes on after the measured window, so that its last requests do not end in an emptying system.
TAIL_SHARE = 2.0
# A point of a sweep decides over the next one: a handful of requests would decide by chance.
MIN_REQUESTS_OF_A_POINT = 10
ALWAYS = (0.0, math.inf)


@dataclass(frozen=True)
class Case:
    """One thing to measure. `send` prepares its requests, starts the lane's clock, and sends them.

    `needed_tokens` is the longest context that it asks for, where that is known beforehand;
    `is_cold_meant` is false where requests share a beginning on purpose.
    """

    label: str
    kind: str
    mode: str
    send: Callable[[Lane, PromptMaker], Awaitable[None]]
    window_s: tuple[float, float] = ALWAYS
    rate_per_s: float | None = None
    needed_tokens: int = 0
    is_cold_meant: bool = True


def cases_of(options: BenchOptions) -> list[Case]:
    """The cases of a scenario that are known beforehand; a sweep adds its own as it goes (sweep.py)."""
    builders: Mapping[Scenario, Callable[[BenchOptions], list[Case]]] = {
        Scenario.DECODE: lambda o: [decode(o, n) for n in o.streams],
        Scenario.DEPTH: lambda o: [depth(o, n) for n in o.depths],
        Scenario.STALL: lambda o: [stall(o)],
        Scenario.TURNS: lambda o: [turns(o)],
        Scenario.LOAD: lambda o: [load(o, rate) for rate in o.rates_per_s],
        Scenario.SWEEP: lambda o: [],
        Scenario.CLOSED: lambda o: [closed(o, n) for n in o.concurrency],
        Scenario.TRACE: lambda o: [trace(o)],
        Scenario.PROBE: lambda o: [probe(o)],
    }
    return builders[options.scenario](options)


def shape_of(options: BenchOptions) -> Shape:
    return Shape(options.prompt_lengths, options.output_lengths, options.shared_prefix_tokens)


def decode(options: BenchOptions, num_streams: int) -> Case:
    """`num_streams` answers at once. Prompts are short; what counts is the time when all of them decode."""

    async def send(lane: Lane, maker: PromptMaker) -> None:
        planned = workload.closed_loop(shape_of(options), num_streams, options.seed)
        requests = lane.requests(maker, planned)
        await lane.start(label, num_streams).closed_loop(requests, num_streams)

    label = f"decode, {num_streams} stream{'s' if num_streams > 1 else ''}"
    return Case(label, "decode", "closed loop", send)


def depth(options: BenchOptions, num_prompt_tokens: int) -> Case:
    """One answer behind a cold prompt of this length."""

    async def send(lane: Lane, maker: PromptMaker) -> None:
        requests = lane.requests(maker, [Planned(0, num_prompt_tokens, num_output_tokens)])
        await lane.start(label, 1).closed_loop(requests, 1)

    num_output_tokens = options.output_lengths.typical
    label = f"decode at depth {num_prompt_tokens:,}"
    needed_tokens = num_prompt_tokens + num_output_tokens
    return Case(label, "depth", "closed loop", send, needed_tokens=needed_tokens)


def stall(options: BenchOptions) -> Case:
    """B alone, then B again (cold again) into the running answers A."""

    async def send(lane: Lane, maker: PromptMaker) -> None:
        rng = random.Random(f"{options.seed}-lengths")
        num_streams = options.streams[0]
        streams = [
            Planned(index, options.prompt_lengths.draw(rng), options.output_lengths.draw(rng), label="A")
            for index in range(num_streams)
        ]
        intruder = Planned(num_streams, options.stall_prompt_tokens, 8, label="B")
        alone = Planned(num_streams + 1, options.stall_prompt_tokens, 8, label="B alone")
        first, second, *others = lane.requests(maker, [alone, intruder, *streams])
        runner = lane.start(label, len(streams) + 2)
        await runner.send(first)
        await _intrude(runner, others, second)

    label = f"stall, {options.stall_prompt_tokens:,}-token prompt into {options.streams[0]} running"
    return Case(label, "stall", "script", send, needed_tokens=options.stall_prompt_tokens + 8)


async def _intrude(runner: Runner, streams: Sequence[Request], intruder: Request) -> None:
    """Send the intruder once every stream runs, or once they have all ended too early to tell."""
    running: set[int] = set()
    is_time = asyncio.Event()

    def watch(index: int) -> Callable[[int], None]:
        def on_output(num_chunks: int) -> None:
            if num_chunks >= STALL_AFTER_CHUNKS:
                running.add(index)
            if len(running) == len(streams):
                is_time.set()

        return on_output

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(runner.send(stream, watch(stream.index))) for stream in streams]
        ended = group.create_task(_all(tasks))
        waiting = group.create_task(is_time.wait())
        await asyncio.wait({ended, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        await runner.send(intruder)


async def _all(tasks: Sequence[asyncio.Task[Record]]) -> None:
    await asyncio.wait(tasks)


def probe(options: BenchOptions) -> Case:
    """Short requests at a steady rate: some alone, then for as long as B's prompt is computed."""
    gap_s = 1 / options.probe_rate_per_s

    async def send(lane: Lane, maker: PromptMaker) -> None:
        rng = random.Random(f"{options.seed}-lengths")
        (intruder,) = lane.requests(maker, [Planned(-1, options.stall_prompt_tokens, 8, label="B")])
        runner = lane.start(label)

        def at(index: int) -> Request:
            lengths = (options.prompt_lengths.draw(rng), options.output_lengths.draw(rng))
            (request,) = lane.requests(maker, [Planned(index, *lengths, index * gap_s, label="probe")])
            return request

        async with asyncio.TaskGroup() as group:
            for index in range(NUM_PROBES_ALONE):
                await _send_at(runner, at(index), group)
            long_prompt = group.create_task(runner.send(intruder))
            index = NUM_PROBES_ALONE
            while not long_prompt.done():
                await _send_at(runner, at(index), group)
                index += 1

    label = f"probe, {options.probe_rate_per_s:.3g}/s beside a {options.stall_prompt_tokens:,}-token prompt"
    return Case(label, "probe", "script", send, needed_tokens=options.stall_prompt_tokens + 8)


async def _send_at(runner: Runner, request: Request, group: asyncio.TaskGroup) -> None:
    """Returns when it is due; what sending it takes is made ready before."""
    at_s = request.at_s or 0.0
    await runner.until(at_s - AHEAD_S)
    group.create_task(runner.send(request))
    await runner.until(at_s)


def turns(options: BenchOptions) -> Case:
    """A chat: every turn carries all that was said before, and a new question. Several chats ask by turns."""

    async def send(lane: Lane, maker: PromptMaker) -> None:
        rng = random.Random(f"{options.seed}-lengths")
        chats = [maker.messages(_first_turn(options, rng, number)) for number in range(options.num_chats)]
        runner = lane.start(label, options.num_turns * options.num_chats)
        for index in range(options.num_turns * options.num_chats):
            turn, number = divmod(index, options.num_chats)
            request = Request(
                index, chats[number], options.output_lengths.draw(rng), label=f"turn {turn + 1}"
            )
            record = await runner.send(request)
            if not record.is_ok:
                break
            num_words = lane.calibration.num_words(options.prompt_lengths.draw(rng))
            chats[number] = with_answer(chats[number], record.text, maker.words(num_words, "turn", index))

    chats = f"{options.num_chats} chats" if options.num_chats > 1 else "chat"
    label = f"{chats} of {options.num_turns} turns"
    return Case(label, "turns", "script", send, is_cold_meant=False)


def _first_turn(options: BenchOptions, rng: random.Random, number: int) -> Planned:
    shared = options.shared_prefix_tokens
    num_prompt, max_tokens = options.prompt_lengths.draw(rng) + shared, options.output_lengths.draw(rng)
    return Planned(number, num_prompt, max_tokens, shared_prefix_tokens=shared, label="turn 1")


def planned_load(options: BenchOptions, rate_per_s: float, until_s: float) -> list[Planned]:
    """The arrivals and lengths of an open loop: the same seed gives the same ones anywhere."""
    return workload.open_loop(
        shape_of(options), options.arrivals, rate_per_s, until_s, options.seed, options.burstiness
    )


def planned_closed(options: BenchOptions, num_clients: int) -> list[Planned]:
    """The requests that a closed loop's clients share."""
    num_requests = max(options.num_requests, 4 * num_clients)
    return workload.closed_loop(shape_of(options), num_requests, options.seed)


def load(options: BenchOptions, rate_per_s: float) -> Case:
    """Open loop at one rate. Measured are the arrivals after the warm-up, for `duration_s`; longer in a
    sweep at a low rate."""
    duration_s = options.duration_s
    if options.scenario is Scenario.SWEEP:
        duration_s = max(duration_s, MIN_REQUESTS_OF_A_POINT / rate_per_s)
    start_s, end_s = options.warmup_s, options.warmup_s + duration_s

    async def send(lane: Lane, maker: PromptMaker) -> None:
        planned = planned_load(options, rate_per_s, end_s + TAIL_SHARE * duration_s)
        requests = lane.requests(maker, planned)
        num_offered = sum(start_s <= (plan.at_s or 0.0) < end_s for plan in planned)
        num_allowed = (1 - options.attainment_target) * num_offered

        def is_hopeless(runner: Runner) -> bool:
            """A sweep only asks whether the rate is kept up; a fixed rate is always measured to its end."""
            missed = num_missed(runner, options.slo, start_s, end_s)
            return options.scenario is Scenario.SWEEP and missed > num_allowed

        await lane.start(label).open_loop(requests, end_s, is_hopeless)

    label = f"{options.arrivals} {rate_per_s:.3g}/s"
    return Case(label, "load", "open loop", send, (start_s, end_s), rate_per_s)


def num_missed(runner: Runner, slo: SLO, start_s: float, end_s: float) -> int:
    """Requests of the window whose objective is lost already: ended, or without a token for too long."""
    ended = [record for record in runner.records if start_s <= record.arrival_s < end_s]
    lost = sum(not is_good(record, slo) for record in ended)

    def late_s(num_prompt_tokens: int) -> float | None:
        ttft_s = slo.ttft_bound_s(num_prompt_tokens)
        return slo.e2e_s if ttft_s is None else ttft_s

    return lost + runner.num_waiting(late_s, start_s, end_s)


def trace(options: BenchOptions) -> Case:
    """Open loop with the arrivals and lengths of a file, every request measured."""
    assert options.trace is not None  # checked by BenchOptions
    planned = workload.read_trace(options.trace)
    duration_s = max(plan.at_s or 0.0 for plan in planned)

    async def send(lane: Lane, maker: PromptMaker) -> None:
        requests = lane.requests(maker, planned)
        await lane.start(label, len(requests)).open_loop(requests, math.inf)

    label = f"trace {options.trace.name}"
    rate = len(planned) / duration_s if duration_s > 0 else None
    is_cold_meant = not any(plan.block_ids or plan.shared_prefix_tokens for plan in planned)
    return Case(label, "load", "open loop", send, ALWAYS, rate, is_cold_meant=is_cold_meant)


def closed(options: BenchOptions, num_clients: int) -> Case:
    """Closed loop: a slow server is asked less, which hides a queue. Labelled as such everywhere."""

    async def send(lane: Lane, maker: PromptMaker) -> None:
        requests = lane.requests(maker, planned_closed(options, num_clients))
        await lane.start(label, len(requests)).closed_loop(requests, num_clients)

    label = f"closed loop, {num_clients} client{'s' if num_clients > 1 else ''}"
    return Case(label, "closed", "closed loop", send)
