"""Messages or raw prompts -> token ids.

Owns the rule that text stays text: a control token's name typed into a message is tokenized as characters,
while the same name in the template's own markup is the token. Where no such name is typed, the ids are
those of the rendered prompt tokenized as a whole. Blocks (rendering, tokenizing): call from a worker
thread.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from edgeserve.errors import ContextLengthError, InvalidRequestError
from edgeserve.server.chat_template import ChatTemplate, Rendered
from edgeserve.server.protocol import check_token_ids
from edgeserve.server.protocol_chat import ChatRequest
from edgeserve.server.protocol_completions import RawPrompt
from edgeserve.server.template_process import TemplateError

if TYPE_CHECKING:
    from edgeserve.llama import Model

logger = logging.getLogger(__name__)

# Characters of a private-use plane: no vocabulary, template or keyboard has a meaning for them.
_PRIVATE = (0xF0000, 0xFFFFD)


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    token_ids: tuple[int, ...]
    text: str
    generation_prompt: str
    """The end of the prompt that belongs to the answer: what the template opened, or what it continues."""


class PromptBuilder:
    """Bound to one model and its template."""

    def __init__(
        self, model: Model, template: ChatTemplate, *, n_ctx_seq: int = 0, is_fallback: bool = False
    ) -> None:
        """`n_ctx_seq` 0 tokenizes texts of any length."""
        self._model = model
        self._n_ctx_seq = n_ctx_seq
        self._longest_piece = longest_piece(model) if n_ctx_seq else 0
        self._template = template
        self._is_fallback = is_fallback
        self._control = control_pattern(model)
        self._adds_space = _adds_space(model)
        self._warned_bos = False

    def chat(self, ask: ChatRequest) -> ChatPrompt:
        """Raises TemplateError where the template refuses the conversation."""
        messages: list[dict[str, Any]] = [message.for_template() for message in ask.messages]
        variables = ask.template_variables()
        opening, closing, end = _unused_characters([messages, variables], 3)
        if (control := self._control) is not None:

            def wrap(text: str) -> str:
                return control.sub(lambda found: f"{opening}{found[0]}{closing}", text)

            messages, variables = _map_strings(messages, wrap), _map_strings(variables, wrap)
        rendered = self._render(ask, messages, variables, end)
        self._check_length(rendered.prompt)
        segments = split_marked(rendered.prompt, opening, closing)
        token_ids = tuple(self._tokenize(segments))
        if not token_ids:
            raise TemplateError("The model's chat template makes an empty prompt of this conversation.")
        return ChatPrompt(
            token_ids=token_ids,
            text="".join(text for text, _ in segments),
            generation_prompt=rendered.generation_prompt.replace(opening, "").replace(closing, ""),
        )

    def is_control(self, name: str) -> bool:
        """Whether `name` is a token that text does not show unless it is asked to."""
        return self._control is not None and self._control.fullmatch(name) is not None

    def raw(self, prompt: RawPrompt) -> tuple[int, ...]:
        """A completion's prompt as it stands; control tokens written in it are read as such."""
        if isinstance(prompt, str):
            self._check_length(prompt, "prompt")
            token_ids = tuple(self._model.tokenize(prompt, add_special=True, parse_special=True))
        else:
            token_ids = prompt
            check_token_ids(token_ids, self._model.n_vocab, "prompt")
        if not token_ids:
            raise InvalidRequestError("The prompt is empty.", param="prompt")
        return token_ids

    def _check_length(self, text: str, param: str = "messages") -> None:
        """Refuse what cannot fit before it takes a worker many seconds to find out by how much.

        A token stands for a piece's length of text at most, so this never refuses what would fit.
        """
        if not self._n_ctx_seq:
            return
        least = len(text) // self._longest_piece
        if least > self._n_ctx_seq:
            error = ContextLengthError(
                least, self._n_ctx_seq, "It has at least so many: it was not tokenized."
            )
            error.param = param
            raise error

    def _render(
        self, ask: ChatRequest, messages: list[dict[str, Any]], variables: dict[str, Any], end: str
    ) -> Rendered:
        if ask.continues_last:
            return self._template.render_open_ended(messages, variables, end)
        if ask.add_generation_prompt is False:
            text = self._template.render(
                self._template.adapt(messages), variables, add_generation_prompt=False
            )
            return Rendered(text)
        return self._template.render_for_answer(messages, variables)

    def _tokenize(self, segments: Sequence[tuple[str, bool]]) -> list[int]:
        token_ids: list[int] = []
        for text, is_markup in segments:
            add_special = self._is_fallback and not token_ids
            token_ids += self._tokenize_one(text, is_markup, add_special, is_first=not token_ids)
        return self._without_double_bos(token_ids)

    def _tokenize_one(self, text: str, is_markup: bool, add_special: bool, *, is_first: bool) -> list[int]:
        if is_first or not self._adds_space:
            return self._model.tokenize(text, add_special=add_special, parse_special=is_markup)
        # Such a vocabulary puts a space before the first word of every text; in mid-prompt a guard takes it.
        guard = self._model.tokenize("\n", add_special=False, parse_special=False)
        guarded = self._model.tokenize("\n" + text, add_special=False, parse_special=is_markup)
        if guarded[: len(guard)] == guard:
            return guarded[len(guard) :]
        return self._model.tokenize(text, add_special=False, parse_special=is_markup)

    def _without_double_bos(self, token_ids: list[int]) -> list[int]:
        bos = self._model.bos_id
        if token_ids[:2] != [bos, bos]:
            return token_ids
        if not self._warned_bos:
            self._warned_bos = True
            logger.warning(
                "The chat template and the tokenizer both add a beginning-of-text token; one is kept."
            )
        return token_ids[1:]


