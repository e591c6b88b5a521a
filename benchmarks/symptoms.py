"""Each symptom provoked on a real server, and what `edgeserve doctor` then finds.

    python benchmarks/symptoms.py MODEL [--only RULE] [--threads 1]

One server for each situation, with a setting or a load that brings the symptom about, and one that is
well. The findings are those of `edgeserve doctor --url` over the time of the load (of `edgeserve doctor
--bench` for the one that needs two lengths of context). Loads are sized for a model of some 100 million
parameters on one processor thread: where prompts are read much faster, nothing is slow and nothing is found.

Exit code 1 when a finding is missing, or when the healthy server is not called healthy. Two rules are not
provoked here: `waiting` needs somebody who looks all the time, as the monitor does, and `cold prompts` shows
beside `slow prefill`.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial

from server_process import Server, free_port

from edgeserve.bench.options import BenchOptions, Scenario
from edgeserve.bench.results import summary_json
from edgeserve.bench.session import run_bench
from edgeserve.bench.workload import Lengths
from edgeserve.client import Client
from edgeserve.doctor.diagnosis import diagnose
from edgeserve.doctor.from_bench import observe_bench
from edgeserve.doctor.observed import Observed
from edgeserve.doctor.server_check import observe_while, report_lines
from edgeserve.errors import EdgeserveError
from edgeserve.ink import Ink

NOTHING = "nothing: healthy"
SHALLOW_TOKENS, DEEP_TOKENS = 32, 3000


@dataclass
class Users:
    """Requests in flight. A request begins at once, and may be awaited or left alone."""

    client: Client
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    num_tokens: int = 0

    def ask(self, prompt: str, max_tokens: int, **params: object) -> asyncio.Task[None]:
        self.tasks.append(asyncio.create_task(self._send(prompt, max_tokens, params)))
        return self.tasks[-1]

    async def _send(self, prompt: str, max_tokens: int, params: Mapping[str, object]) -> None:
        # As the system's message: a template's own one would be a beginning that all prompts share.
        messages = [{"role": "system", "content": prompt}, {"role": "user", "content": "Go on."}]
        stream = self.client.chat_stream(messages, max_tokens=max_tokens, ignore_eos=True, **params)
        try:
            async with aclosing(stream) as events:
                async for event in events:
                    self.num_tokens += event.is_output
        except EdgeserveError as error:
            # Refusals are a part of the load.
            print(f"  refused: {error.message}", file=sys.stderr)


Load = Callable[[Users], Awaitable[object]]


def cold(index: int, num_tokens: int) -> str:
    """About so many tokens, unlike the others from the first word on."""
    return f"{index * 7919} " + "word " * num_tokens


async def nobody(users: Users) -> None:
    """Nothing runs when the window begins."""


async def one_by_one(users: Users, num: int, prompt: int, output: int) -> None:
    for index in range(num):
        await users.ask(cold(index, prompt), output)


async def at_once(users: Users, num: int, prompt: int, output: int) -> None:
    await asyncio.gather(*(users.ask(cold(index, prompt), output) for index in range(num)))


async def long_prompts_beside_a_stream(users: Users) -> None:
    stream = users.ask(cold(9, 16), 200)
    await until(lambda: users.num_tokens > 60)
    await one_by_one(users, 2, 300, 2)
    await stream


async def a_stream_that_fills_the_pool(users: Users) -> None:
    """The window ends while it is still running."""
    stream = users.ask(cold(0, 660), 60)
    await until(lambda: users.num_tokens >= 25 or stream.done())


async def hits_that_queue(users: Users) -> None:
    await one_by_one(users, 3, 150, 2)
    await asyncio.gather(*(users.ask(cold(2, 150), 48) for _ in range(5)))


async def a_stream_with_every_sampler(users: Users) -> None:
    sampling = {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 0.99,
        "min_p": 0.001,
        "repeat_penalty": 1.2,
        "presence_penalty": 0.5,
        "logprobs": True,
        "top_logprobs": 20,
    }
    users.ask(cold(0, 16), 4000, **sampling)
    await until(lambda: users.num_tokens > 0)


async def until(holds: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + 60
    while not holds() and time.monotonic() < give_up_s:
        await asyncio.sleep(0.01)


@dataclass(frozen=True)
class Situation:
    """`before` runs ahead of the window, `load` is the window; what still runs then is broken off."""

    symptom: str
    rule: str
    serve: tuple[str, ...]
    load: Load
    before: Load = nobody


SITUATIONS = (
    Situation("a healthy server", NOTHING, ("-c", "2048"), lambda users: one_by_one(users, 5, 50, 16)),
    Situation(
        "first token late with nobody else", "slow prefill", ("-c", "4096", "-np", "1"),
        lambda users: one_by_one(users, 3, 700, 2),
    ),
    Situation(
        "first token late under load", "queueing", ("-c", "1024", "-np", "1"),
        lambda users: at_once(users, 5, 120, 32),
    ),
    Situation(
        "usual gaps fine, longest bad", "stalls",
        ("-c", "4096", "-np", "2", "--itl-target-ms", "5000", "--prefill-chunk", "512"),
        long_prompts_beside_a_stream,
    ),
    Situation(
        "few tokens, steps not spent computing", "idle machine", ("-c", "4096", "-np", "1"),
        lambda users: asyncio.sleep(4), a_stream_with_every_sampler,
    ),
    Situation(
        "machine busy, objective missed", "overload", ("-c", "1024", "-np", "1", "--max-waiting", "2"),
        lambda users: at_once(users, 6, 100, 48),
    ),
    Situation(
        "cells always full", "full cells", ("-c", "768", "-np", "2", "-kvu"), a_stream_that_fills_the_pool
    ),
    Situation("hits no faster than misses", "useless hits", ("-c", "1024", "-np", "1"), hits_that_queue),
)  # fmt: skip


async def observe_situation(url: str, situation: Situation) -> Observed:
    async with Client(url) as client:
        users = Users(client)
        await situation.before(users)
        seen = await observe_while(client, partial(situation.load, users))
        for task in users.tasks:
            task.cancel()
        await asyncio.gather(*users.tasks, return_exceptions=True)
        return seen


def observe_depth(url: str) -> Observed:
    """Two lengths of context, measured by `edgeserve bench --scenario depth`."""
    depths = (SHALLOW_TOKENS, DEEP_TOKENS)
    options = BenchOptions(url, Scenario.DEPTH, depths=depths, output=Lengths.parse("24"), repeats=1)
    return observe_bench(summary_json(run_bench(options)))


def look(url: str, situation: Situation) -> Observed:
    return asyncio.run(observe_situation(url, situation))


def served(model: str, serve: Sequence[str], see: Callable[[str], Observed]) -> Observed:
    """What is seen of a server that lives for this alone."""
    port = free_port()
    server = Server(model, port, list(serve))
    try:
        return see(f"http://127.0.0.1:{port}")
    finally:
        server.terminate()


def cases() -> Iterator[tuple[str, str, Sequence[str], Callable[[str], Observed]]]:
    """Symptom, rule, the server's options, and the way to see it."""
    for situation in SITUATIONS:
        yield situation.symptom, situation.rule, situation.serve, partial(look, situation=situation)
    serve = ("-c", "4096", "-np", "1", "-fa", "on")
    yield "decode slower as the chat grows", "slow at depth", serve, observe_depth


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--only", metavar="RULE", default="", help="the situations of this rule")
    parser.add_argument("--threads", default="1")
    arguments = parser.parse_args()
    missing = []
    for symptom, rule, serve, see in cases():
        if arguments.only not in rule:
            continue
        started_s = time.monotonic()
        seen = served(arguments.model, [*serve, "-t", arguments.threads], see)
        found = diagnose(seen)
        rules = [item.rule for item in found] or [NOTHING]
        is_there = rules == [NOTHING] if rule == NOTHING else rule in rules
        missing += [] if is_there else [symptom]
        verdict = "as expected" if is_there else "MISSING"
        print(f"{symptom} ({time.monotonic() - started_s:.0f} s)")
        print(f"  expected {rule}; found {', '.join(rules)}: {verdict}")
        print("\n".join(f"  {line}" for line in report_lines(seen, found, Ink(False))), "\n", flush=True)
    print(f"missing: {', '.join(missing)}" if missing else "every finding is there")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
