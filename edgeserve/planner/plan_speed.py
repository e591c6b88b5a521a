"""Expected speed of a model at a plan's settings: the work shared out to the devices that hold its parts.

Owns the sharing (layers, output matrix, experts kept on the host) and the words for what is not known. Costs
and their uncertainty are `speed`'s matter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from edgeserve.errors import EdgeserveError
from edgeserve.gguf_header import GGUFHeader
from edgeserve.planner.hparams import read_hparams
from edgeserve.planner.model_work import model_work
from edgeserve.planner.placement import HOST_NAME, place_layers
from edgeserve.planner.settings import Settings
from edgeserve.planner.speed import Interval, SpeedEstimate, SpeedPart, predict_split
from edgeserve.planner.speed_terms import ModelWork, SpeedSettings
from edgeserve.planner.target import Target

PROMPT_TOKENS = 1000
"""The prompt that a plan's time to first token is told for."""

_EXPERTS = re.compile(r"^blk\.(\d+)\.ffn_(up|down|gate|gate_up)_(ch|)exps\.")


@dataclass(frozen=True, slots=True)
class PlanSpeed:
    """Expected tokens per second and seconds, 9 of 10 within each interval; None where it is not known.

    `decode_tok_s` and `full_tok_s`: one sequence alone, with an empty and a full context. `total_tok_s`: all
    `num_sequences` together, with empty contexts. `prefill_tok_s` and `prompt_s`: a prompt of PROMPT_TOKENS
    tokens that is not resident, with nobody else. `unknown`: why there are no figures.
    """

    num_sequences: int
    n_ctx_seq: int
    decode_tok_s: Interval | None = None
    full_tok_s: Interval | None = None
    total_tok_s: Interval | None = None
    prefill_tok_s: Interval | None = None
    prompt_s: Interval | None = None
    basis: str = ""
    unknown: str = ""


