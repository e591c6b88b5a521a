"""AMX is tried in a child, and a child that dies of it is believed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from edgeserve.amx_guard import Build, Verdict, judge, this_build

WITH_AMX = "CPU : AVX2 = 1 | AVX512 = 1 | AMX_INT8 = 1 | OPENMP = 1 | "
CPU = frozenset({"avx2", "avx512f", "amx_int8"})
Child = Callable[[Path, int], Sequence[str]]


class Children:
    """Commands for children that run `code`; counts how many were asked for."""

    def __init__(self, code: str) -> None:
        self.code = code
        self.num_started = 0

    def __call__(self, model: Path, n_threads: int) -> list[str]:
        self.num_started += 1
        return [sys.executable, "-c", self.code]


def dies_of(signal_name: str) -> Children:
    return Children(f"import os, signal; os.kill(os.getpid(), signal.{signal_name})")


@pytest.fixture
def build(tmp_path: Path) -> Build:
    library = tmp_path / "libggml-cpu.so"
    library.write_bytes(b"library")
    return Build(WITH_AMX, library, ("f32", "q4_0"), "a CPU", CPU)


@pytest.fixture
def decide(tmp_path: Path) -> Callable[[Build, Child], Verdict]:
    def decide(build: Build, children: Child) -> Verdict:
        return judge(
            Path("m.gguf"), 1, read_build=lambda _: build, cache=tmp_path / "cache/amx.json", command=children
        )

    return decide


Decide = Callable[[Build, Child], Verdict]


def changed(build: Build, **changes: object) -> Build:
    values = {name: getattr(build, name) for name in build.__slots__}
    return Build(**{**values, **changes})


def test_a_build_without_amx_starts_no_child(build: Build, decide: Decide) -> None:
    children = dies_of("SIGILL")
    assert decide(changed(build, system_info="CPU : AVX2 = 1 | AMX_INT8 = 0 | "), children) == Verdict(True)
    assert children.num_started == 0


def test_a_child_that_dies_of_an_illegal_instruction_keeps_amx_off_from_then_on(
    build: Build, decide: Decide
) -> None:
    children = dies_of("SIGILL")
    first, second = decide(build, children), decide(build, children)
    assert not first.is_safe
    assert "illegal instruction" in first.note
    assert second == first
    assert children.num_started == 1


def test_a_child_that_lives_is_asked_once(build: Build, decide: Decide) -> None:
    children = Children("pass")
    assert decide(build, children) == decide(build, children) == Verdict(True)
    assert children.num_started == 1


@pytest.mark.parametrize("what", ["library", "cpu", "tensors"])
def test_another_library_cpu_or_kind_of_tensor_is_tried_again(
    build: Build, decide: Decide, what: str
) -> None:
    decide(build, Children("pass"))
    if what == "library":
        build.library_path.write_bytes(b"another library")
    elif what == "cpu":
        build = changed(build, cpu="another CPU")
    else:
        build = changed(build, tensor_types=("f32", "q8_0"))
    assert not decide(build, dies_of("SIGILL")).is_safe


def test_a_child_that_was_killed_or_ended_with_an_error_proves_nothing_and_is_not_remembered(
    build: Build, decide: Decide
) -> None:
    assert decide(build, dies_of("SIGKILL")).is_safe
    assert decide(build, Children("raise SystemExit(1)")).is_safe
    assert not decide(build, dies_of("SIGILL")).is_safe


def test_a_cpu_that_does_not_list_amx_needs_no_child(build: Build, decide: Decide) -> None:
    children = Children("pass")
    verdict = decide(changed(build, cpu_flags=frozenset({"avx2"})), children)
    assert not verdict.is_safe
    assert "AMX stays off" in verdict.note
    assert children.num_started == 0


def test_a_damaged_cache_is_as_good_as_none(build: Build, decide: Decide, tmp_path: Path) -> None:
    cache = tmp_path / "cache/amx.json"
    cache.parent.mkdir()
    for content in ("", "[1]", '{"a": "b"}', "\0"):
        cache.write_text(content)
        assert decide(build, Children("pass")) == Verdict(True)


def test_a_cache_that_cannot_be_written_costs_only_another_try(build: Build, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    children = Children("pass")
    for _ in range(2):
        verdict = judge(
            Path("m.gguf"), 1, read_build=lambda _: build, cache=blocked / "amx.json", command=children
        )
        assert verdict == Verdict(True)
    assert children.num_started == 2


def test_this_build_names_the_library_and_what_the_model_is_made_of(model_path: Path) -> None:
    build = this_build(model_path)
    assert "ggml" in build.library_path.name or "llama" in build.library_path.name
    assert build.library_path.is_file()
    assert "q4_1" in build.tensor_types
    assert os.fspath(build.library_path) in build.key
