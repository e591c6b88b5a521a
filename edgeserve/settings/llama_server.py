"""Options of llama-server that edgeserve has no setting for, each with what to say to somebody who types it.

Owns these sentences and the flags that ask for what is always so here. Source of the names: the option table
of llama.cpp's server (tools/server/README.md). Knows nothing of how options are parsed.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Absent:
    """Options that do not exist here. `sentence` says why, or what to do instead."""

    flags: tuple[str, ...]
    sentence: str


_VISION = "It serves text only: images and sound are not supported."
_PLACES = "Layers are placed with -ngl, -ncmoe, -ot, -ts and -dev."
_DRAFT = "Drafts come from the text itself here: --spec-type ngram-simple."
_ADAPTER = "Adapters are not supported: merge them into the model file."
_ROPE = "The model file's own RoPE settings are used."
_REASONING = (
    "--reasoning-format none leaves thoughts in the text; how much a model thinks is up to the request."
)
_ONE_MODEL = "One server has one model: start another with another --port."
_TLS = "Put a reverse proxy in front of it for TLS."
_SAMPLERS = "Its samplers are temperature, top-k, top-p, min-p and the penalties."
_LOG = "Messages go to standard error; redirect it. -v shows llama.cpp's own."
_GRAMMAR = "Constrained output is not supported."
_EMBED = "It generates text only: embeddings and reranking are not supported."
_THREADS = "Set the affinity from outside, with taskset: the thread count follows it."
_CACHE = "Prompt prefixes are found wherever they are; --cache-disk keeps them over a restart."
_CHECKPOINTS = "Checkpoints are bounded by their memory: --cache-checkpoints MIB."
_WEB = "It has no web page; `edgeserve chat` talks in the terminal."
_TOOLS = "It runs no tools: that is up to the client."
_PAGES = "Pages on this machine may use it; name others with --allow-origin."
_REQUEST = "Send it with the request."

ABSENT: tuple[Absent, ...] = (
    Absent(("-mm", "--mmproj", "-mmu", "--mmproj-url", "--image-min-tokens", "--image-max-tokens"), _VISION),
    Absent(("--mmproj-auto", "--no-mmproj", "--no-mmproj-auto", "--mmproj-offload", "--no-mmproj-offload"),
           _VISION),
    Absent(("-cmoe", "--cpu-moe"), "--n-cpu-moe all is the same."),
    Absent(("-sm", "--split-mode", "-mg", "--main-gpu", "--rpc", "--no-host"), _PLACES),
    Absent(("--list-devices",), "`edgeserve doctor` lists them."),
    Absent(("-fit", "--fit", "-fitc", "--fit-ctx"),
           "Settings that are not given are planned to fit; -fitt says how much stays free."),
    Absent(("-md", "--model-draft", "-hfd", "--hf-repo-draft", "-cd", "--ctx-size-draft", "-ngld",
            "--gpu-layers-draft", "--draft", "--draft-n", "--draft-max", "--draft-min", "--draft-n-min",
            "--draft-p-min", "-devd", "--device-draft", "-lcs", "--lookup-cache-static",
            "-lcd", "--lookup-cache-dynamic"), _DRAFT),
    Absent(("--spec-draft-model", "--spec-draft-hf", "-hfrd", "--spec-draft-n-min",
            "--spec-draft-p-min", "--spec-draft-p-split", "--draft-p-split", "--spec-draft-ngl",
            "--n-gpu-layers-draft", "--spec-draft-device", "--spec-draft-type-k", "-ctkd",
            "--cache-type-k-draft", "--spec-draft-type-v", "-ctvd", "--cache-type-v-draft",
            "--spec-draft-threads", "-td", "--threads-draft", "--spec-draft-threads-batch", "-tbd",
            "--threads-batch-draft", "--spec-draft-override-tensor", "-otd", "--override-tensor-draft",
            "--spec-draft-cpu-moe", "-cmoed", "--cpu-moe-draft", "--spec-draft-n-cpu-moe", "-ncmoed",
            "--n-cpu-moe-draft", "--spec-ngram-mod-n-min", "--spec-ngram-mod-n-max",
            "--spec-ngram-mod-n-match", "--spec-ngram-simple-size-n",
            "--spec-ngram-simple-min-hits", "--spec-ngram-map-k-size-n", "--spec-ngram-map-k-size-m",
            "--spec-ngram-map-k-min-hits", "--spec-ngram-map-k4v-size-n", "--spec-ngram-map-k4v-size-m",
            "--spec-ngram-map-k4v-min-hits", "--spec-default"), _DRAFT),
    Absent(("--lora", "--lora-scaled", "--control-vector", "--control-vector-scaled"), _ADAPTER),
    Absent(("--rope-scaling", "--rope-scale", "--rope-freq-base", "--rope-freq-scale", "--yarn-orig-ctx",
            "--yarn-ext-factor", "--yarn-attn-factor", "--yarn-beta-slow", "--yarn-beta-fast"), _ROPE),
    Absent(("--override-kv",), "The model file's own header is used."),
    Absent(("--keep",), "A full context ends the answer; nothing is dropped from its beginning."),
    Absent(("--context-shift",), "A full context ends the answer; nothing is dropped from its beginning."),
    Absent(("--cache-reuse", "--slot-save-path", "-sps", "--slot-prompt-similarity"), _CACHE),
    Absent(("--ctx-checkpoints", "--swa-checkpoints", "-ctxcp"), _CHECKPOINTS),
    Absent(("-dt", "--defrag-thold"), "llama.cpp itself no longer uses it."),
    Absent(("--embedding", "--embeddings", "--rerank", "--reranking"), _EMBED),
    Absent(("--pooling",), _EMBED),
    Absent(("--grammar", "--grammar-file", "-j", "--json-schema", "-jf", "--json-schema-file"), _GRAMMAR),
    Absent(("--chat-template",), "Give the template as a file: --chat-template-file."),
    Absent(("--chat-template-kwargs",), "Send them with the request, as chat_template_kwargs."),
    Absent(("--no-jinja",), "Chat templates are always Jinja."),
    Absent(("--prefill-assistant", "--no-prefill-assistant"),
           "A last message of the assistant is always continued."),
    Absent(("--reasoning-budget", "-rea", "--reasoning", "--reasoning-budget-message"), _REASONING),
    Absent(("--reasoning-effort",), "Send it with the request, as reasoning_effort."),
    Absent(("-hff", "--hf-file"), "Name the file in the reference: -m hf:ORG/REPO/FILE.gguf."),
    Absent(("-hft", "--hf-token"), "Set HF_TOKEN in the environment."),
    Absent(("-mu", "--model-url", "-dr", "--docker-repo"), "Download the file and give it with -m."),
    Absent(("--models-dir", "--models-preset", "--models-max", "--models-autoload", "--no-models-autoload"),
           _ONE_MODEL),
    Absent(("--ssl-key-file", "--ssl-cert-file"), _TLS),
    Absent(("--path", "--webui-config", "--webui-config-file", "--api-prefix", "--tools"), _WEB),
    Absent(("--webui", "--ui", "--ui-config", "--ui-config-file", "--ui-mcp-proxy", "--webui-mcp-proxy"),
           _WEB),
    Absent(("--mcp-servers-config", "--mcp-servers-json", "-ag", "--agent", "--tools-runtime"), _TOOLS),
    Absent(("--cors-origins", "--cors-methods", "--cors-headers", "--cors-credentials"), _PAGES),
    Absent(("-to", "--timeout"), "--max-queue-s bounds the wait; a client ends a request by leaving."),
    Absent(("--threads-http",), "HTTP needs no threads here."),
    Absent(("-C", "--cpu-mask", "-Cr", "--cpu-range", "-Cb", "--cpu-mask-batch", "-Crb", "--cpu-range-batch",
            "--cpu-strict", "--numa", "--prio", "--prio-batch", "--poll", "--poll-batch"), _THREADS),
    Absent(("--samplers", "--sampler-seq", "--sampling-seq", "--typical", "--typical-p", "--top-nsigma",
            "--top-n-sigma", "--xtc-probability", "--xtc-threshold", "--dry-multiplier", "--dry-base",
            "--dry-allowed-length", "--dry-penalty-last-n", "--dry-sequence-breaker", "--dynatemp-range",
            "--dynatemp-exp", "--mirostat", "--mirostat-lr", "--mirostat-ent", "--adaptive-target"),
           _SAMPLERS),
    Absent(("--logit-bias", "--repeat-last-n"), _REQUEST),
    Absent(("--ignore-eos",), _REQUEST),
    Absent(("--log-file", "--log-colors", "-lv", "--verbosity", "--log-verbosity"), _LOG),
    Absent(("--log-disable", "--log-prefix", "--log-timestamps"), _LOG),
    Absent(("--no-slots", "--no-metrics", "--no-cont-batching", "-nocb", "--no-warmup", "--no-cache-prompt"),
           "That part is always on."),
    Absent(("--props",), "Settings cannot be changed while it runs; GET /props shows them."),
    Absent(("--media-path",), _VISION),
    Absent(("--special", "-sp"), "Control tokens never appear in the text."),
    Absent(("--check-tensors",), "`edgeserve models pull` checks the hash of the whole file."),
)  # fmt: skip

ALWAYS_SO: tuple[str, ...] = (
    "--metrics", "--slots", "--jinja", "-cb", "--cont-batching", "--warmup", "--no-webui", "--no-ui",
    "--no-context-shift", "--cache-prompt", "--no-perf",
)  # fmt: skip
"""Switches that ask for what is always so here: taken, so that a llama-server command line works as it is."""
