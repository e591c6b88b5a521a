"""A plan as one JSON document, the same fields for the command line and for programs.

Owns the names of the fields (docs/planner.md describes them). Bytes are whole numbers, unknown figures are
null: there is no NaN and no infinity.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from edgeserve.planner.plan import Option, Plan
from edgeserve.planner.plan_config import edgeserve_command, llama_server_command
from edgeserve.planner.plan_speed import PROMPT_TOKENS, PlanSpeed
from edgeserve.planner.remedy import Remedy
from edgeserve.planner.report import MemoryReport
from edgeserve.planner.settings import Settings
from edgeserve.planner.words import Range

Json = dict[str, Any]


def plan_to_json(plan: Plan, reference: str, repo: str = "") -> Json:
    """The document. `reference` is what the user calls the model, `repo` its hub name if it has one."""
    return {
        "model": asdict(plan.model),
        "device": _device(plan),
        "goals": asdict(plan.goals),
        "fixed": plan.fixed.given(),
        "fits": plan.fits,
        "rejected": plan.best.report.rejected,
        **_option(plan.best),
        "reasons": list(plan.reasons),
        "alternatives": [
            {
                "label": option.label,
                "fits": option.fits,
                **_option(option),
                **_commands(plan, option, reference, repo),
            }
            for option in plan.alternatives
        ],
        "remedy": _remedy(plan.remedy),
        "proof": asdict(plan.proof),
        **_commands(plan, plan.best, reference, repo),
    }


def _device(plan: Plan) -> Json:
    target = plan.target
    return {
        "name": target.name,
        "key": target.profile.key,
        "backend": target.backend,
        "is_this_machine": target.is_here,
        "unified": target.is_unified,
        "accelerators": [device.name for device in target.accelerators],
    }


def _option(option: Option) -> Json:
    return {
        "settings": settings_json(option.settings),
        "resolved": _resolved(option.report),
        "memory": memory_json(option),
        "speed": speed_json(option.speed),
        "context_bound_by": option.choice.bound,
        "placement": option.choice.family,
    }


def settings_json(settings: Settings) -> Json:
    fields = asdict(settings)
    fields["tensor_split"] = list(settings.tensor_split)
    if settings.n_outputs_max is None:
        fields["n_outputs_max"] = settings.n_seq_max
    return fields


def _resolved(report: MemoryReport) -> Json | None:
    """What llama.cpp makes of the settings; None when it refuses them."""
    return None if report.resolved is None else asdict(report.resolved)


def memory_json(option: Option) -> Json:
    report = option.report
    return {
        "devices": [
            {
                "name": device.name,
                "model_bytes": device.model_bytes,
                "context_bytes": device.context_bytes,
                "compute_bytes": device.compute_bytes,
                "compute_low_bytes": device.compute_low_bytes,
                "compute_high_bytes": device.compute_high_bytes,
            }
            for device in report.devices
        ],
        "output_bytes": report.output_bytes,
        "extras": [asdict(line) for line in report.extras],
        "compute_source": report.compute_source,
        "context_source": report.context_source,
        "kv_bytes": report.kv_bytes,
        "kv_bytes_per_token": report.kv_bytes_per_token,
        "state_bytes": report.state_bytes,
        "host_mapped_bytes": report.host_mapped_bytes,
        "flash_attn": report.flash_attn,
        "pools": [
            {
                "name": use.pool.name,
                "devices": list(use.pool.devices),
                "need_bytes": use.need_bytes,
                "need_high_bytes": use.high_bytes,
                "usable_bytes": use.pool.usable_bytes,
                "total_bytes": use.pool.total_bytes,
                "margin_bytes": use.pool.margin_bytes,
                "reason": use.pool.reason,
                "fits": use.fits,
            }
            for use in option.uses
        ],
        "notes": list(report.notes),
    }


def speed_json(speed: PlanSpeed) -> Json:
    return {
        "num_sequences": speed.num_sequences,
        "full_context_tokens": speed.n_ctx_seq,
        "decode_tok_s": interval_json(speed.decode_tok_s),
        "decode_full_context_tok_s": interval_json(speed.full_tok_s),
        "decode_all_sequences_tok_s": interval_json(speed.total_tok_s),
        "prefill_tok_s": interval_json(speed.prefill_tok_s),
        "prompt_tokens": PROMPT_TOKENS,
        "prompt_s": interval_json(speed.prompt_s),
        "basis": speed.basis,
        "unknown_because": speed.unknown or None,
    }


def interval_json(interval: Range | None) -> Json | None:
    if interval is None:
        return None
    return {"low": _rounded(interval.low), "mid": _rounded(interval.mid), "high": _rounded(interval.high)}


def _rounded(value: float) -> float:
    """Four digits: more would be false."""
    return float(f"{value:.4g}")


def _commands(plan: Plan, option: Option, reference: str, repo: str) -> Json:
    on_gpu, has_window = bool(plan.target.accelerators), plan.model.has_window
    return {
        "commands": {
            "edgeserve": edgeserve_command(reference, option.settings, on_gpu=on_gpu, has_window=has_window),
            "llama_server": llama_server_command(
                plan.model.source, option.settings, on_gpu=on_gpu, has_window=has_window, repo=repo
            ),
        }
    }


def _remedy(remedy: Remedy | None) -> Json | None:
    if remedy is None:
        return None
    return {
        "changes": [
            {"flags": list(change.flags), "settings": settings_json(change.settings)}
            for change in remedy.changes
        ],
        "nearest": settings_json(remedy.nearest.settings) if remedy.nearest else None,
        "pool": remedy.pool,
        "missing_bytes": remedy.missing_bytes,
        "needed_bytes": remedy.needed_bytes,
        "usable_bytes": remedy.usable_bytes,
        "least_bytes": remedy.least_bytes,
        "largest_file_bytes": remedy.largest_file_bytes,
    }
