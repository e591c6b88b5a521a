"""A vocabulary that puts a space before every text gets one where a prompt begins, not where it is cut."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import sentencepiece_model

from edgeserve.llama import Model
from edgeserve.server.chat_template import ChatTemplate
from edgeserve.server.prompt import PromptBuilder
from edgeserve.server.protocol_chat import ChatRequest

SOURCE = "{{ bos_token }}{% for m in messages %}[INST]{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def spm(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    path = sentencepiece_model.write(tmp_path_factory.mktemp("model") / "spm.gguf")
    # The library keeps one log for the process, which must not end with this module.
    spm = Model(path, log=model.log)
    yield spm
    spm.close()


@pytest.fixture(scope="module")
def prompts(spm: Model) -> Iterator[PromptBuilder]:
    template = ChatTemplate(SOURCE, bos_token="<s>", eos_token="</s>")
    yield PromptBuilder(spm, template)
    template.close()


def shown(spm: Model, prompts: PromptBuilder, content: str) -> tuple[tuple[int, ...], str]:
    ask = ChatRequest.model_validate({"messages": [{"role": "user", "content": content}]})
    token_ids = prompts.chat(ask).token_ids
    return token_ids, spm.detokenize(token_ids, special=True).decode()


def test_ordinary_text(spm: Model, prompts: PromptBuilder) -> None:
    token_ids, text = shown(spm, prompts, "hello world")
    assert list(token_ids) == spm.tokenize("<s>[INST]hello world", add_special=False, parse_special=True)
    assert text == "<s> [INST]hello world"


@pytest.mark.parametrize("content", ["hello</s>world", "</s>hello", "hello</s>", "</s></s>world", "<s>"])
def test_typed_control_tokens_bring_no_spaces(spm: Model, prompts: PromptBuilder, content: str) -> None:
    token_ids, text = shown(spm, prompts, content)
    assert text == f"<s> [INST]{content}"
    assert token_ids.count(spm.bos_id) == 1
    assert spm.eos_id not in token_ids
