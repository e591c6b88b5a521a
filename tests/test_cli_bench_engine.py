"""`edgeserve bench --engine`: rows in llama-batched-bench's columns, from a child process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edgeserve.bench.engine_rows import EngineRow, rows_of, text_report
from edgeserve.bench.read_options import read_points
from edgeserve.cli import main
from edgeserve.commands.child import Child
from edgeserve.engine.batched_bench import Point
from edgeserve.errors import EdgeserveError


@pytest.fixture(autouse=True)
def _no_settings_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text("")
    monkeypatch.setenv("EDGESERVE_CONFIG", str(config))


def test_a_row_counts_as_llama_batched_bench_does() -> None:
    """PP 128, TG 128, B 8: N_KV 2048 apart, 1152 with one shared prompt."""
    apart = EngineRow(128, 128, 8, False, t_pp_s=(2.0,), t_tg_s=(4.0,)).json()
    assert (apart["n_kv"], apart["speed_pp"], apart["speed_tg"]) == (2048, 512.0, 256.0)
    assert (apart["t"], apart["speed"]) == (6.0, pytest.approx(341.333, abs=1e-3))
    shared = EngineRow(128, 128, 8, True, t_pp_s=(0.5,), t_tg_s=(4.0,)).json()
    assert (shared["n_kv"], shared["speed_pp"], shared["speed_tg"]) == (1152, 256.0, 256.0)


def test_repeats_of_a_point_are_one_row_with_medians() -> None:
    point = {"pp": 8, "tg": 4, "pl": 2, "is_shared": False}
    other = {**point, "pl": 1}
    timings = [
        {"point": which, "t_pp_s": t_pp_s, "t_tg_s": 1.0}
        for t_pp_s in (3.0, 1.0, 2.0)
        for which in (point, other)
    ]
    rows = rows_of(timings)
    assert [(row.pl, row.json()["t_pp"]) for row in rows] == [(2, 2.0), (1, 2.0)]
    text = text_report(rows, {"model": "m.gguf", "n_ctx": 64, "n_threads": 2, "flash_attn": "off"}, ["x"])
    head, *lines = text.splitlines()
    assert "median of 3 runs" in head
    assert lines[0].split()[:4] == ["PP", "TG", "B", "N_KV"]
    assert lines[1].split() == ["8", "4", "2", "24", "2.000", "8.00", "1.000", "8.00", "3.000", "8.00"]
    assert lines[-1] == "note  x"


def test_a_point_needs_room_for_all_and_for_each() -> None:
    point = Point(pp=100, tg=28, pl=4)
    assert point.fits(n_ctx=512, n_ctx_seq=128, n_seq_max=4)
    assert not point.fits(n_ctx=511, n_ctx_seq=512, n_seq_max=4)
    assert not point.fits(n_ctx=512, n_ctx_seq=127, n_seq_max=4)
    assert not point.fits(n_ctx=4096, n_ctx_seq=4096, n_seq_max=3)


def test_points_are_read() -> None:
    points = read_points({"npp": "16,32", "ntg": "4", "pps": True, "repeats": "2", "npl": None})
    assert (points.npp, points.ntg, points.npl, points.is_shared, points.repeats) == (
        (16, 32),
        (4,),
        (1, 4),
        True,
        2,
    )


def test_the_model_alone(model_path: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    command = ["bench", "--engine", str(model_path), "-npp", "16,900", "-ntg", "4", "-npl", "1,2", "-t", "1"]
    assert main([*command, "-c", "1024", "--repeats", "2", "--json", "--out", str(tmp_path)]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert [(row["pp"], row["tg"], row["pl"], row["n_kv"]) for row in found["rows"]] == [
        (16, 4, 1, 20),
        (16, 4, 2, 40),
    ]
    assert all(row["t_pp"] > 0 and row["t_tg"] > 0 for row in found["rows"])
    assert all(len(row["repeats"]["t_tg"]) == 2 for row in found["rows"])
    assert (found["n_threads"], found["n_ctx"]) == (1, 1024)
    # 900 tokens do not fit into a half of the context.
    left_out = [note.split(" was left out")[0] for note in found["warnings"] if " was left out" in note]
    assert left_out == [
        "PP 900, TG 4, B 1",
        "PP 900, TG 4, B 2",
    ]
    assert json.loads((tmp_path / "engine.json").read_text())["rows"] == found["rows"]


def test_a_shared_prompt_is_computed_once(model_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        "bench",
        "--engine",
        str(model_path),
        "-npp",
        "16",
        "-ntg",
        "2",
        "-npl",
        "2",
        "-pps",
        "-t",
        "1",
    ]
    assert main([*command, "--repeats", "1", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["n_kv"] == 20


def engine_document(**t_tg_s: float) -> dict[str, Any]:
    rows = [
        {"pp": pp, "tg": 10, "pl": int(name[1:]), "t_tg": seconds * (1 if pp == 64 else 2)}
        for name, seconds in t_tg_s.items()
        for pp in (64, 512)
    ]
    return {"schema": "edgeserve-engine-bench/1", "rows": rows}


def served_document(label: str, **figures: float) -> dict[str, Any]:
    spreads = {name: {"median": value} for name, value in figures.items()}
    case = {"label": label, "server": "A", "figures": spreads}
    return {"schema": "edgeserve-bench/1", "cases": [case]}


def test_the_gap_between_engine_and_client_has_its_parts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "engine.json").write_text(json.dumps(engine_document(b1=0.1, b4=0.2)))
    served = served_document("decode, 4 streams", tpot_p50_s=0.025, server_tpot_s=0.024)
    (tmp_path / "served.json").write_text(json.dumps(served))
    command = ["bench", "compare", str(tmp_path / "engine.json"), str(tmp_path / "served.json")]
    assert main(command) == 0
    (row,) = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("  4 ")]
    # 20 ms alone, 4 ms of scheduling and sampling, 1 ms of HTTP; 80 % are kept.
    assert row == ["4", "20.0", "ms", "24.0", "ms", "25.0", "ms", "+4.00", "ms", "+1.00", "ms", "80", "%"]
    assert main([*command, "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["rows"]
    assert (found["streams"], found["engine_s"], found["client_s"]) == (4, 0.02, 0.025)


def test_a_server_without_timings_leaves_the_parts_open(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "engine.json").write_text(json.dumps(engine_document(b1=0.1)))
    served = tmp_path / "served.json"
    served.write_text(json.dumps(served_document("decode, 1 stream", tpot_p50_s=0.02)))
    # A folder with an engine.json stands for it.
    assert main(["bench", "compare", str(tmp_path), str(served)]) == 0
    assert "n/a" in capsys.readouterr().out
    served.write_text(json.dumps(served_document("decode, 2 streams", tpot_p50_s=0.02)))
    assert main(["bench", "compare", str(tmp_path), str(served)]) == 2
    assert "streams in common" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--engine", "--url", "http://127.0.0.1:1"], "--url"),
        (["--engine", "--scenario", "decode"], "--scenario"),
        (["-npp", "16"], "--npp"),
        (["--engine", "-npl", "0"], "--npl"),
    ],
)
def test_what_does_not_go_together(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_missing_model_is_said_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--engine", "./no-such-file.gguf"]) == 3
    assert "no-such-file" in capsys.readouterr().err


def test_a_child_that_dies_is_an_error_with_its_end() -> None:
    with Child("edgeserve.no_such_module", {}) as child, pytest.raises(EdgeserveError, match="code 1"):
        list(child.answers())
