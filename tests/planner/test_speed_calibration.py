"""Calibration: a made-up machine is measured, then asked about other models."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import ClassVar

import pytest
from speed_cases import LLAMA2_7B, SMALL, known

from edgeserve.errors import UsageError
from edgeserve.planner.speed import predict
from edgeserve.planner.speed_calibration import (
    Measurement,
    calibrate_from,
    calibration_from_json,
    calibration_to_json,
)
from edgeserve.planner.speed_step import SpeedFit, load_fit
from edgeserve.planner.speed_terms import ModelWork, SpeedDevice, SpeedSettings, terms


@pytest.fixture(scope="module")
def fit() -> SpeedFit:
    return load_fit()


class TestCalibration:
    """A made-up machine: slower memory than its class, faster compute, twice the overhead."""

    CPU = SpeedDevice("cpu", "big", 50.0, 0.4)
    TRUE: ClassVar = {"weights": 1.5, "kv": 1.2, "attention": 0.8, "batch": 0.8, "fixed": 2.0}
    TRUE_PROMPT: ClassVar = {"matmul": 0.6, "tiles": 0.9, "attention": 1.3, "weights": 1.1, "fixed": 2.0}

    def seconds(self, kind: str, work: ModelWork, settings: SpeedSettings, fit: SpeedFit) -> float:
        step = "decode" if kind == "decode" else "prefill"
        true = self.TRUE if step == "decode" else self.TRUE_PROMPT
        costs = terms("decode" if kind == "decode" else "prefill", work, self.CPU, settings) or ()
        return sum(cost.peak_s * math.exp(fit.log_factor(cost)) * true[cost.name] for cost in costs)

    def measured(self, fit: SpeedFit, *works: ModelWork) -> list[Measurement]:
        asked = [
            ("decode", SpeedSettings(num_resident=16)),
            ("decode", SpeedSettings(num_resident=4096)),
            ("decode", SpeedSettings(num_resident=16, num_sequences=8)),
            ("prefill", SpeedSettings(n_prompt=512)),
        ]
        return [
            Measurement(
                "decode" if kind == "decode" else "prefill", work, s, self.seconds(kind, work, s, fit)
            )
            for work in works
            for kind, s in asked
        ]

    def test_another_model_is_predicted_better_and_narrower(self, fit: SpeedFit) -> None:
        larger = replace(
            LLAMA2_7B, n_layer=40, weight_bytes=7.4e9, active_weight_bytes=7.4e9, active_params=13e9
        )
        medium = replace(
            LLAMA2_7B, n_layer=24, weight_bytes=2e9, active_weight_bytes=2e9, active_params=3.4e9
        )
        calibration = calibrate_from(self.measured(fit, LLAMA2_7B, medium), self.CPU, fit)
        settings = SpeedSettings(num_resident=1024)
        before = predict(larger, self.CPU, settings, fit=fit)
        after = predict(larger, self.CPU, settings, calibration=calibration, fit=fit)
        for kind, old, new, tokens in (
            ("decode", before.decode_tok_s, after.decode_tok_s, 1),
            ("prefill", before.prefill_tok_s, after.prefill_tok_s, 512),
        ):
            truth = tokens / self.seconds(kind, larger, settings, fit)
            assert known(new).mid == pytest.approx(truth, rel=0.06)
            assert known(new).low < truth < known(new).high
            assert known(new).high / known(new).low < 0.4 * known(old).high / known(old).low
        assert after.basis == "Calibrated on this device (cpu)."

    def test_one_measurement_says_less_of_other_models(self, fit: SpeedFit) -> None:
        calibration = calibrate_from(self.measured(fit, SMALL)[:1], self.CPU, fit)

        def spread(work: ModelWork) -> float:
            speed = predict(work, self.CPU, SpeedSettings(num_resident=16), calibration=calibration, fit=fit)
            return known(speed.decode_tok_s).high / known(speed.decode_tok_s).low

        assert spread(SMALL) < 1.5
        assert spread(LLAMA2_7B) > 1.3 * spread(SMALL)

    def test_figures_are_the_machines(self, fit: SpeedFit) -> None:
        medium = replace(
            LLAMA2_7B, n_layer=24, weight_bytes=2e9, active_weight_bytes=2e9, active_params=3.4e9
        )
        calibration = calibrate_from(self.measured(fit, LLAMA2_7B, medium), self.CPU, fit)
        weights = next(
            t for t in terms("decode", LLAMA2_7B, self.CPU, SpeedSettings()) or () if t.name == "weights"
        )
        rate = 3.75 / (weights.peak_s * math.exp(fit.log_factor(weights)) * self.TRUE["weights"])
        assert calibration.bandwidth_gb_s == pytest.approx(rate, rel=0.1)
        assert set(calibration.gflops) == {"q"}
        assert calibration.overhead_s is not None
        assert calibration.overhead_s > 0

    def test_decode_alone_calibrates_decode_alone(self, fit: SpeedFit) -> None:
        calibration = calibrate_from(self.measured(fit, LLAMA2_7B)[:3], self.CPU, fit)
        assert calibration.prefill.names == ()
        assert predict(LLAMA2_7B, self.CPU, calibration=calibration, fit=fit).prefill_tok_s is not None

    def test_document_reads_back_unchanged(self, fit: SpeedFit) -> None:
        for count in (1, 4):
            calibration = calibrate_from(self.measured(fit, LLAMA2_7B)[:count], self.CPU, fit)
            assert calibration_from_json(calibration_to_json(calibration)) == calibration

    @pytest.mark.parametrize(
        "text",
        ["", "[]", "{}", '{"backend": "cpu", "decode": 3}', '{"backend": "cpu", "decode": {"names": ["a"]}}'],
    )
    def test_other_documents_are_refused(self, text: str) -> None:
        with pytest.raises(UsageError):
            calibration_from_json(text)

    @pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
    def test_impossible_times_are_refused(self, fit: SpeedFit, seconds: float) -> None:
        with pytest.raises(UsageError):
            calibrate_from([Measurement("decode", LLAMA2_7B, SpeedSettings(), seconds)], self.CPU, fit)
        with pytest.raises(UsageError):
            calibrate_from([], self.CPU, fit)
