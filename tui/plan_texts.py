"""A plan as lines for the plan screen: speed, reasons, alternatives side by side, commands, a profile's file.

Owns the wording and the columns; every figure and sentence is the plan's own.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Iterator, Sequence

from rich.text import Text

from edgeserve.ink import printable
from edgeserve.planner.plan import Option, Plan
from edgeserve.planner.plan_config import edgeserve_command, edgeserve_flags
from edgeserve.planner.plan_speed import PROMPT_TOKENS
from edgeserve.planner.plan_text import proof_text, remedy_sentences
from edgeserve.planner.report import MemoryReport
from edgeserve.planner.settings import Settings
from edgeserve.planner.words import rate, seconds, size
from edgeserve.settings.kinds import Switch
from edgeserve.settings.table import SETTINGS

LABEL_COLUMNS = 11
_LEAST_COLUMN = 12

Paragraph = tuple[str, str]
"""(label, text)"""


def flags_of(plan: Plan, settings: Settings) -> list[str]:
    """Flags of `edgeserve serve` for settings of this plan."""
    on_gpu = bool(plan.target.accelerators)
    return edgeserve_flags(settings, on_gpu=on_gpu, has_window=plan.model.has_window)


def startable(plan: Plan) -> Settings | None:
    """The suggestion, or what the plan found instead of one that does not fit; None where nothing fits."""
    if plan.fits or plan.remedy is None:
        return plan.settings
    if plan.remedy.changes:
        return plan.remedy.changes[0].settings
    return plan.remedy.nearest.settings if plan.remedy.nearest is not None else None


def _paired(flags: list[str]) -> str:
    """Flags with their values, the pairs apart from each other."""
    pairs: list[str] = []
    for word in flags:
        if word.startswith("-") or not pairs:
            pairs.append(word)
        else:
            pairs[-1] += f" {word}"
    return "   ".join(pairs)


def command_of(plan: Plan, reference: str) -> str:
    """The line that starts the suggestion, or what fits instead; "" where nothing does."""
    settings = startable(plan)
    if settings is None:
        return ""
    on_gpu = bool(plan.target.accelerators)
    return edgeserve_command(reference, settings, on_gpu=on_gpu, has_window=plan.model.has_window)


def pool_parts(report: MemoryReport, devices: tuple[str, ...]) -> dict[str, int]:
    """Expected bytes by part, over the devices that share a pool."""
    rows = [report.device(name) for name in devices]
    extra = sum(line.n_bytes for line in report.extras if line.device in devices and line.counted)
    return {
        "weights": sum(row.model_bytes for row in rows),
        "kv": sum(row.context_bytes for row in rows),
        "compute": sum(row.compute_bytes for row in rows),
        "other": extra,
    }


def paragraphs(plan: Plan, reference: str) -> Iterator[Paragraph]:
    """Everything but the memory bars and the alternatives, in the order of reading."""
    # A sentence for each pool that is too small comes before all other reasons.
    num_short = sum(use.left_bytes < 0 for use in plan.best.uses)
    if plan.best.report.rejected is not None:
        yield from _block("refused", plan.reasons)
    elif plan.fits:
        yield "suggested", _paired(flags_of(plan, plan.settings))
        yield from _speed(plan.best)
        yield from _block("why", plan.reasons)
    else:
        # What is too much and what would do come first; how fast it would be matters to nobody.
        yield "asked", _paired(flags_of(plan, plan.settings))
        yield from _block("why", plan.reasons[:num_short])
    if plan.remedy is not None:
        yield from _block("remedy", remedy_sentences(plan))
    if command := command_of(plan, reference):
        yield "run", command
    if not plan.fits and plan.best.report.rejected is None:
        yield from _block("also", plan.reasons[num_short:])
    yield "", proof_text(plan)


def _block(label: str, sentences: Sequence[str]) -> Iterator[Paragraph]:
    """The label beside the first sentence only."""
    yield from (("" if index else label, text) for index, text in enumerate(sentences))


def labelled_text(lines: Iterable[Paragraph], width: int) -> Text:
    """Labels in a column of their own, each sentence wrapped beside its label."""
    text = Text()
    for label, sentence in lines:
        rows = textwrap.wrap(
            printable(sentence),
            max(10, width - LABEL_COLUMNS),
            break_on_hyphens=False,
        )
        for index, row in enumerate(rows):
            text.append(f"{'' if index else label:<{LABEL_COLUMNS}}", style="dim")
            text.append(f"{row}\n")
    return text


def _speed(option: Option) -> Iterator[Paragraph]:
    speed = option.speed
    if speed.unknown:
        yield "speed", f"n/a: {speed.unknown}"
        return
    full = f"with all {speed.n_ctx_seq:,} tokens in use {rate(speed.full_tok_s)}"
    yield "decode", f"{rate(speed.decode_tok_s)}, {full}"
    if speed.num_sequences > 1:
        yield "", f"{speed.num_sequences} sequences together {rate(speed.total_tok_s)}"
    prompt = f"a {PROMPT_TOKENS:,}-token prompt in {seconds(speed.prompt_s)}"
    yield "prefill", f"{rate(speed.prefill_tok_s)}, {prompt}"


def side_by_side(plan: Plan) -> list[list[str]]:
    """Suggestion and alternatives as a table: the first row is the head, the first column the names."""
    options = (plan.best, *plan.alternatives)
    rows = [
        ["", *(option.label or "suggested" for option in options)],
        ["-c", *(f"{option.settings.n_ctx:,}" for option in options)],
        ["-np", *(f"{option.settings.n_seq_max}" for option in options)],
        ["each holds", *(f"{option.choice.n_ctx_seq:,}" for option in options)],
        ["kv type", *(_kv_type(option) for option in options)],
        ["-fa", *(option.settings.flash_attn for option in options)],
        ["-ub", *(f"{option.settings.n_ubatch}" for option in options)],
    ]
    if plan.target.accelerators:
        rows.append(["-ngl", *(_layers(option) for option in options)])
    for index, pool in enumerate(plan.target.pools):
        rows.append([pool.name, *(size(option.uses[index].high_bytes) for option in options if option.uses)])
    rows += [
        ["decode", *(rate(option.speed.decode_tok_s) for option in options)],
        ["full context", *(rate(option.speed.full_tok_s) for option in options)],
        ["prefill", *(rate(option.speed.prefill_tok_s) for option in options)],
    ]
    return rows


def by_context(plan: Plan, options: Sequence[Option], width: int = 120) -> list[list[str]]:
    """A table of contexts: what each takes of every pool, and how fast it would be with all of it in use.
    Where that is too wide, only the first pool, and not what a sequence holds."""
    pools = plan.target.pools
    is_short = width < 3 + _LEAST_COLUMN * (3 + len(pools))
    names = [pool.name for pool in pools[: 1 if is_short else None]]
    rows = [["", "-c", *([] if is_short else ["each holds"]), *names, "tok/s when full"]]
    for option in options:
        taken = [size(use.high_bytes) for use in option.uses] or [""] * len(pools)
        speed = rate(option.speed.full_tok_s).removesuffix(" tok/s") if option.fits else "too much"
        mark = "›" if option.settings.n_ctx == plan.settings.n_ctx else ""
        each = [] if is_short else [f"{option.choice.n_ctx_seq:,}"]
        rows.append([mark, f"{option.settings.n_ctx:,}", *each, *taken[: len(names)], speed])
    return rows


def _kv_type(option: Option) -> str:
    types = {option.settings.type_k, option.settings.type_v}
    return "/".join(sorted(types))


def _layers(option: Option) -> str:
    return "all" if option.settings.n_gpu_layers < 0 else str(option.settings.n_gpu_layers)


def titled_table(title: str, rows: list[list[str]], width: int) -> Text:
    """A table below its title."""
    text = Text(f"{title}\n", style="dim")
    return text.append(printable(table_text(rows, width)), style="not dim")


def table_text(rows: list[list[str]], width: int) -> str:
    """Columns side by side; labels that are too long wrap within theirs."""
    num_columns = len(rows[0])
    first = max(len(row[0]) for row in rows) + 2
    each = max(_LEAST_COLUMN, min(26, (width - first) // max(1, num_columns - 1)))
    lines: list[str] = []
    for row in rows:
        cells = [_wrapped(cell, each - 2) for cell in row[1:]]
        for index in range(max((len(cell) for cell in cells), default=1)):
            name = row[0] if not index else ""
            texts = [cell[index] if index < len(cell) else "" for cell in cells]
            lines.append(f"{name:<{first}}" + "".join(f"{text:<{each}}" for text in texts))
    return "\n".join(line.rstrip() for line in lines)


def _wrapped(text: str, width: int) -> list[str]:
    lines = [""]
    for word in text.split(" "):
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def profile_text(plan: Plan, reference: str) -> str:
    """A configuration file of `edgeserve serve --config FILE` that holds the suggestion."""
    by_flag = {flag: setting for setting in SETTINGS for flag in (*setting.flags, *setting.off_flags)}
    lines = [f"# {plan.model.name} on {plan.target.name}", "[serve]", f"model = {json.dumps(reference)}"]
    flags = flags_of(plan, startable(plan) or plan.settings)
    while flags:
        flag = flags.pop(0)
        setting = by_flag[flag]
        if isinstance(setting.kind, Switch):
            lines.append(f"{setting.name} = {json.dumps(flag not in setting.off_flags)}")
        else:
            value = flags.pop(0)
            lines.append(f"{setting.name} = {value if value.isdigit() else json.dumps(value)}")
    return "\n".join(lines) + "\n"
