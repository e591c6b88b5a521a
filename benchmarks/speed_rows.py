"""Published measurements as rows of the speed model.

Owns the reading of benchmarks/data/speeds.csv (one measurement a row, with its source) and speed_models.csv
(the shapes of the models measured). Knows which rows count, and nothing of how factors are learned.
"""

from __future__ import annotations

import csv
import math
import re
from dataclasses import dataclass
from pathlib import Path

from edgeserve.planner.device import DeviceProfile, list_profiles
from edgeserve.planner.speed_terms import (
    ModelWork,
    SpeedDevice,
    SpeedSettings,
    StepKind,
    Term,
    quant_class,
    speed_device,
    terms,
)

DATA = Path(__file__).resolve().parent / "data"
BACKENDS = ("cuda", "metal", "vulkan", "rocm", "cpu")
# Embedding tables keep more bits than the matrices of a mixed file; by the start of the quantization's name.
TABLE_BITS = {"F16": 16.0, "BF16": 16.0, "Q8": 8.5, "MXFP4": 8.5, "Q4": 4.5}
# Processor rows that train although flagged: whole runs of llama.cpp or a wrapper on a known file. On all
# backends the rows measured through llama-server train as well, being the newest builds that there are.
CPU_FLAGS = (
    "mainline column",
    "ollama, default quant Q4_K_M",
    "range",
    "n=10",
    "quant not stated",
    "rounded",
)


@dataclass(frozen=True)
class Row:
    """One measurement. `counts`: it has no flag. `plain`: a dense model of at least 3 billion parameters."""

    device_key: str
    kind: StepKind
    work: ModelWork
    device: SpeedDevice
    terms: tuple[Term, ...]
    log_time: float
    counts: bool
    plain: bool


def load_rows() -> list[Row]:
    profiles = {profile.key: profile for profile in list_profiles()}
    with (DATA / "speed_models.csv").open(encoding="utf-8", newline="") as file:
        models = {line["model"]: line for line in csv.DictReader(file)}
    with (DATA / "speeds.csv").open(encoding="utf-8", newline="") as file:
        rows = [_row(line, profiles.get(line["device_key"]), models) for line in csv.DictReader(file)]
    return [row for row in rows if row is not None]


def _row(
    line: dict[str, str], profile: DeviceProfile | None, models: dict[str, dict[str, str]]
) -> Row | None:
    """None for what the model does not cover: unknown device, size or test, or a driver that is no more."""
    test = re.match(r"(pp|tg|eval rate)(\d+)?(?: @ctx\d+)?(?:@d(\d+))?", line["test"])
    usable = line["backend"] in BACKENDS and line["size_gib"] and line["params_b"]
    if profile is None or test is None or not usable or not _trusted(line):
        return None
    kind: StepKind = "prefill" if test[1] == "pp" else "decode"
    work = _work(line, models.get(line["model"]))
    settings = _settings(kind, line, int(test[2] or (512 if kind == "prefill" else 128)), int(test[3] or 0))
    threads = re.search(r"\bt (\d+)", line["config"])
    device = speed_device(profile, line["backend"], int(threads[1]) if threads else None)
    costs = terms(kind, work, device, settings, old_build="May 2024" in line["build"])
    if costs is None:
        return None
    num_tokens = settings.n_prompt if kind == "prefill" else 1
    return Row(
        line["device_key"],
        kind,
        work,
        device,
        costs,
        math.log(num_tokens / float(line["tps"])),
        counts=not line["flag"],
        plain=not work.has_experts and float(line["params_b"]) >= 3,
    )


def _trusted(line: dict[str, str]) -> bool:
    if "amdvlk" in line["config"]:
        return False  # AMD ended this driver; its matrix kernels were several times slower than RADV's
    if not line["flag"]:
        return True
    if line["flag"].startswith("server end-to-end"):
        return True
    few_threads = line["backend"] == "cpu" and line["config"] == "t 2" and line["test"].startswith("tg")
    return line["backend"] == "cpu" and line["flag"].startswith(CPU_FLAGS) and not few_threads


def _settings(kind: StepKind, line: dict[str, str], n: int, depth: int) -> SpeedSettings:
    """Decode of n tokens from an empty cache sees n/2 tokens on average."""
    return SpeedSettings(
        n_prompt=n if kind == "prefill" else 1,
        num_resident=depth + (n // 2 if kind == "decode" else 0),
        n_ubatch=2048 if "ub 2048" in line["config"] else 512,
        flash_attn=line["fa"] == "1",
    )


def _work(line: dict[str, str], shape: dict[str, str] | None) -> ModelWork:
    size, quant = float(line["size_gib"]) * 2**30, line["quant"]
    params = float(line["params_b"]) * 1e9
    active = float(line["active_params_b"] or line["params_b"]) * 1e9
    if shape is None:
        # Depth grows about with the cube root of the parameters; 32 layers at 6.74 billion.
        n_layer = max(1, round(32 * (params / 6.74e9) ** (1 / 3)))
        return ModelWork(n_layer, size, size * active / params, active, quant_class(quant))
    n = {name: int(value) for name, value in shape.items() if name != "model"}
    table = n["n_vocab"] * n["n_embd"]
    table_bytes = table * _table_bits(quant, 8 * size / params) / 8
    weight_bytes = size - (0 if n["tied_embeddings"] else table_bytes)
    windowed = n["n_layer"] - n["n_layer"] // n["full_attention_every"] if n["n_swa"] else 0
    full = n["n_layer"] - windowed
    kv_bytes, pair_flops = 2 * n["n_head_kv"] * n["head_dim"] * 2, 4 * n["n_head"] * n["head_dim"]
    return ModelWork(
        n["n_layer"],
        weight_bytes,
        weight_bytes * active / params,
        active - table * (1 if n["tied_embeddings"] or active < params else 2),
        quant_class(quant),
        output_params=table,
        kv_bytes_per_token=kv_bytes * full,
        pair_flops=pair_flops * full,
        window_kv_bytes_per_token=kv_bytes * windowed,
        window_pair_flops=pair_flops * windowed,
        n_swa=n["n_swa"],
    )


def _table_bits(quant: str, mean_bits: float) -> float:
    return next((bits for start, bits in TABLE_BITS.items() if quant.startswith(start)), mean_bits)
