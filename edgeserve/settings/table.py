"""Every setting a user can give, once: its flags and environment names, how it is read, what it is for.

Flags are spelled as llama-server spells them wherever the meaning is the same. Owns the table and its words;
defaults stay in the dataclasses that the settings fill. Does not know where a value comes from
(sources.py) nor what becomes of it (values.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from edgeserve.config import CACHE_TYPES
from edgeserve.settings.kinds import (
    AnyText,
    Choice,
    Kind,
    Number,
    Pairs,
    Shares,
    Size,
    Switch,
    TextList,
    WholeNumber,
)

Command = Literal["serve", "chat"]
Target = Literal["engine", "server", "sampling", "chat", "run"]
"""What a setting fills: EngineConfig, ServerConfig, a request's sampling options, the chat itself, or how the
command goes about its work."""

NO_LIMIT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting. `flags` are all spellings, the first long one is its name; `off_flags` switch it off."""

    target: Target
    field: str
    flags: tuple[str, ...]
    kind: Kind
    about: str
    group: str
    off_flags: tuple[str, ...] = ()
    llama_env: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The long flag without its dashes: "ctx-size"; also the key in a configuration file."""
        return self.long_names[0]

    @property
    def long_names(self) -> tuple[str, ...]:
        return tuple(flag[2:] for flag in self.flags if flag.startswith("--"))

    @property
    def off_names(self) -> tuple[str, ...]:
        return tuple(flag[2:] for flag in self.off_flags if flag.startswith("--"))

    @property
    def env(self) -> str:
        return env_name(self.name)

    @property
    def spelling(self) -> str:
        """How messages name it: "-c/--ctx-size"."""
        short = [flag for flag in self.flags if not flag.startswith("--")][:1]
        return "/".join([*short, f"--{self.name}"])

    @property
    def commands(self) -> tuple[Command, ...]:
        # A chat runs a server of its own, which has the answers' settings but no choice of address.
        if self.target == "server" and self.group != ANSWERS:
            return ("serve",)
        return ("chat",) if self.target == "chat" else ("serve", "chat")

    @property
    def is_about_a_model(self) -> bool:
        """Whether it may differ from model to model: what a configuration file may say for one model."""
        return self.target in ("engine", "sampling") or self.field in _OF_ONE_MODEL

    @property
    def is_secret(self) -> bool:
        return self.field in ("api_keys", "api_key")


def env_name(name: str) -> str:
    """EDGESERVE_CTX_SIZE for "ctx-size"."""
    return "EDGESERVE_" + name.upper().replace("-", "_")


_OF_ONE_MODEL = ("model_alias", "chat_template", "reasoning_format", "system", "max_tokens")

MODEL, CONTEXT, PLACEMENT, SPEED = "Model", "Context and sequences", "Placement and memory", "Speed"
QUEUE, NETWORK, ANSWERS, SAMPLING = "Queue", "Network and access", "Answers", "Sampling"
ELSEWHERE = "A server that runs already"

_GPU_LAYERS = WholeNumber(0, words={"auto": -1, "all": -1, "-1": -1})
_THREADS = WholeNumber(0, words={"auto": 0, "-1": 0})
_CACHE_TYPE = Choice(CACHE_TYPES)

SETTINGS: tuple[Setting, ...] = (
    Setting(
        "run", "model", ("-m", "--model", "-hf", "-hfr", "--hf-repo"), AnyText("REF"),
        "a name from `edgeserve models list`, a file, or ORG/REPO[:QUANT] on Hugging Face",
        MODEL, llama_env=("LLAMA_ARG_MODEL", "LLAMA_ARG_HF_REPO"),
    ),
    Setting(
        "run", "offline", ("--offline",), Switch(), "use only what is on this machine already",
        MODEL, off_flags=("--no-offline",), llama_env=("LLAMA_ARG_OFFLINE", "LLAMA_OFFLINE"),
    ),
    Setting(
        "server", "model_alias", ("-a", "--alias"), AnyText("NAME"), "the model's name in the API",
        MODEL, llama_env=("LLAMA_ARG_ALIAS",),
    ),
    Setting(
        "engine", "n_ctx", ("-c", "--ctx-size"), WholeNumber(0),
        "tokens in the KV cache, all sequences together; 0 takes what a plan finds to fit",
        CONTEXT, llama_env=("LLAMA_ARG_CTX_SIZE",),
    ),
    Setting(
        "engine", "n_ctx_seq", ("--ctx-per-request",), WholeNumber(0),
        "tokens that one request may hold, prompt and answer together; 0 takes its share of the context",
        CONTEXT,
    ),
    Setting(
        "engine", "n_seq_max", ("-np", "--parallel"), WholeNumber(1, words={"auto": None, "-1": None}),
        "sequences computed at once", CONTEXT, llama_env=("LLAMA_ARG_N_PARALLEL",),
    ),
    Setting(
        "engine", "kv_unified", ("-kvu", "--kv-unified"), Switch(),
        "let sequences share one pool of cells instead of equal parts",
        CONTEXT, off_flags=("-no-kvu", "--no-kv-unified"), llama_env=("LLAMA_ARG_KV_UNIFIED",),
    ),
    Setting(
        "engine", "type_k", ("-ctk", "--cache-type-k"), _CACHE_TYPE, "type of the K cache",
        CONTEXT, llama_env=("LLAMA_ARG_CACHE_TYPE_K",),
    ),
    Setting(
        "engine", "type_v", ("-ctv", "--cache-type-v"), _CACHE_TYPE, "type of the V cache",
        CONTEXT, llama_env=("LLAMA_ARG_CACHE_TYPE_V",),
    ),
    Setting(
        "engine", "swa_full", ("--swa-full",), Switch(),
        "keep the whole context for sliding-window layers, so that prompts can be reused",
        CONTEXT, off_flags=("--no-swa-full",), llama_env=("LLAMA_ARG_SWA_FULL",),
    ),
    Setting(
        "engine", "cache_ram_mib", ("-cram", "--cache-ram"), WholeNumber(0, NO_LIMIT),
        "MiB of memory for prefixes that lost their place in the KV cache; 0 keeps none",
        CONTEXT, llama_env=("LLAMA_ARG_CACHE_RAM",),
    ),
    Setting(
        "engine", "cache_disk", ("--cache-disk",), AnyText("DIR"),
        "a directory for prefixes, so that a restart does not lose them; none is kept without it", CONTEXT,
    ),
    Setting(
        "engine", "cache_disk_mib", ("--cache-disk-size",), WholeNumber(1, NO_LIMIT),
        "MiB that this directory may hold", CONTEXT,
    ),
    Setting(
        "engine", "checkpoint_mib", ("--cache-checkpoints",), WholeNumber(0, NO_LIMIT),
        "MiB of memory for checkpoints of recurrent state or sliding windows, to reuse prefixes", CONTEXT,
    ),
    Setting(
        "engine", "n_gpu_layers", ("-ngl", "--gpu-layers", "--n-gpu-layers"), _GPU_LAYERS,
        "layers on the GPU: a number, auto or all",
        PLACEMENT, llama_env=("LLAMA_ARG_N_GPU_LAYERS",),
    ),
    Setting(
        "engine", "n_cpu_moe", ("-ncmoe", "--n-cpu-moe"), WholeNumber(0, words={"all": 999}),
        "layers whose experts stay on the CPU, counted from the first: a number or all",
        PLACEMENT, llama_env=("LLAMA_ARG_N_CPU_MOE",),
    ),
    Setting(
        "engine", "override_tensor", ("-ot", "--override-tensor"), Pairs("REGEX=CPU"),
        "tensors that stay on the CPU, by patterns of their names",
        PLACEMENT, llama_env=("LLAMA_ARG_OVERRIDE_TENSOR",),
    ),
    Setting(
        "engine", "tensor_split", ("-ts", "--tensor-split"), Shares(),
        "shares of the model for each GPU, such as 3,1", PLACEMENT, llama_env=("LLAMA_ARG_TENSOR_SPLIT",),
    ),
    Setting(
        "engine", "devices", ("-dev", "--device"), TextList("NAME"),
        "devices to use, by ggml's names; none for none", PLACEMENT, llama_env=("LLAMA_ARG_DEVICE",),
    ),
    Setting(
        "engine", "offload_kqv", ("-kvo", "--kv-offload"), Switch(), "keep the KV cache on the GPU",
        PLACEMENT, off_flags=("-nkvo", "--no-kv-offload"), llama_env=("LLAMA_ARG_KV_OFFLOAD",),
    ),
    Setting(
        "engine", "use_mmap", ("--mmap",), Switch(), "map the model file instead of reading it",
        PLACEMENT, off_flags=("--no-mmap",), llama_env=("LLAMA_ARG_MMAP",),
    ),
    Setting(
        "engine", "use_mlock", ("--mlock",), Switch(), "keep the model in RAM, out of the swap",
        PLACEMENT, off_flags=("--no-mlock",), llama_env=("LLAMA_ARG_MLOCK",),
    ),
    Setting(
        "engine", "use_extra_bufts", ("--repack",), Switch(),
        "rearrange weights for this CPU while loading",
        PLACEMENT, off_flags=("-nr", "--no-repack"), llama_env=("LLAMA_ARG_REPACK",),
    ),
    Setting(
        "run", "memory_bytes", ("--memory",), Size(),
        "use at most this much RAM, such as 6GiB: what does not fit is refused", PLACEMENT,
    ),
    Setting(
        "run", "gpu_memory_bytes", ("--gpu-memory",), Size(), "use at most this much of each GPU", PLACEMENT,
    ),
    Setting(
        "run", "margin_bytes", ("-fitt", "--fit-target"), Size("M"),
        "leave this much of each memory free, in place of the usual margin; a bare number is MiB",
        PLACEMENT, llama_env=("LLAMA_ARG_FIT_TARGET",),
    ),
    Setting(
        "run", "tune", ("--tune",), Switch(),
        "measure at the first start of a model which settings are fastest here, 15 s at most",
        SPEED, off_flags=("--no-tune",),
    ),
    Setting(
        "run", "force", ("--force",), Switch(), "start a model although it does not fit, by its plan",
        PLACEMENT, off_flags=("--no-force",),
    ),
    Setting(
        "engine", "n_threads", ("-t", "--threads"), _THREADS,
        "threads while generating; 0 takes what this process may use",
        SPEED, llama_env=("LLAMA_ARG_THREADS",),
    ),
    Setting(
        "engine", "n_threads_batch", ("-tb", "--threads-batch"), _THREADS,
        "threads while reading prompts; 0 takes the same", SPEED,
    ),
    Setting(
        "engine", "flash_attn", ("-fa", "--flash-attn"), Choice(("on", "off", "auto"), bare="on"),
        "flash attention; alone it means on", SPEED, llama_env=("LLAMA_ARG_FLASH_ATTN",),
    ),
    Setting(
        "engine", "n_batch", ("-b", "--batch-size"), WholeNumber(1), "most tokens in one step",
        SPEED, llama_env=("LLAMA_ARG_BATCH",),
    ),
    Setting(
        "engine", "n_ubatch", ("-ub", "--ubatch-size"), WholeNumber(1), "most tokens computed in one piece",
        SPEED, llama_env=("LLAMA_ARG_UBATCH",),
    ),
    Setting(
        "engine", "spec_type", ("--spec-type",), Choice(("none", "ngram-simple")),
        "ngram-simple guesses coming tokens from earlier places of the same text and verifies several in a"
        " step",
        SPEED, llama_env=("LLAMA_ARG_SPEC_TYPE",),
    ),
    Setting(
        "engine", "n_draft_max", ("--spec-draft-n-max", "--spec-ngram-simple-size-m"), WholeNumber(1, 256),
        "most tokens guessed in a step; fewer where that is faster",
        SPEED, llama_env=("LLAMA_ARG_SPEC_DRAFT_N_MAX",),
    ),
    Setting(
        "engine", "itl_target_ms", ("--itl-target-ms",), Number(0),
        "the gap between two tokens of a stream that prompts of others may cause; 0 derives it from the"
        " machine",
        SPEED,
    ),
    Setting(
        "engine", "prefill_chunk", ("--prefill-chunk",), WholeNumber(0),
        "prompt tokens in every step, for experiments; 0 lets the target above decide", SPEED,
    ),
    Setting(
        "engine", "max_waiting", ("--max-waiting",), WholeNumber(0),
        "requests that may wait; one more is answered 429", QUEUE,
    ),
    Setting(
        "engine", "max_waiting_tokens", ("--max-waiting-tokens",), WholeNumber(0),
        "prompt tokens that may wait in all; what would exceed them is answered 429; 0 sets no limit", QUEUE,
    ),
    Setting(
        "engine", "max_queue_s", ("--max-queue-s",), Number(0),
        "seconds that a request may wait for its turn", QUEUE,
    ),
    Setting(
        "server", "host", ("--host",), AnyText("HOST"),
        "address to listen on; beyond this machine a key is needed",
        NETWORK, llama_env=("LLAMA_ARG_HOST",),
    ),
    Setting(
        "server", "port", ("--port",), WholeNumber(0, 65535), "port to listen on; 0 takes a free one",
        NETWORK, llama_env=("LLAMA_ARG_PORT",),
    ),
    Setting(
        "server", "api_keys", ("--api-key",), TextList("KEY"), "keys that clients must send",
        NETWORK, llama_env=("LLAMA_API_KEY",),
    ),
    Setting(
        "server", "api_key_file", ("--api-key-file",), AnyText("FILE"), "a file with one key a line", NETWORK,
    ),
    Setting(
        "server", "allowed_hosts", ("--allow-host",), TextList("NAME"),
        "further names that this server answers to", NETWORK,
    ),
    Setting(
        "server", "allowed_origins", ("--allow-origin",), TextList("ORIGIN"),
        "web pages that may use this server, such as https://example.org", NETWORK,
    ),
    Setting(
        "server", "max_body_bytes", ("--max-body-bytes",), WholeNumber(1024), "largest request body", NETWORK,
    ),
    Setting(
        "server", "sse_ping_s", ("--sse-ping-interval",), Number(0.1),
        "seconds of silence after which a stream gets a comment",
        NETWORK, llama_env=("LLAMA_ARG_SSE_PING_INTERVAL",),
    ),
    Setting(
        "server", "drain_timeout_s", ("--drain-timeout",), Number(0),
        "seconds that running answers get to end after a stop signal", NETWORK,
    ),
    Setting(
        "server", "sleep_idle_s", ("--sleep-idle-seconds",), Number(-1),
        "seconds without a request after which the model is freed until the next one; 0 keeps it", PLACEMENT,
    ),
    Setting(
        "server", "chat_template", ("--chat-template-file",), AnyText("FILE"),
        "a Jinja template in place of the model's own",
        ANSWERS, llama_env=("LLAMA_ARG_CHAT_TEMPLATE_FILE",),
    ),
    Setting(
        "server", "reasoning_format", ("--reasoning-format",), Choice(("deepseek", "none")),
        "deepseek puts a model's thoughts in reasoning_content, none leaves them in the text",
        ANSWERS, llama_env=("LLAMA_ARG_THINK",),
    ),
    Setting(
        "engine", "n_predict", ("-n", "--predict", "--n-predict"),
        WholeNumber(0, words={"-1": NO_LIMIT}),
        "longest answer, in tokens, of a request that names none; 0 is half of an equal share of the context,"
        " -1 all that a request may hold",
        ANSWERS, llama_env=("LLAMA_ARG_N_PREDICT",),
    ),
    Setting(
        "chat", "url", ("--url",), AnyText("URL"), "chat with this server instead of starting one", ELSEWHERE,
    ),
    Setting(
        "chat", "api_key", ("--api-key",), AnyText("KEY"), "key for the server at --url",
        ELSEWHERE, llama_env=("LLAMA_API_KEY",),
    ),
    Setting("chat", "max_tokens", ("--max-tokens",), WholeNumber(1), "longest answer, in tokens", ANSWERS),
    Setting("chat", "system", ("-sys", "--system"), AnyText("TEXT"), "system prompt", ANSWERS),
    Setting(
        "chat", "plain", ("--plain",), Switch(), "show the answer as it comes, without styles",
        ANSWERS, off_flags=("--no-plain",),
    ),
    Setting(
        "chat", "timings_per_token", ("--timings-per-token",), Switch(),
        "list each token's time after an answer",
        ANSWERS, off_flags=("--no-timings-per-token",),
    ),
    Setting(
        "sampling", "temperature", ("--temp", "--temperature"), Number(0, 100),
        "0 always takes the likeliest token", SAMPLING, llama_env=("LLAMA_ARG_TEMP",),
    ),
    Setting(
        "sampling", "top_k", ("--top-k",), WholeNumber(0), "only the k likeliest tokens; 0 for all",
        SAMPLING, llama_env=("LLAMA_ARG_TOP_K",),
    ),
    Setting(
        "sampling", "top_p", ("--top-p",), Number(0, 1), "only the likeliest tokens that together reach p",
        SAMPLING, llama_env=("LLAMA_ARG_TOP_P",),
    ),
    Setting(
        "sampling", "min_p", ("--min-p",), Number(0, 1), "only tokens at least p times as likely as the best",
        SAMPLING, llama_env=("LLAMA_ARG_MIN_P",),
    ),
    Setting(
        "sampling", "repeat_penalty", ("--repeat-penalty",), Number(0.01, 100),
        "above 1 discourages repetition",
        SAMPLING, llama_env=("LLAMA_ARG_REPEAT_PENALTY",),
    ),
    Setting(
        "sampling", "presence_penalty", ("--presence-penalty",), Number(-100, 100),
        "against tokens that already occurred", SAMPLING, llama_env=("LLAMA_ARG_PRESENCE_PENALTY",),
    ),
    Setting(
        "sampling", "frequency_penalty", ("--frequency-penalty",), Number(-100, 100),
        "against tokens by how often they occurred", SAMPLING, llama_env=("LLAMA_ARG_FREQUENCY_PENALTY",),
    ),
    Setting(
        "sampling", "seed", ("-s", "--seed"), WholeNumber(0, 2**32 - 1, words={"-1": None}),
        "the same seed draws the same answer; -1 draws another each time",
        SAMPLING, llama_env=("LLAMA_ARG_SEED",),
    ),
    Setting(
        "run", "verbose", ("-v", "--verbose"), Switch(), "show llama.cpp's own messages",
        MODEL, off_flags=("--no-verbose",), llama_env=("LLAMA_ARG_LOG_VERBOSE",),
    ),
)  # fmt: skip


def settings_of(command: Command) -> tuple[Setting, ...]:
    """The settings that a command takes, in the order of its help."""
    return tuple(setting for setting in SETTINGS if command in setting.commands)
