"""What holds for every plan: it fits by its own figures, it is valid, and it is the same everywhere."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import plan_cases as cases
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plan_cases import GIB, cpu_machine, estimate, gpu_machine

from edgeserve.ink import Ink
from edgeserve.planner.goals import PREFERENCES, Goals
from edgeserve.planner.hparams import read_hparams
from edgeserve.planner.memory import plan_memory
from edgeserve.planner.plan_json import plan_to_json
from edgeserve.planner.plan_markdown import plan_markdown
from edgeserve.planner.plan_text import plan_lines
from edgeserve.planner.settings import Rejection, resolve

SHAPES = st.fixed_dictionaries(
    {
        "n_layer": st.integers(1, 24),
        "n_embd": st.sampled_from([512, 1024, 2560]),
        "n_head": st.sampled_from([4, 8]),
        "n_head_kv": st.sampled_from([2, 4]),
        "n_ff": st.sampled_from([1024, 4096]),
        "n_ctx_train": st.sampled_from([0, 300, 2048, 8192, 40960, 1_048_576]),
        "num_experts": st.sampled_from([0, 0, 8]),
    }
)
GOALS = st.builds(
    Goals,
    min_ctx=st.sampled_from([0, 0, 1000, 8192]),
    parallel=st.sampled_from([0, 0, 1, 3]),
    prefer=st.sampled_from(PREFERENCES),
)
MEMORY = st.floats(0.3, 12)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(SHAPES, GOALS, MEMORY, MEMORY, st.booleans())
def test_plans_keep_their_promises(
    shape: dict[str, int], goals: Goals, gpu_gib: float, host_gib: float, has_gpu: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = cases.header(Path(folder), **shape)
        available = int(host_gib * GIB)
        target = (
            gpu_machine(int(gpu_gib * GIB), 12 * GIB, available)
            if has_gpu
            else cpu_machine(available, total_bytes=16 * GIB)
        )
        plan = estimate(model, target, goals)
        again = estimate(model, target, goals)
    assert again == plan
    hparams = read_hparams(model)
    for option in (plan.best, *plan.alternatives):
        assert not isinstance(resolve(hparams, option.settings), Rejection)
        if option.fits:
            assert all(use.need_bytes <= use.high_bytes <= use.pool.usable_bytes for use in option.uses)
        assert plan_memory(model, option.settings, target.accelerators) == option.report
    if plan.fits and goals.min_ctx:
        assert plan.best.choice.n_ctx_seq >= goals.min_ctx
    assert plan.fits or plan.remedy is not None
    document = plan_to_json(plan, "model")
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    text = "\n".join([*plan_lines(plan, "model", Ink(False)), plan_markdown(plan)])
    assert "nan" not in text.lower().replace("finance", "")
    assert " inf" not in text
