"""Expected speed: the equations, predictions, and how well unseen devices are predicted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from speed_cases import EXPERTS, LLAMA2_7B, SMALL, known

from edgeserve.errors import UsageError
from edgeserve.planner.device import DeviceProfile
from edgeserve.planner.device_search import find_profile
from edgeserve.planner.speed import SpeedPart, predict, predict_split
from edgeserve.planner.speed_step import FIT_PATH, SpeedFit, load_fit
from edgeserve.planner.speed_terms import (
    ModelWork,
    SpeedDevice,
    SpeedSettings,
    quant_class,
    speed_device,
    terms,
)

ROOT = Path(__file__).resolve().parents[2]


def device(name: str, backend: str) -> SpeedDevice:
    return speed_device(find_profile(name).profile, backend)


@pytest.fixture(scope="module")
def fit() -> SpeedFit:
    return load_fit()


class TestEquations:
    def test_attention_flops_of_a_prompt_and_two_steps(self) -> None:
        """Two heads of 8, a prompt of 4, then two tokens: 10 + 11 pairs, 1,344 FLOPs."""
        work = replace(LLAMA2_7B, pair_flops=4 * 2 * 8)
        assert work.attention_flops(4, 0) + work.attention_flops(1, 4) + work.attention_flops(1, 5) == 1344

    def test_chunks_of_a_prompt_do_the_work_of_the_whole(self) -> None:
        whole = LLAMA2_7B.attention_flops(1000, 0)
        chunks = sum(LLAMA2_7B.attention_flops(250, done) for done in range(0, 1000, 250))
        assert chunks == pytest.approx(whole)

    def test_window_layers_stop_growing(self) -> None:
        work = replace(LLAMA2_7B, kv_bytes_per_token=0, window_kv_bytes_per_token=100, n_swa=512)
        assert work.context_bytes(100) == 10_000
        assert work.context_bytes(512) == work.context_bytes(100_000) == 51_200

    def test_recurrent_state_is_read_and_written_at_any_length(self) -> None:
        work = replace(LLAMA2_7B, kv_bytes_per_token=0, state_bytes=1000)
        assert work.context_bytes(0) == work.context_bytes(9999) == 2000

    def test_experts_read_more_weights_with_more_tokens(self) -> None:
        reads = [EXPERTS.weights_read_bytes(n) for n in (1, 2, 8, 64, 512)]
        assert reads[0] == pytest.approx(3e9)
        assert reads == sorted(reads)
        assert reads[1] < 6e9
        assert reads[-1] == pytest.approx(30e9, rel=1e-6)
        assert LLAMA2_7B.weights_read_bytes(1) == LLAMA2_7B.weights_read_bytes(512) == 3.75e9

    def test_decode_is_bytes_over_bandwidth_at_peak(self) -> None:
        gpu = SpeedDevice("cuda", "ada", 1000, 80)
        costs = {
            t.name: t.peak_s for t in terms("decode", LLAMA2_7B, gpu, SpeedSettings(num_resident=2000)) or ()
        }
        assert costs["weights"] == pytest.approx(3.75e-3)
        assert costs["kv"] == pytest.approx(524_288 * 2000 / 1e12)
        assert "batch" not in costs

    def test_prompt_is_flops_over_compute_at_peak(self) -> None:
        gpu = SpeedDevice("cuda", "ada", 1000, 80)
        costs = {
            t.name: t.peak_s for t in terms("prefill", LLAMA2_7B, gpu, SpeedSettings(n_prompt=1024)) or ()
        }
        assert costs["matmul"] == pytest.approx(2 * (6.48e9 * 1024 + 0.131e9) / 80e12)
        assert costs["weights"] == pytest.approx(2 * 3.75e-3), "two batches of 512 read the weights twice"

    def test_parts_add_up_to_the_whole(self) -> None:
        gpu = SpeedDevice("cuda", "ada", 1000, 80)
        settings = SpeedSettings(num_resident=2000, num_sequences=4)
        whole, half = (
            sum(t.peak_s for t in terms("decode", work, gpu, settings) or ())
            for work in (LLAMA2_7B, LLAMA2_7B.share(0.5))
        )
        assert 2 * half == pytest.approx(whole)

    @pytest.mark.parametrize(
        ("name", "family"),
        [
            ("Q4_0", "q"),
            ("q8_0", "q"),
            ("MXFP4", "q"),
            ("Q4_K_M", "k"),
            ("Q6_K", "k"),
            ("IQ4_XS", "iq"),
            ("BF16", "f16"),
        ],
    )
    def test_kernel_families(self, name: str, family: str) -> None:
        assert quant_class(name) == family


class TestDevice:
    def test_processor_beside_a_card_does_not_have_the_cards_bandwidth(self) -> None:
        host = device("rtx4090", "cpu")
        assert host.assumed
        assert host.bandwidth_gb_s == pytest.approx(51.2)

    def test_threads_beyond_fast_cores_do_not_count(self) -> None:
        profile = find_profile("13900k").profile
        assert speed_device(profile, "cpu", 32).tflops == speed_device(profile, "cpu", 8).tflops
        assert speed_device(profile, "cpu", 4).tflops == pytest.approx(
            0.5 * (speed_device(profile, "cpu").tflops or 0)
        )

    def test_apple_without_published_compute_is_estimated_by_its_cores(self) -> None:
        assert find_profile("m5-10").profile.fp32_tflops is None
        assert device("m5-10", "metal").tflops == pytest.approx(4.26)

    def test_workstation_cards_are_a_class(self) -> None:
        assert device("rtx6000ada", "cuda").workstation
        assert not device("rtx4090", "cuda").workstation


class TestPredictions:
    @pytest.mark.parametrize(
        ("name", "backend", "decode_tok_s", "prefill_tok_s"),
        [
            # llama.cpp discussions 15013 and 4167: Llama 2 7B Q4_0, tg128 and pp512.
            ("rtx4090", "cuda", 186.21, 11992.7),
            ("rtx3060", "cuda", 76.92, 2407.67),
            ("m2max-38", "metal", 65.95, 671.31),
            ("m4pro-20", "metal", 50.74, 439.78),
        ],
    )
    def test_published_figures_lie_inside(
        self, fit: SpeedFit, name: str, backend: str, decode_tok_s: float, prefill_tok_s: float
    ) -> None:
        settings = SpeedSettings(n_prompt=512, num_resident=64, flash_attn=False)
        speed = predict(LLAMA2_7B, device(name, backend), settings, fit=fit)
        decode, prefill = known(speed.decode_tok_s), known(speed.prefill_tok_s)
        assert decode.low < decode_tok_s < decode.high
        assert prefill.low < prefill_tok_s < prefill.high

    def test_a_full_context_slows_decode_and_prompts(self, fit: SpeedFit) -> None:
        gpu = device("rtx4060", "cuda")
        empty, full = (predict(LLAMA2_7B, gpu, SpeedSettings(num_resident=n), fit=fit) for n in (0, 16_384))
        assert known(full.decode_tok_s).mid < 0.6 * known(empty.decode_tok_s).mid
        assert known(full.prefill_tok_s).mid < known(empty.prefill_tok_s).mid
        assert full.decode_shares["kv"] > 0.3
        assert sum(full.decode_shares.values()) == pytest.approx(1)

    def test_sequences_share_the_reading_of_weights(self, fit: SpeedFit) -> None:
        gpu = device("rtx4060", "cuda")
        one, eight = (predict(LLAMA2_7B, gpu, SpeedSettings(num_sequences=n), fit=fit) for n in (1, 8))
        assert known(one.total_decode_tok_s) == known(one.decode_tok_s)
        assert known(eight.decode_tok_s) == known(one.decode_tok_s), "alone means alone"
        gain = known(eight.total_decode_tok_s).mid / known(one.total_decode_tok_s).mid
        assert 3 < gain < 8

    def test_many_sequences_on_a_processor_are_bound_by_its_compute(self, fit: SpeedFit) -> None:
        cpu = device("7950x", "cpu")
        speed = predict(LLAMA2_7B, cpu, SpeedSettings(num_sequences=64), fit=fit)
        assert known(speed.total_decode_tok_s).mid < 1.3 * known(speed.prefill_tok_s).mid

    def test_time_to_first_token_grows_with_the_new_part_of_the_prompt(self, fit: SpeedFit) -> None:
        speed = predict(LLAMA2_7B, device("m2-10", "metal"), fit=fit)
        short, long, cached = (known(speed.ttft_s(*n)) for n in ((512,), (8192,), (8192, 8000)))
        assert short.mid == pytest.approx(512 / known(speed.prefill_tok_s).mid)
        assert long.mid > 16 * short.mid, "attention makes long prompts more than proportional"
        assert cached.mid < short.mid

    def test_unknown_bandwidth_gives_no_figure(self, fit: SpeedFit) -> None:
        speed = predict(LLAMA2_7B, SpeedDevice("cuda", "ada", None, 30), fit=fit)
        assert speed.decode_tok_s is None
        assert speed.prefill_tok_s is None
        assert speed.ttft_s(100) is None

    def test_unknown_compute_leaves_decode(self, fit: SpeedFit) -> None:
        speed = predict(LLAMA2_7B, SpeedDevice("vulkan", "rdna3", 500, None), fit=fit)
        assert speed.decode_tok_s is not None
        assert speed.prefill_tok_s is None

    def test_where_data_say_little_intervals_are_wide(self, fit: SpeedFit) -> None:
        def spread(work: ModelWork, on: SpeedDevice) -> float:
            interval = known(predict(work, on, fit=fit).prefill_tok_s)
            return interval.high / interval.low

        cuda = device("rtx4070", "cuda")
        assert spread(LLAMA2_7B, cuda) < 2.5
        assert spread(LLAMA2_7B, device("rx6700xt", "vulkan")) > 10
        assert spread(LLAMA2_7B, device("n100", "cpu")) > 10
        assert spread(SMALL, cuda) > 1.3 * spread(LLAMA2_7B, cuda)
        assert spread(EXPERTS, cuda) > 1.5 * spread(LLAMA2_7B, cuda)
        assert spread(LLAMA2_7B, replace(cuda, architecture="next")) > spread(LLAMA2_7B, cuda)

    def test_half_on_the_host_costs_the_hosts_time(self, fit: SpeedFit) -> None:
        gpu, host = device("rtx4060", "cuda"), device("desktop-ddr4", "cpu")
        half = LLAMA2_7B.share(0.5)
        both = predict_split([SpeedPart(half, gpu), SpeedPart(half, host)], fit=fit)
        alone = [known(predict(half, on, fit=fit).decode_tok_s).mid for on in (gpu, host)]
        assert 1 / known(both.decode_tok_s).mid == pytest.approx(sum(1 / speed for speed in alone))

    def test_basis_tells_what_it_rests_on(self, fit: SpeedFit) -> None:
        assert (
            "36 other devices measured with cuda"
            in predict(LLAMA2_7B, device("rtx4090", "cuda"), fit=fit).basis
        )
        assert "assumed" in predict(LLAMA2_7B, device("rtx4090", "cpu"), fit=fit).basis
        assert "rough guess" in predict(LLAMA2_7B, SpeedDevice("sycl", "xe2", 400, 12), fit=fit).basis

    def test_nonsense_is_refused(self, fit: SpeedFit) -> None:
        with pytest.raises(UsageError):
            predict(LLAMA2_7B, device("rtx4090", "cuda"), SpeedSettings(num_sequences=0), fit=fit)
        with pytest.raises(UsageError):
            predict_split([], fit=fit)

    def test_every_profile_gives_figures_or_none_but_no_error(
        self, fit: SpeedFit, profiles: tuple[DeviceProfile, ...]
    ) -> None:
        for profile in profiles:
            for backend in profile.backends:
                speed = predict(
                    LLAMA2_7B, speed_device(profile, backend), SpeedSettings(num_sequences=4), fit=fit
                )
                for interval in (speed.decode_tok_s, speed.total_decode_tok_s, speed.prefill_tok_s):
                    assert interval is None or 0 < interval.low < interval.high < 1e7, profile.key


@pytest.fixture(scope="module")
def profiles() -> tuple[DeviceProfile, ...]:
    from edgeserve.planner.device import list_profiles

    return list_profiles()


class TestFitFile:
    def test_missing_or_broken_file_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="cannot be read"):
            load_fit(tmp_path / "none.json")
        broken = tmp_path / "broken.json"
        broken.write_text('{"factors": 3')
        with pytest.raises(UsageError, match="cannot be read"):
            load_fit(broken)


def test_unseen_devices_are_predicted_and_the_shipped_factors_are_current(tmp_path: Path) -> None:
    """The fit's own report, run as users run it, holds the bars; writing again gives the file that ships."""
    script, written = ROOT / "benchmarks" / "fit_speed.py", tmp_path / "fit.json"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, str(script), "--report", "--json", "--write", str(written)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    lines = {(line["group"], line["kind"]): line for line in json.loads(done.stdout)}
    decode, prefill = (lines["metal+cuda dense>=3B", kind] for kind in ("decode", "prefill"))
    assert decode["num_rows"] > 150
    assert decode["median_error"] <= 0.08
    assert decode["p90_error"] <= 0.25
    assert prefill["median_error"] <= 0.12
    assert min(decode["coverage"], prefill["coverage"]) >= 0.85
    assert min(lines["all", kind]["coverage"] for kind in ("decode", "prefill")) >= 0.85
    assert json.loads(written.read_text())["factors"] == pytest.approx(
        json.loads(FIT_PATH.read_text())["factors"], abs=2e-3
    )
