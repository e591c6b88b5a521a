"""What a plan chooses, and what it says about it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import plan_cases as cases
import pytest
import zoo
from plan_cases import GIB, MIB, cpu_machine, estimate, gpu_machine

from edgeserve.errors import GGUFError, OutOfMemoryError, UsageError
from edgeserve.gguf import read_header
from edgeserve.planner.device_search import find_profile
from edgeserve.planner.goals import FixedSettings, Goals
from edgeserve.planner.plan import make_plan
from edgeserve.planner.prove import prove
from edgeserve.planner.refuse import refuse_if_misfit
from edgeserve.planner.target import described_target, measured_target
from edgeserve.planner.this_machine import GgmlDevice, this_machine

# --- contexts and budgets


def test_a_huge_trained_context_is_not_taken_by_itself(tmp_path: Path) -> None:
    model = cases.header(tmp_path, n_ctx_train=1_048_576)
    plan = estimate(model, gpu_machine(8 * GIB, 8 * GIB))
    assert plan.fits
    assert 4096 <= plan.best.choice.n_ctx_seq < 1_048_576
    assert any("from 1,048,576 trained for" in reason for reason in plan.reasons)
    assert plan.config.n_ctx == plan.settings.n_ctx


def test_the_budget_is_what_is_free_and_names_the_limit(tmp_path: Path) -> None:
    model = cases.header(tmp_path, n_layer=4, n_embd=1024, n_ff=2048, n_head=8, n_head_kv=8)
    free = cpu_machine(1536 * MIB)
    assert free.host_pool.usable_bytes == 1536 * MIB - 192 * MIB
    assert "1.5 GiB free of 16.0 (14.5 used by other programs)" in free.host_pool.reason
    plan = estimate(model, free)
    assert plan.fits
    assert plan.best.uses[0].high_bytes <= free.host_pool.usable_bytes

    limited = cpu_machine(200 * MIB, limit_bytes=512 * MIB)
    assert limited.host_pool.usable_bytes == 175 * MIB
    assert "memory.max" in limited.host_pool.reason


def test_the_free_part_of_a_card_is_told_with_its_inputs(tmp_path: Path) -> None:
    plan = estimate(cases.header(tmp_path), gpu_machine(int(5.1 * GIB), 8 * GIB))
    assert any("5.1 GiB free of 8.0 (2.9 used by other programs)" in reason for reason in plan.reasons)


def test_a_mac_states_its_working_set_and_margin(tmp_path: Path) -> None:
    metal = GgmlDevice("MTL0", "Apple M2", "gpu", 11 * GIB, 11 * GIB)
    machine = this_machine((metal,), cpu=cases.CPU, memory=cases.host(14 * GIB), host_name="Apple M2")
    target = measured_target(machine)
    assert len(target.pools) == 1
    assert target.pools[0].devices == ("MTL0", "CPU")
    plan = estimate(cases.header(tmp_path, n_layer=100), target)
    assert not plan.fits
    with pytest.raises(OutOfMemoryError, match=r"may take 11\.0 of 16\.0 GiB.*margin of 0\.5 GiB"):
        refuse_if_misfit(plan)


def test_page_cache_does_not_count_as_used(tmp_path: Path) -> None:
    from edgeserve.host import memory_budget

    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    cgroup.mkdir()
    (proc / "meminfo").write_text("MemTotal: 8388608 kB\nMemFree: 131072 kB\nMemAvailable: 6291456 kB\n")
    integrated = GgmlDevice("CUDA0", "Orin", "igpu", 6 * GIB, 8 * GIB)
    memory = memory_budget(proc, cgroup)
    target = measured_target(this_machine((integrated,), cpu=cases.CPU, memory=memory, host_name=""))
    assert [pool.usable_bytes for pool in target.pools] == [int(5.5 * GIB)]


def test_limits_and_margins_are_the_users_to_set(tmp_path: Path) -> None:
    choice = find_profile("RTX 4060 laptop")
    usual, wide = described_target(choice), described_target(choice, Goals(margin_bytes=2 * GIB))
    assert usual.pools[0].usable_bytes - wide.pools[0].usable_bytes == 1280 * MIB
    limited = described_target(choice, Goals(gpu_memory_bytes=4 * GIB, memory_bytes=3 * GIB))
    assert [pool.usable_bytes for pool in limited.pools] == [4 * GIB, 3 * GIB]
    plan = estimate(cases.header(tmp_path, n_layer=8), limited)
    assert plan.fits
    with pytest.raises(UsageError, match="no backend metal"):
        described_target(choice, backend="metal")


# --- sequences, cache types, attention


def test_a_plan_says_what_each_sequence_and_all_of_them_take(tmp_path: Path) -> None:
    model, target = cases.header(tmp_path), cpu_machine(60 * GIB, total_bytes=64 * GIB)
    for count in (1, 2, 4, 8):
        plan = estimate(model, target, None, FixedSettings(n_ctx=8192 * count, n_seq_max=count))
        assert plan.best.report.kv_bytes == count * 8192 * 131072
        assert plan.best.choice.n_ctx_seq == 8192
    assert "8 sequences with 8,192 tokens each: 1.00 GiB of cache a sequence × 8 = 8.00 GiB." in plan.reasons


def test_figures_name_the_context_that_they_assume(tmp_path: Path) -> None:
    model, target = cases.header(tmp_path, n_ctx_train=262_144), cpu_machine(12 * GIB)
    free, held = estimate(model, target), estimate(model, target, None, FixedSettings(n_ctx=4096))
    assert free.best.choice.bound in ("target", "memory")
    assert held.best.choice.bound == "given"
    assert held.settings.n_ctx == 4096
    assert held.settings.n_seq_max == 1
    assert held.best.uses[0].need_bytes < free.best.uses[0].need_bytes


def test_a_quantized_cache_is_checked_before_it_is_suggested(tmp_path: Path) -> None:
    plain = cases.header(tmp_path, n_layer=4)
    refused = estimate(plain, cpu_machine(8 * GIB), None, FixedSettings(type_v="q8_0", flash_attn="off"))
    assert not refused.fits
    assert "needs flash attention" in refused.reasons[0]
    assert refused.remedy is not None
    assert refused.remedy.changes[0].flags == ("-fa", "on")
    with pytest.raises(UsageError, match="needs flash attention"):
        refuse_if_misfit(refused)

    odd = cases.header(tmp_path, "odd.gguf", n_layer=4, n_embd=2560, n_head=32, n_head_kv=8)  # heads of 80
    for available in range(1, 6):
        plan = estimate(odd, cpu_machine(available * GIB))
        options = (plan.best, *plan.alternatives)
        assert all(option.settings.type_k == "f16" for option in options if option.fits)


def test_flash_attention_is_off_on_a_processor_until_it_was_measured_to_pay(tmp_path: Path) -> None:
    model, target = cases.header(tmp_path, n_layer=4), cpu_machine(8 * GIB)
    assert estimate(model, target).settings.flash_attn == "off"
    assert estimate(model, replace(target, flash_attn_on_cpu=True)).settings.flash_attn == "on"


def test_a_split_model_asks_for_flash_attention_by_name(tmp_path: Path) -> None:
    """Left to itself llama.cpp drops it at some layer counts of this model, at a gigabyte's cost."""
    lfm2 = zoo.truth_header("real-size-lfm2-1.2b", tmp_path)
    for n_gpu_layers in (2, 4, 6, 8, 11, 14):
        fixed = FixedSettings(n_gpu_layers=n_gpu_layers)
        plan = estimate(lfm2, gpu_machine(8 * GIB, 8 * GIB), None, fixed)
        assert plan.settings.flash_attn == "on"


