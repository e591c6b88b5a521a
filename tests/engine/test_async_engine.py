"""The engine on its thread: streams, cancellation, what a stop and a crash do to those who wait."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

from edgeserve.config import EngineConfig
from edgeserve.engine.async_engine import AsyncEngine
from edgeserve.engine.request import FinishReason, Request, RequestOutput
from edgeserve.engine.sampling_params import SamplingParams
from edgeserve.errors import ContextLengthError, EngineError, QueueFullError, UnavailableError
from edgeserve.llama import Model

QUESTION = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"


def make(model: Model, **settings: object) -> AsyncEngine:
    config = EngineConfig(model.path, **{"n_ctx": 2048, "n_threads": 1, **settings})
    engine = AsyncEngine(model, config)
    engine.start()
    return engine


@pytest.fixture(scope="module")
def engine(model: Model) -> Iterator[AsyncEngine]:
    made = make(model)
    yield made
    made.stop()


def ask(model: Model, name: str, text: str = QUESTION, **fields: object) -> Request:
    ids = tuple(model.tokenize(text, add_special=True, parse_special=True))
    params = SamplingParams(**{"temperature": 0, "max_tokens": 12, **fields})
    return Request(name, ids, params, time.perf_counter())


async def collect(engine: AsyncEngine, request: Request) -> list[RequestOutput]:
    return [output async for output in engine.generate(request)]


async def idle(engine: AsyncEngine) -> None:
    while engine.stats.running or engine.stats.waiting:
        await asyncio.sleep(0.005)


async def test_many_streams_at_once_each_get_their_own_answer(engine: AsyncEngine, model: Model) -> None:
    answers = await asyncio.gather(*(collect(engine, ask(model, f"m{i}")) for i in range(12)))
    for outputs in answers:
        assert "".join(output.text for output in outputs) == "The capital of France is Paris."
        assert [output.is_finished for output in outputs].count(True) == 1
        assert outputs[-1].finish_reason is FinishReason.STOP


async def test_leaving_a_stream_frees_its_sequence_and_nobody_elses(
    engine: AsyncEngine, model: Model
) -> None:
    async def leave_after(name: str, count: int) -> None:
        stream = engine.generate(ask(model, name, ignore_eos=True, max_tokens=400))
        async with contextlib.aclosing(stream):
            async for _ in stream:
                count -= 1
                if not count:
                    return

    cancelled = engine.stats.finished_total.get("cancelled", 0)
    stays = asyncio.create_task(collect(engine, ask(model, "stays", ignore_eos=True, max_tokens=40)))
    await asyncio.gather(*(leave_after(f"l{i}", i + 1) for i in range(5)))
    assert len((await stays)[-1].token_ids) == 1
    assert (await stays)[-1].timings.num_output_tokens == 40
    await idle(engine)
    assert engine.stats.finished_total["cancelled"] == cancelled + 5


async def test_a_request_that_left_the_queue_is_never_started(model: Model) -> None:
    engine = make(model, n_seq_max=1)
    try:
        busy = asyncio.create_task(collect(engine, ask(model, "busy", ignore_eos=True, max_tokens=60)))
        queued = [asyncio.create_task(collect(engine, ask(model, f"q{i}"))) for i in range(3)]
        while len(engine.stats.waiting) < 3:
            await asyncio.sleep(0.005)
        assert {item.waits_for for item in engine.stats.waiting} == {"a free sequence"}
        queued[1].cancel()
        await asyncio.gather(busy, *queued, return_exceptions=True)
        stats = engine.stats
        assert stats.finished_total == {"length": 1, "stop": 2, "cancelled": 1}
        assert stats.num_prompt_tokens_total == 3 * len(ask(model, "x").prompt_token_ids)
    finally:
        engine.stop()


async def test_refusals_come_before_the_first_output(model: Model) -> None:
    engine = make(model, n_seq_max=1, n_ctx=512, max_waiting=1)
    try:
        with pytest.raises(ContextLengthError):
            await collect(engine, ask(model, "long", QUESTION * 40))
        tasks = [
            asyncio.create_task(collect(engine, ask(model, f"t{i}", ignore_eos=True, max_tokens=50)))
            for i in range(6)
        ]
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert sum(isinstance(item, QueueFullError) for item in done) >= 3
        assert all(isinstance(item, list | QueueFullError) for item in done)
    finally:
        engine.stop()


async def test_a_stop_ends_every_stream_with_an_answer(model: Model) -> None:
    engine = make(model, n_seq_max=2)
    tasks = [
        asyncio.create_task(collect(engine, ask(model, f"s{i}", ignore_eos=True, max_tokens=500)))
        for i in range(4)
    ]
    while len(engine.stats.running) < 2:
        await asyncio.sleep(0.005)
    await asyncio.to_thread(engine.stop)
    for outputs in await asyncio.gather(*tasks):
        assert isinstance(outputs[-1].error, UnavailableError)
    assert not engine.is_alive
    with pytest.raises(UnavailableError):
        await collect(engine, ask(model, "late"))


async def test_a_bug_in_a_step_ends_its_requests_and_the_engine_goes_on(model: Model) -> None:
    engine = make(model)
    real_step, calls = engine._engine.step, iter(range(1000))

    def broken_once() -> list[RequestOutput]:
        if next(calls) == 2:
            raise ZeroDivisionError("a bug")
        return real_step()

    engine._engine.step = broken_once
    try:
        outputs = await collect(engine, ask(model, "unlucky", ignore_eos=True))
        assert isinstance(outputs[-1].error, EngineError)
        assert "ZeroDivisionError" in outputs[-1].error.message
        text = "".join(output.text for output in await collect(engine, ask(model, "next")))
        assert text == "The capital of France is Paris."
    finally:
        engine.stop()


async def test_statistics_are_seen_after_each_step(engine: AsyncEngine, model: Model) -> None:
    seen = []

    async def watch() -> None:
        async for stats in engine.subscribe():
            seen.append(stats.num_steps)

    watcher = asyncio.create_task(watch())
    await asyncio.sleep(0)
    await collect(engine, ask(model, "watched"))
    watcher.cancel()
    assert seen == sorted(seen)
    assert len(set(seen)) >= 5


async def test_a_watcher_ends_with_the_engine(model: Model) -> None:
    engine = make(model)

    async def watch() -> int:
        return len([stats async for stats in engine.subscribe()])

    watcher = asyncio.create_task(watch())
    await asyncio.sleep(0.05)
    await asyncio.to_thread(engine.stop)
    assert await asyncio.wait_for(watcher, 5) >= 1


def test_threads_from_many_loops(engine: AsyncEngine, model: Model) -> None:
    """Eight threads with five requests each, half of them left early: all complete."""
    failures: list[BaseException] = []

    async def five(thread: int) -> None:
        for index in range(5):
            stream = engine.generate(ask(model, f"t{thread}-{index}"))
            async with contextlib.aclosing(stream):
                async for output in stream:
                    if (thread + index) % 2 and output.token_ids:
                        break

    def work(thread: int) -> None:
        try:
            asyncio.run(five(thread))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    asyncio.run(idle(engine))
    assert engine.stats.num_used_cells == engine.stats.num_cached_cells


def test_an_idle_engine_uses_no_processor_time(engine: AsyncEngine) -> None:
    asyncio.run(idle(engine))
    time.sleep(0.3)
    own = psutil.Process()
    before = own.cpu_times()
    time.sleep(2)
    after = own.cpu_times()
    used_s = after.user + after.system - before.user - before.system
    assert used_s < 0.02 * 2


async def test_a_request_that_crosses_over_at_the_very_end_gets_an_answer(model: Model) -> None:
    engine = AsyncEngine(model, EngineConfig(model.path, n_ctx=512, n_threads=1))
    is_stopping = threading.Event()
    engine._engine.runner.warm_up = lambda: is_stopping.wait(60)
    engine.start()
    last = asyncio.create_task(collect(engine, ask(model, "last")))
    while not engine._commands:
        await asyncio.sleep(0)
    stop = asyncio.create_task(asyncio.to_thread(engine.stop))
    while not engine._stopping:
        await asyncio.sleep(0)
    is_stopping.set()
    [output] = await asyncio.wait_for(last, 60)
    assert isinstance(output.error, UnavailableError)
    await stop
