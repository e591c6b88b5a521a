"""Other people's clients against a running server: each one chat, one stream and one error.

    python -m venv clients && clients/bin/pip install langchain-openai llama-index-llms-openai-like llm
    edgeserve serve --port 8080 &
    clients/bin/python benchmarks/clients.py --url http://127.0.0.1:8080

Run by that environment's own Python: the clients are no dependencies of this project. Prints a line for each
check; the exit code is 1 when one fails. Retries are switched off, where a client has them: they would hide
what the server said.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

QUESTION = "What is 2+2?"
TOO_LONG = "word " * 40_000


class MissedError(AssertionError):
    """A check that failed; its message says how."""


def expect(holds: object, what: str) -> None:
    if not holds:
        raise MissedError(what)


# -- LangChain ----------------------------------------------------------------------------------------------


def langchain_model(url: str) -> object:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(
        base_url=f"{url}/v1", api_key="any", model="any", temperature=0, max_tokens=20, max_retries=0
    )


def langchain_chat(url: str) -> str:
    answer = langchain_model(url).invoke(QUESTION)
    expect("4" in answer.content, answer.content)
    expect(answer.usage_metadata["output_tokens"] > 0, "no usage")
    return answer.content


def langchain_stream(url: str) -> str:
    chunks = list(langchain_model(url).stream(QUESTION, stream_usage=True))
    expect(len(chunks) > 3, f"{len(chunks)} chunks")
    expect(sum((chunk.usage_metadata or {}).get("output_tokens", 0) for chunk in chunks) > 0, "no usage")
    return "".join(chunk.content for chunk in chunks)


def langchain_error(url: str) -> str:
    import openai

    try:
        langchain_model(url).invoke(TOO_LONG)
    except openai.BadRequestError as error:
        expect(error.code == "context_length_exceeded", str(error))
        return type(error).__name__
    raise MissedError("no error")


# -- LlamaIndex ---------------------------------------------------------------------------------------------


def llama_index_model(url: str, *, is_chat: bool) -> object:
    from llama_index.llms.openai_like import OpenAILike

    return OpenAILike(
        model="any",
        api_base=f"{url}/v1",
        api_key="any",
        is_chat_model=is_chat,
        context_window=4096,
        max_tokens=20,
        temperature=0,
        max_retries=0,
    )


def llama_index_chat(url: str) -> str:
    from llama_index.core.llms import ChatMessage

    answer = llama_index_model(url, is_chat=True).chat([ChatMessage(role="user", content=QUESTION)])
    expect("4" in answer.message.content, answer.message.content)
    return answer.message.content


def llama_index_stream(url: str) -> str:
    """Without is_chat_model it speaks to /v1/completions."""
    parts = list(llama_index_model(url, is_chat=False).stream_complete("The capital of France is"))
    expect(len(parts) > 3, f"{len(parts)} parts")
    expect("Paris" in parts[-1].text, parts[-1].text)
    return parts[-1].text


def llama_index_error(url: str) -> str:
    import openai

    try:
        llama_index_model(url, is_chat=False).complete(TOO_LONG)
    except openai.BadRequestError as error:
        expect(error.code == "context_length_exceeded", str(error))
        return type(error).__name__
    raise MissedError("no error")


# -- llm ----------------------------------------------------------------------------------------------------


def llm_command(url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as home:
        Path(home, "extra-openai-models.yaml").write_text(
            f"- model_id: edge\n  model_name: any\n  api_base: {url}/v1\n  api_key_name: edge\n",
            encoding="utf-8",
        )
        environment = {**os.environ, "LLM_USER_PATH": home}
        command = [
            sys.executable,
            "-m",
            "llm",
            "prompt",
            "-m",
            "edge",
            "--key",
            "any",
            "--no-log",
            *arguments,
        ]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=300, check=False
        )


def llm_chat(url: str) -> str:
    done = llm_command(url, QUESTION, "--no-stream", "-o", "max_tokens", "20", "-o", "temperature", "0")
    expect(done.returncode == 0 and "4" in done.stdout, done.stdout + done.stderr)
    return done.stdout.strip()


def llm_stream(url: str) -> str:
    done = llm_command(url, QUESTION, "-o", "max_tokens", "20", "-o", "temperature", "0")
    expect(done.returncode == 0 and "4" in done.stdout, done.stdout + done.stderr)
    return done.stdout.strip()


def llm_error(url: str) -> str:
    done = llm_command(url, QUESTION, "-o", "max_tokens", "-5")
    expect(done.returncode != 0 and "max_tokens" in done.stderr, done.stdout + done.stderr)
    return done.stderr.strip().splitlines()[-1]


CHECKS: dict[str, tuple[str, tuple[Callable[[str], str], ...]]] = {
    "LangChain ChatOpenAI": ("langchain-openai", (langchain_chat, langchain_stream, langchain_error)),
    "LlamaIndex OpenAILike": (
        "llama-index-llms-openai-like",
        (llama_index_chat, llama_index_stream, llama_index_error),
    ),
    "llm": ("llm", (llm_chat, llm_stream, llm_error)),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    url = parser.parse_args().url.rstrip("/")
    num_failed = 0
    for name, (package, checks) in CHECKS.items():
        for check in checks:
            what = check.__name__.rpartition("_")[2]
            try:
                result = f"ok      {check(url)[:80]!r}"
            except Exception as error:
                num_failed += 1
                result = f"FAILED  {type(error).__name__}: {str(error)[:300]}"
            print(f"{name} {importlib.metadata.version(package)}, {what}: {result}", flush=True)
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