class Speeds:
    """One model on one target, at any settings."""

    def __init__(self, header: GGUFHeader, target: Target) -> None:
        self._header, self._target = header, target
        self._works: dict[tuple[str, str], ModelWork | str] = {}
        self._n_layer_all = read_hparams(header).n_layer_all

    def at(self, settings: Settings, n_ctx_seq: int) -> PlanSpeed:
        """Speeds with `n_ctx_seq` tokens as the full context of one sequence."""
        empty = PlanSpeed(settings.n_seq_max, n_ctx_seq)
        work = self._work(settings)
        if isinstance(work, str):
            return replace(empty, unknown=work)
        parts = list(self._parts(work, settings))
        if (missing := _missing(parts)) is not None:
            return replace(empty, unknown=missing)
        alone, full, prompt = (
            predict_split(parts, _asked(settings, resident, count, n_ctx_seq))
            for resident, count in ((0, settings.n_seq_max), (n_ctx_seq, 1), (0, 1))
        )
        return PlanSpeed(
            settings.n_seq_max,
            n_ctx_seq,
            decode_tok_s=alone.decode_tok_s,
            full_tok_s=full.decode_tok_s,
            total_tok_s=alone.total_decode_tok_s,
            prefill_tok_s=prompt.prefill_tok_s,
            prompt_s=_prompt_s(prompt, n_ctx_seq),
            basis=alone.basis,
        )

    def rank(self, settings: Settings, n_ctx_seq: int) -> float:
        """Tokens a second with a half-full context, to compare placements by; 0 where not known."""
        work = self._work(settings)
        if isinstance(work, str):
            return 0.0
        parts = list(self._parts(work, settings))
        if _missing(parts) is not None:
            return 0.0
        estimate = predict_split(parts, _asked(settings, n_ctx_seq // 2, 1, n_ctx_seq))
        return estimate.decode_tok_s.mid if estimate.decode_tok_s else 0.0

    def _work(self, settings: Settings) -> ModelWork | str:
        key = (settings.type_k, settings.type_v)
        if key not in self._works:
            try:
                self._works[key] = model_work(self._header, *key)
            except EdgeserveError as error:
                self._works[key] = error.message
        return self._works[key]

    def _parts(self, work: ModelWork, settings: Settings) -> Iterator[SpeedPart]:
        placement = place_layers(self._n_layer_all, settings, self._target.accelerators)
        names = [device.name for device in self._target.accelerators]
        homes = [names[index] if index >= 0 else HOST_NAME for index in placement.layer_device]
        # Draft blocks lie between the trunk and the output, and are not run.
        homes = [*homes[: work.n_layer], homes[-1]]
        shares = _shares(self._header, work, homes, settings.n_cpu_moe)
        for name, share in shares.items():
            yield SpeedPart(share, self._target.speeds[name], self._target.calibration(name))


def _asked(settings: Settings, num_resident: int, num_sequences: int, n_ctx_seq: int) -> SpeedSettings:
    return SpeedSettings(
        n_prompt=max(1, min(PROMPT_TOKENS, n_ctx_seq)),
        num_resident=num_resident,
        num_sequences=num_sequences,
        n_ubatch=max(1, settings.n_ubatch),
        flash_attn=settings.flash_attn != "off",
    )


def _prompt_s(estimate: SpeedEstimate, n_ctx_seq: int) -> Interval | None:
    return estimate.ttft_s(PROMPT_TOKENS) if n_ctx_seq >= PROMPT_TOKENS else None


def _missing(parts: list[SpeedPart]) -> str | None:
    for part in parts:
        if part.device.bandwidth_gb_s is None:
            return "the memory bandwidth of this device is not known"
    return None


def _shares(header: GGUFHeader, work: ModelWork, homes: list[str], n_cpu_moe: int) -> dict[str, ModelWork]:
    """What each device computes: its layers, the output matrix, and on the host the experts left there.

    `homes`: the device of every layer, the output's last.
    """
    output_bytes = _output_bytes(header)
    trunk = replace(
        work,
        weight_bytes=work.weight_bytes - output_bytes,
        active_weight_bytes=work.active_weight_bytes - output_bytes,
        output_params=0.0,
    )
    shares: dict[str, ModelWork] = {}
    for name in dict.fromkeys(homes):
        count = homes[:-1].count(name)
        share = trunk.share(count / work.n_layer)
        shares[name] = _with_output(share, work, output_bytes) if homes[-1] == name else share
    layers = [il for il in range(min(n_cpu_moe, work.n_layer)) if homes[il] != HOST_NAME]
    for name in {homes[il] for il in layers}:
        moved = _experts(header, work, [il for il in layers if homes[il] == name])
        shares[name] = _minus(shares[name], moved)
        shares[HOST_NAME] = _plus(shares.get(HOST_NAME), moved)
    return shares


def _with_output(share: ModelWork, work: ModelWork, output_bytes: float) -> ModelWork:
    return replace(
        share,
        weight_bytes=share.weight_bytes + output_bytes,
        active_weight_bytes=share.active_weight_bytes + output_bytes,
        output_params=work.output_params,
    )


def _output_bytes(header: GGUFHeader) -> float:
    by_name = {tensor.name: tensor for tensor in header.tensors}
    output = by_name.get("output.weight") or by_name.get("token_embd.weight")
    return float(output.n_bytes) if output else 0.0


def _experts(header: GGUFHeader, work: ModelWork, layers: list[int]) -> ModelWork:
    """The experts of some layers, as work of its own."""
    chosen = {str(il) for il in layers}
    tensors = [t for t in header.tensors if (found := _EXPERTS.match(t.name)) and found[1] in chosen]
    n_bytes = float(sum(tensor.n_bytes for tensor in tensors))
    params = float(sum(tensor.num_elements for tensor in tensors))
    count, used = header.arch_get_int("expert_count"), header.arch_get_int("expert_used_count")
    share = min(1.0, used / count) if count and used else 1.0
    return ModelWork(max(1, len(layers)), n_bytes, n_bytes * share, params * share, work.quant_class)


def _minus(work: ModelWork, part: ModelWork) -> ModelWork:
    return replace(
        work,
        weight_bytes=work.weight_bytes - part.weight_bytes,
        active_weight_bytes=work.active_weight_bytes - part.active_weight_bytes,
        active_params=work.active_params - part.active_params,
    )


def _plus(work: ModelWork | None, part: ModelWork) -> ModelWork:
    if work is None:
        return part
    return replace(
        work,
        weight_bytes=work.weight_bytes + part.weight_bytes,
        active_weight_bytes=work.active_weight_bytes + part.active_weight_bytes,
        active_params=work.active_params + part.active_params,
    )
