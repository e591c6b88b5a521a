"""The options of `edgeserve bench` and `edgeserve simulate`: their flags, their words, where help lists them.

Owns the table only; bench/read_options.py turns what was typed into BenchOptions, whose defaults these are.
The options of a server that is started for the run are those of `edgeserve serve` (table.py).
"""

from __future__ import annotations

from dataclasses import dataclass

TARGET, WORK, LOAD = "What is measured", "The work", "Its arrival"
RUNS, JUDGEMENT, ENGINE, RESULT = "Runs", "Judgement", "The engine alone", "Result"

SCENARIOS = "decode, depth, stall, turns, load (or poisson), sweep, closed, trace, probe"


@dataclass(frozen=True, slots=True)
class BenchFlag:
    """One option. `metavar` "" marks a switch; `repeats` an option that may be given several times."""

    field: str
    name: str
    metavar: str
    about: str
    group: str
    repeats: bool = False
    alias: str = ""

    @property
    def flags(self) -> tuple[str, ...]:
        """All spellings; a switch can also be switched off."""
        own = f"--{self.name}" if self.metavar else f"--{self.name}/--no-{self.name}"
        return (self.alias, own) if self.alias else (own,)


BENCH_FLAGS: tuple[BenchFlag, ...] = (
    BenchFlag("url", "url", "URL", "a server that runs already; without it one is started", TARGET),
    BenchFlag("vs", "vs", "URL", "a second server, measured in turns with the first (A B A B)", TARGET),
    BenchFlag("api_key", "api-key", "KEY", "key for --url", TARGET),
    BenchFlag("vs_api_key", "vs-api-key", "KEY", "key for --vs [that of --url on the same host]", TARGET),
    BenchFlag("scenario", "scenario", "A,B", f"one or several of {SCENARIOS} [decode,stall,turns]", TARGET),
    BenchFlag(
        "prompt",
        "prompt",
        "LENGTH",
        "tokens of a prompt: 512, 128-1024, lognormal:512:0.6 or 90%64-192+10%1330",
        WORK,
    ),
    BenchFlag("output_tokens", "output-tokens", "LENGTH", "tokens of an answer, likewise", WORK),
    BenchFlag(
        "shared_prefix", "shared-prefix", "N", "tokens that all prompts begin with; sent beforehand", WORK
    ),
    BenchFlag("streams", "streams", "N,N", "decode, stall: answers at once [1,4]", WORK),
    BenchFlag("depths", "depths", "N,N", "depth: prompt lengths [64,512,2048]", WORK),
    BenchFlag("stall_prompt", "stall-prompt", "N", "stall, probe: tokens of the long prompt [2048]", WORK),
    BenchFlag("turns", "turns", "N", "turns: questions of the chat [6]", WORK),
    BenchFlag("chats", "chats", "N", "turns: chats that take turns with each other [1]", WORK),
    BenchFlag("ignore_eos", "ignore-eos", "", "ask for answers of exactly the length [on]", WORK),
    BenchFlag("param", "param", "NAME=JSON", "a further field of every request", WORK, repeats=True),
    BenchFlag("rate", "rate", "X,X", "load: requests per second; sweep: the first rate [1]", LOAD),
    BenchFlag("arrivals", "arrivals", "KIND", "load, sweep: poisson, constant or gamma [poisson]", LOAD),
    BenchFlag("burstiness", "burstiness", "X", "gamma: 1 is Poisson, less comes in bursts [1]", LOAD),
    BenchFlag("duration", "duration", "S", "load, sweep: measured seconds [30]", LOAD),
    BenchFlag("warmup", "warmup", "S", "load, sweep: seconds of load before that [5]", LOAD),
    BenchFlag("concurrency", "concurrency", "N,N", "closed: clients [1,2,4,8]", LOAD),
    BenchFlag("requests", "requests", "N", "closed: requests in all [32]", LOAD),
    BenchFlag(
        "trace", "trace", "FILE", "trace: one JSON object a line with at_s, prompt_tokens, max_tokens", LOAD
    ),
    BenchFlag("probe_rate", "probe-rate", "X", "probe: short requests per second [4]", LOAD),
    BenchFlag("repeats", "repeats", "N", "runs of each case [3]", RUNS),
    BenchFlag("pause", "pause", "S", "seconds between runs [0.5]", RUNS),
    BenchFlag("timeout", "timeout", "S", "seconds after which a request has failed [600]", RUNS),
    BenchFlag("seed", "seed", "N", "draws lengths, words and arrivals [0]", RUNS),
    BenchFlag(
        "slo",
        "slo",
        "BOUNDS",
        "what a good request keeps: chat, agent, or bounds such as ttft=2s,tpot=100ms;"
        " ttft_token=15ms allows that much more for each token of the prompt [chat]",
        JUDGEMENT,
    ),
    BenchFlag("attainment", "attainment", "SHARE", "share of good requests that is enough [0.9]", JUDGEMENT),
    BenchFlag(
        "fail_if",
        "fail-if",
        "CONDITION",
        "exit with 5 when it holds, such as 'ttft_p95>2s'",
        JUDGEMENT,
        repeats=True,
    ),
    BenchFlag("engine", "engine", "", "the model alone, without server: llama-batched-bench's rows", ENGINE),
    BenchFlag("npp", "npp", "N,N", "prompt tokens of a sequence [128,512]", ENGINE, alias="-npp"),
    BenchFlag("ntg", "ntg", "N,N", "tokens generated for each [32]", ENGINE, alias="-ntg"),
    BenchFlag("npl", "npl", "N,N", "sequences at once [1,4]", ENGINE, alias="-npl"),
    BenchFlag("pps", "pps", "", "one prompt for all sequences [off]", ENGINE, alias="-pps"),
    BenchFlag("out", "out", "DIR", "write summary.json, requests.jsonl, report.md and plots there", RESULT),
)