# --- placement


def test_a_floor_for_the_context_moves_layers_instead(tmp_path: Path) -> None:
    model = cases.header(tmp_path, n_layer=60, n_embd=6144, n_ff=20480, n_head=48)
    target = gpu_machine(24 * GIB, 24 * GIB, 60 * GIB, description="NVIDIA GeForce RTX 4090")
    plan = estimate(model, target, Goals(min_ctx=65536, prefer="quality"))
    assert plan.best.choice.family == "split"
    assert plan.best.choice.n_ctx_seq >= 65536
    labels = [option.label for option in plan.alternatives]
    assert "everything on the GPU" in labels
    whole = plan.alternatives[labels.index("everything on the GPU")]
    assert whole.choice.n_ctx_seq < 65536
    assert whole.speed.decode_tok_s is not None
    assert plan.best.speed.decode_tok_s is not None


def test_experts_leave_the_gpu_before_whole_layers(tmp_path: Path) -> None:
    model = cases.header(tmp_path, n_layer=24, n_ff=4096, num_experts=16)
    plan = estimate(model, gpu_machine(8 * GIB, 8 * GIB))
    assert plan.best.choice.family == "experts"
    assert plan.settings.n_gpu_layers == 25
    assert 0 < plan.settings.n_cpu_moe < 24
    assert plan.config.n_cpu_moe == plan.settings.n_cpu_moe


