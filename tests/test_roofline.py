"""Measured speeds against the bounds of a machine, with figures small enough to check by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from edgeserve.doctor import server_check
from edgeserve.doctor.observed import Observed
from edgeserve.doctor.roofline import CALIBRATED, VENDOR, Peak, Peaks, peaks_of, roofline, roofline_lines
from edgeserve.planner.device_search import find_profile
from edgeserve.planner.speed_calibration import Calibration
from edgeserve.planner.speed_terms import ModelWork
from edgeserve.planner.target import described_target

# 1 GB of weights, 1 GFLOP a token, 1 MB of cache for each resident token.
WORK = ModelWork(
    n_layer=10,
    weight_bytes=1e9,
    active_weight_bytes=1e9,
    active_params=4e8,
    quant_class="q",
    output_params=1e8,
    kv_bytes_per_token=1e6,
)
SEEN = Observed(
    num_requests=10,
    decode_step_s=0.05,
    decodes_per_step=2.0,
    mean_prompt_tokens=100.0,
    mean_output_tokens=100.0,
    prefill_tok_s=200.0,
)
PEAKS = Peaks(Peak(50.0, VENDOR), Peak(500.0, CALIBRATED))


def test_a_decode_step_reads_the_weights_once_and_each_streams_context() -> None:
    decode, _ = roofline(SEEN, WORK, PEAKS)
    # 1 GB + 2 streams of 150 resident tokens = 1.3 GB in 50 ms; 2 GFLOP in the same time.
    assert decode.phase == "decode"
    assert decode.tok_s == pytest.approx(40.0)
    assert decode.gb_s == pytest.approx(26.0)
    assert decode.gflops == pytest.approx(40.0)
    # 1.3 GB at 50 GB/s take 26 ms, the arithmetic 4 ms.
    assert decode.bound_by == "memory"
    assert decode.bound_tok_s == pytest.approx(2 / 0.026)
    assert decode.share == pytest.approx(0.52)


def test_a_prompt_is_bound_by_arithmetic() -> None:
    _, prefill = roofline(SEEN, WORK, PEAKS)
    # 100 tokens of 0.8 GFLOP, 0.2 for one row of logits: 80.2 GFLOP at 500 a second; 1 GB is read in 20 ms.
    assert (prefill.phase, prefill.bound_by) == ("prefill", "arithmetic")
    assert prefill.tok_s == pytest.approx(200.0)
    assert prefill.bound_tok_s == pytest.approx(100 / (80.2 / 500))
    assert prefill.gflops == pytest.approx(160.4)


def test_the_bound_and_its_source_are_said() -> None:
    decode, prefill = roofline_lines(roofline(SEEN, WORK, PEAKS))
    assert decode.startswith("decode 40.0 tok/s, 52 % of the 76.9 that 50.0 GB/s allow (the device's peak)")
    assert "500 GFLOP/s allow (the most that `edgeserve devices calibrate` reached here)" in prefill


def test_without_a_bound_what_is_done_is_said_and_how_to_learn_it() -> None:
    points = roofline(SEEN, WORK, Peaks())
    assert {point.share for point in points} == {None}
    decode, prefill, hint = roofline_lines(points)
    assert "at least 26.0 GB/s read" in decode
    assert "160 GFLOP/s computed" in prefill
    assert "devices calibrate" in hint


def test_what_was_not_measured_has_no_point() -> None:
    assert [point.phase for point in roofline(replace(SEEN, prefill_tok_s=None), WORK, PEAKS)] == ["decode"]
    assert roofline(Observed(), WORK, PEAKS) == []
    assert roofline_lines([]) == []


def test_peaks_are_the_vendors_or_else_what_was_reached() -> None:
    target = described_target(find_profile("RTX 4090"))
    on_card = peaks_of(target, WORK, 99)
    assert on_card is not None
    assert on_card.bandwidth_gb_s == Peak(target.profile.bandwidth_gb_s or 0.0, VENDOR)
    assert on_card.gflops is not None
    assert on_card.gflops.value > 10_000
    assert peaks_of(target, WORK, 5) is None, "layers on two devices have no single roof"
    assert peaks_of(target, WORK, 0) == Peaks(), "of a card's host nothing is known"
    reached = Calibration("cpu", bandwidth_gb_s=12.5, gflops={"q": 80.0})
    here = replace(target, accelerators=(), calibrations={"cpu": reached})
    assert peaks_of(here, WORK, -1) == Peaks(Peak(12.5, CALIBRATED), Peak(80.0, CALIBRATED))


def test_the_roof_is_that_of_this_machine_and_of_a_file_that_is_here(
    model_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = replace(SEEN, model_path=str(model_path))
    roof = server_check.roof_above(seen, "127.0.0.1:8080")
    assert [point.phase for point in roof] == ["decode", "prefill"]
    assert server_check.roof_above(seen, "http://box.example:8080") == []
    assert server_check.roof_above(SEEN, "127.0.0.1:8080") == []
    server_check.report(seen, as_json=False, roof=roof)
    assert "decode 40.0 tok/s" in capsys.readouterr().out
    server_check.report(seen, as_json=True, roof=roof)
    document = json.loads(capsys.readouterr().out)
    assert [point["phase"] for point in document["roofline"]] == ["decode", "prefill"]
