"""How long a stream was stalled by others' prompts: the engine's estimate against a machine whose costs are
known, on a clock of its own."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from types import SimpleNamespace

import pytest
from harness import engine_of, request

from edgeserve.engine.decode_alone import DecodeAlone
from edgeserve.engine.engine import Engine
from edgeserve.engine.model_runner import ModelRunner, SampledToken
from edgeserve.engine.sampling_params import SamplingParams
from edgeserve.engine.scheduler import Chunk
from edgeserve.llama import Model


class KnownMachine(ModelRunner):
    """Computes nothing: each step moves the clock by its cost, and what a step with prompts took longer than
    its decodes alone usually would is written down for every sequence that decoded in it."""

    def __init__(self, real: ModelRunner, noise: float, seed: int) -> None:
        self.now_s = 100.0
        self.stalled_s: Counter[str] = Counter()
        self.sample_s = 0.0
        self._real = real
        self._random = random.Random(seed)
        self._noise = noise

    def perf_counter(self) -> float:
        return self.now_s

    def prepare(self, sequence: object, placement: object) -> int:
        return 0

    def release(self, sequence: object) -> None:
        pass

    def close(self) -> None:
        self._real.close()

    def execute(self, chunks: Iterable[Chunk]) -> list[SampledToken]:
        chunks = tuple(chunks)
        decodes = [chunk for chunk in chunks if chunk.is_decode]
        depth = sum(chunk.first_pos for chunk in decodes)
        alone_s = (0.010 + 0.004 * len(decodes) + 8e-6 * depth) if decodes else 0.0
        prefill_s = 0.0016 * sum(chunk.num_tokens for chunk in chunks if not chunk.is_decode)
        factor = 1 + self._noise * self._random.uniform(-1, 1)
        if self._random.random() < 0.03:
            factor *= 3  # a hiccup of the machine
        duration_s = (alone_s + prefill_s) * factor
        self.now_s += duration_s
        for chunk in decodes if prefill_s else ():
            self.stalled_s[chunk.sequence.request_id] += duration_s - alone_s
        return [SampledToken(chunk, (40,) if chunk.samples else ()) for chunk in chunks]


def ask(engine: Engine, name: str, num_prompt: int, max_tokens: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    ids = [100 + ord(name[0])] * num_prompt
    engine.add(request(name, ids, params, cache_prompt=False))


def steps(engine: Engine, count: int) -> list[object]:
    return [output for _ in range(count) for output in engine.step()]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("num_streams", "prompt"), [(1, 20), (1, 1500), (3, 20), (3, 700)])
def test_the_estimate_is_within_15_percent(
    model: Model, monkeypatch: pytest.MonkeyPatch, num_streams: int, prompt: int, seed: int
) -> None:
    """Streams that decode, alone for a while; then prompts come in, one after the other."""
    with engine_of(model, n_seq_max=num_streams + 1, n_ctx=(num_streams + 1) * 3072) as engine:
        machine = KnownMachine(engine.runner, noise=0.15, seed=seed)
        engine.runner = machine
        monkeypatch.setattr(
            "edgeserve.engine.engine.time", SimpleNamespace(perf_counter=machine.perf_counter)
        )
        for index in range(num_streams):
            ask(engine, f"{index}", prompt, 1500)
        while (
            any(not sequence.is_decoding for sequence in engine.scheduler.running) or engine.scheduler.waiting
        ):
            engine.step()
        # What they stalled each other before their first steps alone rests on nothing.
        before = {item.request_id: item.stalled_s for item in engine.scheduler.running}
        known = dict(machine.stalled_s)
        steps(engine, 30)
        for index in range(3):
            ask(engine, f"x{index}", 900, 1)
            while len(engine.scheduler.running) + len(engine.scheduler.waiting) > num_streams:
                engine.step()
            steps(engine, 5)
        running = list(engine.scheduler.running)
        assert len(running) == num_streams
        for sequence in running:
            estimated_s = sequence.stalled_s - before[sequence.request_id]
            true_s = machine.stalled_s[sequence.request_id] - known.get(sequence.request_id, 0.0)
            assert true_s > 0.5
            assert estimated_s == pytest.approx(true_s, rel=0.15)


def test_nobody_is_stalled_by_steps_without_prompts(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_of(model, n_seq_max=2, n_ctx=1024) as engine:
        machine = KnownMachine(engine.runner, noise=0.5, seed=1)
        engine.runner = machine
        monkeypatch.setattr(
            "edgeserve.engine.engine.time", SimpleNamespace(perf_counter=machine.perf_counter)
        )
        ask(engine, "a", 300, 60)
        outputs = steps(engine, 80)
        assert not engine.has_work
        assert outputs[-1].timings.stalled_s == 0
        assert engine.stats().prefill_s_total + engine.stats().decode_s_total == pytest.approx(
            machine.now_s - 100
        )


def test_a_stall_is_never_more_than_the_decode(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_of(model, n_seq_max=4, n_ctx=4096) as engine:
        machine = KnownMachine(engine.runner, noise=0.9, seed=2)
        engine.runner = machine
        monkeypatch.setattr(
            "edgeserve.engine.engine.time", SimpleNamespace(perf_counter=machine.perf_counter)
        )
        for index in range(12):
            ask(engine, f"{index}", 40 * index + 1, 5 + 7 * (index % 5))
        timings = [output.timings for output in steps(engine, 400) if output.is_finished]
        assert len(timings) == 12
        assert all(0 <= item.stalled_s <= item.decode_s + 1e-9 for item in timings)
        assert any(item.stalled_s for item in timings)


def test_the_latest_steps_at_the_same_depth_count() -> None:
    alone = DecodeAlone()
    assert alone.estimate_s(1, 100) is None
    for depth in range(100, 160):
        alone.observe(1, depth, 0.010 + depth * 1e-5)
    assert alone.estimate_s(1, 100) == pytest.approx(0.011, rel=0.01)
    assert alone.estimate_s(1, 3000) == pytest.approx(0.0115, rel=0.01)
    assert alone.estimate_s(2, 100) is None
    for _ in range(21):
        alone.observe(1, 159, 0.030)
    assert alone.estimate_s(1, 159) == 0.030
