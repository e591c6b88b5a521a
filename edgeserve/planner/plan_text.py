"""A plan as text for a terminal, 100 columns wide, with or without colour.

Owns the layout. All figures and sentences come from the plan; the same text without colour says the same.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from edgeserve.ink import Ink, printable
from edgeserve.planner.fit import PoolUse
from edgeserve.planner.placement import HOST_NAME
from edgeserve.planner.plan import Option, Plan
from edgeserve.planner.plan_config import edgeserve_command, edgeserve_flags, llama_server_command
from edgeserve.planner.plan_speed import PROMPT_TOKENS
from edgeserve.planner.report import MemoryReport
from edgeserve.planner.target import PlanPool
from edgeserve.planner.words import rate, seconds, size

WIDTH = 100
_LABEL = 10
_BAR = 15


def plan_lines(plan: Plan, reference: str, ink: Ink, repo: str = "") -> list[str]:
    """The whole text. `reference` is what the user calls the model."""
    lines = [*_head(plan, ink), ""]
    if plan.best.report.rejected is not None:
        return [*lines, *_labelled("refused", plan.reasons, ink), *_remedy(plan, ink)]
    # A misfit of settings that nobody asked for is the smallest that a plan tries.
    label = "suggested" if plan.fits else "asked" if plan.fixed.given() else "smallest"
    lines += _labelled(label, [_flags(plan, plan.best)], ink)
    lines += ["", *_memory(plan, ink), *_pre("speed", list(_speed(plan.best, ink)), ink)]
    lines += ["", *_labelled("why", plan.reasons, ink)]
    lines += _remedy(plan, ink)
    lines += _alternatives(plan, ink)
    return [*lines, *_commands(plan, reference, repo, ink)]


def _head(plan: Plan, ink: Ink) -> Iterator[str]:
    model = plan.model
    parts = [f"{model.name} {model.quant}".strip(), f"{model.n_layer} layers", size(model.file_bytes)]
    if model.num_experts:
        parts.append(f"{model.num_experts} experts")
    parts.append(f"trained for {model.n_ctx_train:,} tokens" if model.n_ctx_train else "no trained context")
    yield ink(printable(" · ".join(parts)), "bold")
    pools = [
        f"{_kind(pool)} {size(pool.usable_bytes)} of {size(pool.total_bytes)} usable"
        for pool in plan.target.pools
    ]
    yield from textwrap.wrap(printable(" · ".join([plan.target.name, plan.target.backend, *pools])), WIDTH)


def _kind(pool: PlanPool) -> str:
    if not pool.is_host:
        return "GPU"
    return "RAM" if len(pool.devices) == 1 else "unified memory"


def _labelled(label: str, texts: Sequence[str], ink: Ink) -> list[str]:
    """Paragraphs behind a label, each wrapped below its own start."""
    indent = " " * (_LABEL + 4)
    lines: list[str] = []
    for text in texts:
        lines += textwrap.wrap(
            printable(text),
            WIDTH,
            initial_indent=indent,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        ) or [indent]
    if lines:
        lines[0] = f"  {ink(f'{label:{_LABEL}}', 'dim')}  {lines[0][len(indent) :]}"
    return lines


def _flags(plan: Plan, option: Option) -> str:
    """The settings that matter, spelled as both programs take them, numbers grouped."""
    flags = edgeserve_flags(
        option.settings, on_gpu=bool(plan.target.accelerators), has_window=plan.model.has_window
    )
    return "   ".join(_pairs(flags))


def _pairs(flags: Sequence[str]) -> Iterator[str]:
    waiting = ""
    for word in flags:
        if word.startswith("-") and not word[1:].isdigit():
            if waiting:
                yield waiting
            waiting = word
        else:
            yield f"{waiting} {int(word):,}" if word.isdigit() and len(word) > 4 else f"{waiting} {word}"
            waiting = ""
    if waiting:
        yield waiting


def _memory(plan: Plan, ink: Ink) -> list[str]:
    report = plan.best.report
    lines = [text for use in plan.best.uses for text in _pool_lines(report, use, ink)]
    return _pre("memory", lines, ink)


def _pool_lines(report: MemoryReport, use: PoolUse, ink: Ink) -> Iterator[str]:
    """Parts of one pool, its sum, and a bar."""
    parts = {"weights": 0, "kv": 0, "compute": 0}
    for name in use.pool.devices:
        device = report.device(name)
        parts["weights"] += device.model_bytes
        parts["kv"] += device.context_bytes
        parts["compute"] += device.compute_bytes
    lines = [line for line in report.extras if line.device in use.pool.devices and line.counted]
    if HOST_NAME in use.pool.devices:
        parts["output"] = report.output_bytes
    parts["other"] = sum(line.n_bytes for line in lines) - parts.get("output", 0)
    yield "   ".join(f"{name} {size(n_bytes)}" for name, n_bytes in parts.items() if n_bytes)
    sign = "≤ " if use.high_bytes > use.need_bytes else ""
    total = f"{sign}{size(use.high_bytes)} of {size(use.pool.usable_bytes)}"
    yield f"  = {total} in {printable(use.pool.name)}   {_bar(use, ink)}"


def _bar(use: PoolUse, ink: Ink) -> str:
    usable = max(1, use.pool.usable_bytes)
    full = min(_BAR, round(_BAR * use.high_bytes / usable))
    text = "[" + "#" * full + "." * (_BAR - full) + "]"
    return text if use.fits else ink(f"{text} too much", "stalled")


def _pre(label: str, lines: Sequence[str], ink: Ink) -> list[str]:
    """Lines that keep their spaces."""
    indent = " " * (_LABEL + 4)
    labelled = [indent + line for line in lines]
    if labelled:
        labelled[0] = f"  {ink(f'{label:{_LABEL}}', 'dim')}  {labelled[0][len(indent) :]}"
    return labelled


def _speed(option: Option, ink: Ink) -> Iterator[str]:
    speed = option.speed
    if speed.unknown:
        yield f"n/a: {speed.unknown}"
        return
    decode = f"{ink('decode', 'decode')} {rate(speed.decode_tok_s)}"
    yield f"{decode}, with all {speed.n_ctx_seq:,} tokens in use {rate(speed.full_tok_s)}"
    if speed.num_sequences > 1:
        yield f"{speed.num_sequences} sequences together {rate(speed.total_tok_s)}"
    prefill = f"{ink('prefill', 'prefill')} {rate(speed.prefill_tok_s)}"
    yield f"{prefill}, a {PROMPT_TOKENS:,}-token prompt in {seconds(speed.prompt_s)}"


def _alternatives(plan: Plan, ink: Ink) -> list[str]:
    lines: list[str] = []
    for option in plan.alternatives:
        bytes_text = ", ".join(f"{size(use.high_bytes)} {use.pool.name}" for use in option.uses)
        full = f"decode {rate(option.speed.decode_tok_s)}, full {rate(option.speed.full_tok_s)}"
        texts = [_flags(plan, option), f"{option.label}: {bytes_text}; {full}"]
        lines += ["", *_labelled("or", texts, ink)]
    return lines


def _remedy(plan: Plan, ink: Ink) -> list[str]:
    if plan.remedy is None:
        return []
    return ["", *_labelled("remedy", remedy_sentences(plan), ink)]


def remedy_sentences(plan: Plan) -> list[str]:
    """What would make it fit, the mildest change first."""
    remedy = plan.remedy
    assert remedy is not None
    sentences = []
    if remedy.changes:
        first, *others = (" ".join(change.flags) for change in remedy.changes)
        sentences.append(f"It fits with {first}" + (f", or with {'; '.join(others)}." if others else "."))
    elif remedy.nearest is not None:
        option = edgeserve_flags(
            remedy.nearest.settings,
            on_gpu=bool(plan.target.accelerators),
            has_window=plan.model.has_window,
        )
        sentences.append(f"No single change is enough; this fits: {' '.join(option)}")
    else:
        sentences.append(remedy.least_sentence)
    return sentences


def _commands(plan: Plan, reference: str, repo: str, ink: Ink) -> list[str]:
    settings, on_gpu = plan.settings, bool(plan.target.accelerators)
    window = plan.model.has_window
    own = edgeserve_command(reference, settings, on_gpu=on_gpu, has_window=window)
    other = llama_server_command(plan.model.source, settings, on_gpu=on_gpu, has_window=window, repo=repo)
    label = "run" if plan.fits else "command"
    return ["", *_pre(label, [printable(own), printable(other), proof_text(plan)], ink)]


def proof_text(plan: Plan) -> str:
    """Where the figures come from, in a few words."""
    if plan.proof.is_dry_run:
        return f"figures proven by a dry run of llama.cpp, {plan.proof.seconds:.1f} s"
    if plan.proof.failure:
        return f"scratch memory estimated: no dry run ({plan.proof.failure.rstrip('.')})"
    known = "weights and cache are exact"
    if plan.best.report.context_source == "upper bound":
        known = "weights are exact, the cache is an upper bound"
    return f"{known}, scratch memory is estimated (--estimate: no dry run)"