def longest_piece(model: Model) -> int:
    """The most bytes that one token stands for."""
    return max(len(model.piece(token, special=True)) for token in range(model.n_vocab))


def control_pattern(model: Model) -> re.Pattern[str] | None:
    """Matches the names of tokens that only exist as tokens when asked for (not user-defined ones, which the
    tokenizer always reads as tokens)."""
    names = [name for name in model.special_pieces if _is_control(model, name)]
    if not names:
        return None
    return re.compile("|".join(re.escape(name) for name in sorted(names, key=len, reverse=True)))


def _is_control(model: Model, name: str) -> bool:
    as_token = model.tokenize(name, add_special=False, parse_special=True)
    return as_token != model.tokenize(name, add_special=False, parse_special=False)


def _adds_space(model: Model) -> bool:
    token_ids = model.tokenize("a", add_special=False, parse_special=False)
    return bool(token_ids) and model.detokenize(token_ids).startswith(b" ")


def split_marked(text: str, opening: str, closing: str) -> list[tuple[str, bool]]:
    """(segment, is markup) pairs. Marks that a template tore apart fall on the side of plain text."""
    segments: list[tuple[str, bool]] = []
    for index, chunk in enumerate(text.split(opening)):
        plain, mark, rest = chunk.partition(closing)
        if index == 0:
            segments.append((chunk.replace(closing, ""), True))
        elif not mark:
            segments.append((chunk, False))
        else:
            segments += [(plain, False), (rest.replace(closing, ""), True)]
    return [segment for segment in segments if segment[0]]


def _map_strings(value: Any, change: Callable[[str], Any]) -> Any:
    """`value` with every string in it changed, keys apart."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_map_strings(item, change) for item in value]
    if isinstance(value, dict):
        return {key: _map_strings(item, change) for key, item in value.items()}
    return value


def _unused_characters(value: Any, count: int) -> list[str]:
    used: set[str] = set()
    _map_strings(value, used.update)
    free = list(islice((char for code in range(*_PRIVATE) if (char := chr(code)) not in used), count))
    if len(free) < count:
        raise InvalidRequestError("The messages use up every private-use character.", param="messages")
    return free