def test_what_does_not_fit_gets_the_one_change_that_makes_it_fit(tmp_path: Path) -> None:
    model, target = cases.header(tmp_path), gpu_machine(6 * GIB, 8 * GIB)
    plan = estimate(model, target, None, FixedSettings(n_ctx=32768, n_seq_max=1, n_gpu_layers=99))
    assert not plan.fits
    assert plan.remedy is not None
    assert plan.remedy.changes[0].flags[0] == "-ngl"
    for change in plan.remedy.changes:
        again = estimate(model, target, None, fixed_as(change.settings))
        assert again.fits, change.flags
    with pytest.raises(OutOfMemoryError) as caught:
        refuse_if_misfit(plan)
    assert "GiB" in caught.value.message
    assert "-ngl" in caught.value.hint
    assert "--force" in caught.value.hint
    refuse_if_misfit(plan, force=True)


def fixed_as(settings: object) -> FixedSettings:
    names = ("n_ctx", "n_seq_max", "n_ubatch", "type_k", "type_v", "flash_attn", "n_gpu_layers", "n_cpu_moe")
    return FixedSettings(**{name: getattr(settings, name) for name in names})


def test_a_model_larger_than_the_machine_says_the_least_that_it_needs(tmp_path: Path) -> None:
    plan = estimate(cases.header(tmp_path), cpu_machine(2 * GIB))
    assert not plan.fits
    assert plan.remedy is not None
    assert plan.remedy.changes == ()
    assert plan.remedy.nearest is None
    assert plan.remedy.usable_bytes < plan.remedy.least_bytes < plan.remedy.needed_bytes
    assert (plan.settings.type_k, plan.settings.n_ubatch) == ("f16", 512)
    with pytest.raises(OutOfMemoryError, match="does not fit: it would take") as caught:
        refuse_if_misfit(plan)
    assert "smaller quantization" in caught.value.hint


# --- odd headers


def test_layers_without_kv_heads_cost_no_cache_and_the_others_do(tmp_path: Path) -> None:
    heads = [0, 0, 8, 0, 0, 8, 0, 0, 8, 0, 8, 0, 8, 0, 8, 0]
    model = cases.header(
        tmp_path,
        n_layer=16,
        n_embd=2048,
        n_head_kv=heads,
        arch="lfm2",
        metadata={"lfm2.shortconv.l_cache": 3},
    )
    target = cpu_machine(12 * GIB)
    small, large = (estimate(model, target, None, FixedSettings(n_ctx=n, n_seq_max=1)) for n in (4096, 32768))
    per_token = 6 * 2 * (8 * 64) * 2
    assert small.best.report.kv_bytes == 4096 * per_token
    assert large.best.report.kv_bytes == 32768 * per_token


def test_a_hybrid_pays_for_its_attention_layers_and_a_state(tmp_path: Path) -> None:
    model = zoo.truth_header("real-size-qwen3-next-80b", tmp_path)
    target = cpu_machine(90 * GIB, total_bytes=96 * GIB)
    plan = estimate(model, target, None, FixedSettings(n_ctx=8192, n_seq_max=1))
    assert plan.best.report.kv_bytes == 12 * 8192 * 2 * 2 * 256 * 2  # 12 of 48 layers, 2 heads of 256
    assert plan.best.report.state_bytes > 0


