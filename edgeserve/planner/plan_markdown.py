"""A plan as a block of Markdown, to paste where people ask for help: inputs first, then figures and reasons.

Owns the layout. File paths are cut to names, so that nobody publishes a home folder.
"""

from __future__ import annotations

import platform
import shlex
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import PurePosixPath

from edgeserve.planner.plan import Option, Plan
from edgeserve.planner.plan_config import llama_server_flags
from edgeserve.planner.plan_text import proof_text, remedy_sentences
from edgeserve.planner.words import rate, seconds, size


def plan_markdown(plan: Plan) -> str:
    """The block, without a trailing newline."""
    return "\n".join([*_facts(plan), "", *_table(plan), "", *_sentences(plan), "", *_command(plan)])


def _facts(plan: Plan) -> Iterator[str]:
    model, target = plan.model, plan.target
    yield f"**{model.name} {model.quant}** on **{target.name}** ({target.backend})"
    yield ""
    yield (
        f"- model: `{model.architecture}`, {model.n_layer} layers, {size(model.file_bytes)}, trained for"
        f" {model.n_ctx_train:,} tokens"
    )
    for pool in target.pools:
        yield f"- {pool.name}: {size(pool.usable_bytes)} usable of {size(pool.total_bytes)}. {pool.reason}"
    yield f"- edgeserve {_version('edgeserve')}, llama-cpp-python {_version('llama-cpp-python')},"
    yield f"  {platform.system()} {platform.machine()}; {proof_text(plan)}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _table(plan: Plan) -> Iterator[str]:
    yield "| settings | " + " | ".join(pool.name for pool in plan.target.pools) + " | decode | full context |"
    yield "|---|" + "---|" * (len(plan.target.pools) + 2)
    for option in (plan.best, *plan.alternatives):
        yield _row(plan, option)


def _row(plan: Plan, option: Option) -> str:
    flags = llama_server_flags(
        option.settings, on_gpu=bool(plan.target.accelerators), has_window=plan.model.has_window
    )
    fits = "" if option.fits else " **does not fit**"
    needs = " | ".join(f"{size(use.high_bytes)} of {size(use.pool.usable_bytes)}" for use in option.uses)
    return (
        f"| `{shlex.join(flags[:-2])}`{fits} | {needs} | {rate(option.speed.decode_tok_s)} |"
        f" {rate(option.speed.full_tok_s)} |"
    )


def _sentences(plan: Plan) -> Iterator[str]:
    speed = plan.best.speed
    yield f"- 1,000-token prompt: {seconds(speed.prompt_s)}"
    yield from (f"- {reason}" for reason in plan.reasons)
    if plan.remedy is not None:
        yield from (f"- {sentence}" for sentence in remedy_sentences(plan))


def _command(plan: Plan) -> Iterator[str]:
    name = PurePosixPath(plan.model.source.replace("\\", "/")).name
    flags = llama_server_flags(
        plan.settings, on_gpu=bool(plan.target.accelerators), has_window=plan.model.has_window
    )
    yield "```"
    yield shlex.join(["llama-server", "-m", name, *flags])
    yield "```"
