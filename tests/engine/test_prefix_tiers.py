"""Prefixes that lost their slot or their process: what comes back, from where, and what must not."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import Result, engine_of, equal_or_close, request, run, step
from zoo import write_model

from edgeserve.engine.engine import Engine
from edgeserve.engine.sampling_params import SamplingParams
from edgeserve.errors import UsageError
from edgeserve.llama import Model

GREEDY = SamplingParams(temperature=0, max_tokens=8, logprobs=2)
SYSTEM = "<|im_start|>system\nYou are " + "a helpful assistant who answers questions briefly. " * 38
OTHER = "<|im_start|>system\nBe brief. " * 15
NUMBERED = [f"<|im_start|>system\nNumber {n}. " + "You answer briefly. " * 5 for n in range(5)]
"""Prompts whose state takes more than a third of a MiB in the small model, and less than a half."""
LAYOUTS = [{"kv_unified": False}, {"kv_unified": True}, {"flash_attn": "on"}, {"type_k": "q8_0"}]


def prompt(model: Model, question: str, system: str = "") -> list[int]:
    """By default with a system prompt of a few hundred tokens; in the small model each byte is one."""
    system = system or (SYSTEM if model.n_vocab > 1000 else SYSTEM[:400])
    text = f"{system}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    return model.tokenize(text, add_special=True, parse_special=True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """Random weights, and a vocabulary of bytes."""
    made = Model(write_model("llama", tmp_path_factory.mktemp("tiny") / "tiny.gguf"))
    yield made
    made.close()


def ask(engine: Engine, token_ids: list[int], **fields: object) -> Result:
    return run(engine, request("a", token_ids, GREEDY, **fields))["a"]


def num_cached(engine: Engine, token_ids: list[int], **fields: object) -> int:
    return ask(engine, token_ids, **fields).timings.num_cached_tokens


def system_tokens(model: Model) -> int:
    a, b = prompt(model, "Who?"), prompt(model, "Ah!")
    return next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)


def files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.prefix"))


def test_a_system_prompt_comes_back_after_a_restart(model: Model, tmp_path: Path) -> None:
    assert system_tokens(model) >= 300
    check_restart(model, {"n_seq_max": 2, "n_ctx": 2048, "cache_disk": str(tmp_path / "cache")})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_restart_loses_no_prefix_whatever_cells_look_like(
    tiny: Model, tmp_path: Path, layout: dict[str, object]
) -> None:
    check_restart(tiny, {"n_seq_max": 2, "n_ctx": 2048, "cache_disk": str(tmp_path / "cache"), **layout})


def check_restart(model: Model, settings: dict[str, object]) -> None:
    first, second = prompt(model, "Who wrote Hamlet?"), prompt(model, "What is the capital of France?")
    with engine_of(model, **settings) as engine:
        ask(engine, first)
    with engine_of(model, **settings | {"cache_disk": ""}) as engine:
        clean = ask(engine, second)
        assert clean.timings.num_cached_tokens == 0
    with engine_of(model, **settings) as engine:
        again = ask(engine, second)
        assert again.timings.num_cached_tokens >= system_tokens(model)
        assert equal_or_close(again, clean)
        stats = engine.stats().prefix_cache
        assert (stats.hits_total, stats.disk.num_items) == ({"disk": 1}, 1)
        # From now on the system prompt is resident, and nothing is read again.
        assert num_cached(engine, prompt(model, "Why?")) >= system_tokens(model)
        assert engine.stats().prefix_cache.hits_total == {"disk": 1}


def test_only_the_owner_can_read_what_is_on_disk(tiny: Model, tmp_path: Path) -> None:
    directory = tmp_path / "cache"
    directory.mkdir(mode=0o755)
    secret = "a key that nobody may see"
    with engine_of(tiny, n_seq_max=1, n_ctx=1024, cache_disk=str(directory)) as engine:
        ask(engine, prompt(tiny, "Why?"), cache_namespace=secret)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    (path,) = directory.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert secret.encode() not in path.read_bytes()


def test_other_namespaces_models_and_settings_start_clean(tiny: Model, tmp_path: Path) -> None:
    settings = {"n_seq_max": 1, "n_ctx": 1024, "cache_disk": str(tmp_path)}
    asked = prompt(tiny, "Why?")
    with engine_of(tiny, **settings) as engine:
        ask(engine, asked, cache_namespace="alice")
    with engine_of(tiny, **settings) as engine:
        assert num_cached(engine, asked, cache_namespace="bob") == 0
        assert num_cached(engine, asked, cache_namespace="alice", cache_prompt=False) == 0
    with engine_of(tiny, **settings, flash_attn="on") as engine:
        assert num_cached(engine, asked, cache_namespace="alice") == 0
    with engine_of(tiny, **settings) as engine:
        assert num_cached(engine, asked, cache_namespace="alice") == len(asked) - 1


def test_a_file_that_another_model_made_is_not_believed(tiny: Model, tmp_path: Path) -> None:
    settings = {"n_seq_max": 1, "n_ctx": 1024, "cache_disk": str(tmp_path)}
    asked = prompt(tiny, "Why?")
    with engine_of(tiny, **settings) as engine:
        ask(engine, asked)
    (path,) = files(tmp_path)
    touched = Path(tiny.path).stat().st_mtime_ns
    copy = tmp_path / "model.gguf"
    copy.symlink_to(tiny.path)
    other = Model(copy)
    with engine_of(other, **settings) as engine:  # the same weights under another name
        assert num_cached(engine, asked) == 0
    other.close()
    assert path.exists()
    assert Path(tiny.path).stat().st_mtime_ns == touched


DAMAGES = {
    "emptied": lambda data: b"",
    "cut short": lambda data: data[: len(data) // 2],
    "longer": lambda data: data + b"x",
    "foreign": lambda data: b"x" * 5000,
    "head changed": lambda data: data[:60] + bytes([data[60] ^ 1]) + data[61:],
    "state changed": lambda data: data[:-5000] + bytes([data[-5000] ^ 1]) + data[-4999:],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_as_good_as_none(tiny: Model, tmp_path: Path, damage: str) -> None:
    settings = {"n_seq_max": 1, "n_ctx": 1024, "cache_disk": str(tmp_path)}
    asked = prompt(tiny, "Why?")
    with engine_of(tiny, **settings) as engine:
        whole = ask(engine, asked)
    (path,) = files(tmp_path)
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    with engine_of(tiny, **settings) as engine:
        again = ask(engine, asked)
    assert (again.timings.num_cached_tokens, again.token_ids) == (0, whole.token_ids)


def test_a_full_directory_gives_up_the_file_unused_for_longest(tiny: Model, tmp_path: Path) -> None:
    settings = {"n_seq_max": 1, "n_ctx": 1024, "cache_disk": str(tmp_path), "cache_disk_mib": 1}
    for system in NUMBERED:
        with engine_of(tiny, **settings) as engine:
            ask(engine, prompt(tiny, "Why?", system))
        assert sum(path.stat().st_size for path in files(tmp_path)) <= 1 << 40
    assert len(files(tmp_path)) == 2
    with engine_of(tiny, **settings) as engine:
        assert num_cached(engine, prompt(tiny, "How?", NUMBERED[-1])) > 100
        assert num_cached(engine, prompt(tiny, "How?", NUMBERED[0])) < 40


def test_a_prefix_larger_than_the_bound_is_not_written(tiny: Model, tmp_path: Path) -> None:
    with engine_of(tiny, n_seq_max=1, n_ctx=1024, cache_disk=str(tmp_path), cache_disk_mib=1) as engine:
        ask(engine, prompt(tiny, "Why?", SYSTEM[:700]))
    assert files(tmp_path) == []


def test_a_directory_that_cannot_be_had_is_refused(tiny: Model, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(UsageError, match="cannot be used"),
        engine_of(tiny, n_ctx=512, n_seq_max=1, cache_disk=str(tmp_path / "file")),
    ):
        pass


def test_what_is_idle_comes_to_disk_without_an_orderly_end(tiny: Model, tmp_path: Path) -> None:
    settings = {"n_seq_max": 2, "n_ctx": 2048, "cache_disk": str(tmp_path)}
    asked = prompt(tiny, "Why?")
    with engine_of(tiny, **settings) as engine:
        ask(engine, asked)
        engine.idle()
        engine.tiers._disk.close()
        assert len(files(tmp_path)) == 1
        engine.idle()
        assert len(files(tmp_path)) == 1


def test_a_request_that_ends_while_the_disk_is_read_is_gone(tiny: Model, tmp_path: Path) -> None:
    settings = {"n_seq_max": 1, "n_ctx": 1024, "cache_disk": str(tmp_path)}
    asked = prompt(tiny, "Why?")
    with engine_of(tiny, **settings) as engine:
        ask(engine, asked)
    with engine_of(tiny, **settings) as engine:
        engine.add(request("a", asked, GREEDY))
        assert [item.waits_for for item in engine.stats().waiting] == ["its prefix from disk"]
        assert engine.abort("a") is not None
        assert engine.tiers.fetching == []
        assert num_cached(engine, asked) == len(asked) - 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_chat_that_lost_its_slot_comes_back_from_ram(tiny: Model, layout: dict) -> None:
    settings = {"n_seq_max": 1, "n_ctx": 1024, "cache_ram_mib": 64, **layout}
    mine = prompt(tiny, "What is the capital of France?")
    other = prompt(tiny, "Who wrote Hamlet?", OTHER)
    with engine_of(tiny, **settings) as engine:
        first = ask(engine, mine)
        assert num_cached(engine, other) < 40
        again = ask(engine, mine)
        assert again.timings.num_cached_tokens == len(mine) - 1
        assert equal_or_close(again, first)
        stats = engine.stats().prefix_cache
        assert stats.hits_total == {"ram": 1}
        assert 0 < stats.ram.num_bytes <= stats.ram.limit_bytes


def test_ram_is_bounded_and_gives_up_the_oldest(tiny: Model) -> None:
    with engine_of(tiny, n_seq_max=1, n_ctx=1024, cache_ram_mib=1) as engine:
        for system in NUMBERED:
            ask(engine, prompt(tiny, "Why?", system))
            assert engine.stats().prefix_cache.ram.num_bytes <= 1 << 40
        assert num_cached(engine, prompt(tiny, "How?", NUMBERED[3])) > 100
        assert num_cached(engine, prompt(tiny, "How?", NUMBERED[0])) < 40


def test_ram_keeps_namespaces_apart(tiny: Model) -> None:
    mine, other = prompt(tiny, "Why?"), prompt(tiny, "Why?", OTHER)
    with engine_of(tiny, n_seq_max=1, n_ctx=1024, cache_ram_mib=64) as engine:
        ask(engine, mine, cache_namespace="alice")
        ask(engine, other)
        assert num_cached(engine, mine, cache_namespace="bob") == 0
        assert num_cached(engine, mine, cache_namespace="alice") == len(mine) - 1


def test_saving_that_would_keep_a_stream_waiting_is_left_out(tiny: Model) -> None:
    mine, other = prompt(tiny, "Why?"), prompt(tiny, "Why?", OTHER)
    with engine_of(tiny, n_seq_max=2, n_ctx=2048, cache_ram_mib=64) as engine:
        results = {"stream": Result(), "b": Result()}
        ask(engine, mine)
        engine.add(request("stream", other[:40], GREEDY))
        while not results["stream"].token_ids:
            step(engine, results)
        engine.tiers._copy_bytes_s = 1.0
        engine.add(request("b", other[1:], GREEDY))
        step(engine, results)
        assert engine.stats().prefix_cache.num_unsaved_total == 1
        assert engine.stats().prefix_cache.ram.num_items == 0


def test_what_ram_gives_up_goes_to_disk(tiny: Model, tmp_path: Path) -> None:
    settings = {"n_seq_max": 1, "n_ctx": 1024, "cache_ram_mib": 1, "cache_disk": str(tmp_path)}
    with engine_of(tiny, **settings) as engine:
        for system in NUMBERED:
            ask(engine, prompt(tiny, "Why?", system))
        assert num_cached(engine, prompt(tiny, "How?", NUMBERED[0])) > 100
        assert engine.stats().prefix_cache.hits_total == {"disk": 1}


@pytest.mark.parametrize("unified", [False, True])
def test_two_chats_with_one_system_prompt_hit_from_their_second_turn(tiny: Model, unified: bool) -> None:
    with engine_of(tiny, n_seq_max=2, n_ctx=2048, kv_unified=unified) as engine:
        turns = {"a": prompt(tiny, "What is 2 + 2?"), "b": prompt(tiny, "Name a colour.")}
        for question in ("And then?", "Why is that?"):
            for name, token_ids in turns.items():
                answer = ask(engine, token_ids)
                more = tiny.tokenize(
                    f"<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n",
                    add_special=False,
                    parse_special=True,
                )
                kept = len(token_ids) + len(answer.token_ids) - 1
                turns[name] = [*token_ids, *answer.token_ids[:-1], *more]
                assert kept < len(turns[name])
        for token_ids in turns.values():
            known = len(token_ids) - len(more)
            assert num_cached(engine, token_ids) >= known


def test_idle_tokens_beside_a_stream_move_to_ram_and_come_back(tiny: Model) -> None:
    long = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    mine, other = prompt(tiny, "Why?"), prompt(tiny, "Why?", OTHER)
    with engine_of(tiny, n_seq_max=2, n_ctx=2048, kv_unified=True, cache_ram_mib=64) as engine:
        first = ask(engine, mine)
        run(engine, request("stream", other, long))
        assert engine.scheduler.kv_cache.slots[0].token_ids == []
        assert engine.stats().prefix_cache.ram.num_items == 1
        again = ask(engine, mine)
        assert again.timings.num_cached_tokens == len(mine) - 1
        assert equal_or_close(again, first)


def test_idle_tokens_that_nobody_would_keep_stay_beside_a_stream(tiny: Model) -> None:
    long = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    mine, other = prompt(tiny, "Why?"), prompt(tiny, "Why?", OTHER)
    with engine_of(tiny, n_seq_max=2, n_ctx=2048, kv_unified=True) as engine:
        ask(engine, mine)
        run(engine, request("stream", other, long))
        assert num_cached(engine, mine) == len(mine) - 1


def test_the_tiers_are_off_unless_asked_for(tiny: Model) -> None:
    with engine_of(tiny, n_seq_max=1, n_ctx=512) as engine:
        stats = engine.stats().prefix_cache
        assert (stats.ram.limit_bytes, stats.disk.limit_bytes) == (0, 0)