COSTS, MACHINE = "What a step costs", "The engine"

_SHARED = (
    "prompt", "output_tokens", "shared_prefix", "rate", "arrivals", "burstiness", "duration", "warmup",
    "requests", "seed", "slo", "attainment", "out",
)  # fmt: skip

SIMULATE_FLAGS: tuple[BenchFlag, ...] = (
    BenchFlag(
        "rows",
        "rows",
        "FILE",
        "rows of `edgeserve bench --engine --out`; several, with other -b, are better",
        COSTS,
        repeats=True,
    ),
    BenchFlag("device", "device", "NAME", "a device's profile instead, with the model that is named", COSTS),
    BenchFlag("decode_ms", "decode-ms", "X", "or figures: a token of one stream alone", COSTS),
    BenchFlag("prefill_tok_s", "prefill-tok-s", "X", "with it: prompt tokens per second", COSTS),
    BenchFlag("each_ms", "each-ms", "X", "with it: what a further stream adds to a step [0]", COSTS),
    BenchFlag("depth_ms", "depth-ms", "X", "with it: what 1,000 resident tokens add to a token [0]", COSTS),
    BenchFlag("overhead_ms", "overhead-ms", "X", "what sampling and delivery add to a step [0]", COSTS),
    BenchFlag("users", "users", "N,N", "people who each wait for their answer [1,2,4,8]; or --rate", LOAD),
    *(flag for flag in BENCH_FLAGS if flag.field in _SHARED),
    BenchFlag("n_seq_max", "parallel", "N", "sequences computed at once [4]", MACHINE, alias="-np"),
    BenchFlag(
        "n_ctx", "ctx-size", "N", "tokens in the KV cache [4,096 for each sequence]", MACHINE, alias="-c"
    ),
    BenchFlag("n_batch", "batch-size", "N", "most tokens in one step [2048]", MACHINE, alias="-b"),
    BenchFlag(
        "kv_unified", "kv-unified", "", "one pool of cells for all sequences [off]", MACHINE, alias="-kvu"
    ),
    BenchFlag("itl_target_ms", "itl-target-ms", "X", "the gap that prompts of others may cause", MACHINE),
    BenchFlag("prefill_chunk", "prefill-chunk", "N", "prompt tokens in every step, in its place", MACHINE),
    BenchFlag("max_waiting", "max-waiting", "N", "requests that may wait [64]", MACHINE),
)
"""Every option of `edgeserve simulate`."""