def test_explicit_head_sizes_win(tmp_path: Path) -> None:
    keys = {"qwen3.attention.key_length": 128, "qwen3.attention.value_length": 128}
    model = cases.header(tmp_path, arch="qwen3", n_layer=28, n_embd=1024, n_head=16, metadata=keys)
    plan = estimate(model, cpu_machine(8 * GIB), None, FixedSettings(n_ctx=8192, n_seq_max=1))
    assert plan.best.report.kv_bytes == 896 * MIB


@pytest.mark.parametrize("key", ["llama.block_count", "llama.embedding_length", "llama.context_length"])
def test_a_missing_key_is_named(tmp_path: Path, key: str) -> None:
    import gguf_builder as build

    metadata, tensors = cases.dense(n_layer=2)
    del metadata[key]
    path = tmp_path / "cut.gguf"
    path.write_bytes(build.header_bytes(metadata, tensors))
    with pytest.raises(GGUFError, match=key):
        estimate(read_header(path), cpu_machine(8 * GIB))


def test_a_model_without_attention_has_no_cache_and_no_nonsense(tmp_path: Path) -> None:
    plan = estimate(zoo.truth_header("tiny-rwkv7", tmp_path), cpu_machine(8 * GIB))
    assert plan.fits
    assert plan.best.report.kv_bytes == 0
    assert plan.best.report.state_bytes > 0


def test_a_projector_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"x" * 1000)
    projector = cases.header(tmp_path, "mmproj.gguf", arch="clip", n_layer=2)
    with pytest.raises(GGUFError, match="vision projector") as caught:
        estimate(projector, cpu_machine(8 * GIB))
    assert "model.gguf" in caught.value.hint


# --- proof


def test_a_dry_run_proves_the_figures_and_the_plan_still_fits(tmp_path: Path) -> None:
    model = zoo.truth_header("real-size-llama3.1-8b", tmp_path)
    plan = make_plan(model, described_target(find_profile("RTX 4060 laptop")))
    assert plan.proof.is_dry_run
    assert plan.best.report.compute_source == "dry-run"
    for option in (plan.best, *plan.alternatives):
        assert option.fits
        assert all(use.need_bytes == use.high_bytes <= use.pool.usable_bytes for use in option.uses)


def test_without_a_runtime_the_estimate_stays_and_says_so(tmp_path: Path) -> None:
    from edgeserve.planner.measure import DryRunFailure

    def gone(settings: object) -> list[DryRunFailure]:
        return [DryRunFailure("no runtime", "No module named llama_cpp.") for _ in settings]

    plan = make_plan(cases.header(tmp_path), gpu_machine(8 * GIB, 8 * GIB), measure=gone)
    assert plan.fits
    assert not plan.proof.is_dry_run
    assert "llama_cpp" in plan.proof.failure
    assert plan.best.report.compute_source == "estimate"


def test_a_context_that_measures_larger_is_shrunk(tmp_path: Path) -> None:
    from edgeserve.planner.fit import Sizer
    from edgeserve.planner.plan_speed import Speeds
    from edgeserve.planner.search import Search

    model, target = cases.header(tmp_path), gpu_machine(8 * GIB, 8 * GIB)
    sizer = Sizer(model, target)
    choice = Search(sizer, Speeds(model, target), Goals(), FixedSettings()).best()

    def heavier(settings: object) -> list[object]:
        reports = []
        for one in settings:
            report = sizer.report(one)
            devices = tuple(
                replace(d, compute_bytes=3 * d.compute_bytes, compute_high_bytes=3 * d.compute_bytes)
                for d in report.devices
            )
            reports.append(replace(report, devices=devices, compute_source="dry-run"))
        return reports

    (proven,), _ = prove([choice], sizer, [16384], run=heavier)
    assert proven.choice.fits
    assert proven.choice.n_ctx_seq < choice.n_ctx_seq
