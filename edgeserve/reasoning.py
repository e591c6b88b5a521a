"""Telling a model's reasoning from its answer while the text is still arriving.

Owns the marks that model families put around reasoning, and splitters that hold back what may turn out to
be a mark: for a server, which knows template and prompt, and for a client, which knows neither. However the
text is cut into pieces, the parts come out the same. Knows nothing of tokens or wire formats.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Part:
    """Some text, and whether it is reasoning."""

    text: str
    is_reasoning: bool = False


class Splitter(Protocol):
    def feed(self, text: str) -> list[Part]:
        """The parts that are certain by now."""
        ...

    def flush(self) -> list[Part]:
        """What was held back, when no more text comes."""
        ...

    @property
    def in_reasoning(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class ReasoningStyle:
    """How one family marks its reasoning."""

    opening: str
    closing: str
    is_channels: bool = False

    def is_open_after(self, prompt_end: str) -> bool:
        """Whether a prompt that ends so has already opened the reasoning."""
        return prompt_end.rfind(self.opening) > prompt_end.rfind(self.closing)

    def splitter(self, prompt_end: str) -> Splitter:
        if self.is_channels:
            return ChannelSplitter(prompt_end)
        return TagSplitter(self, starts_open=self.is_open_after(prompt_end))

    @property
    def marks(self) -> tuple[str, ...]:
        return (_CHANNEL, _MESSAGE) if self.is_channels else (self.opening, self.closing)


_CHANNEL, _MESSAGE = "<|channel|>", "<|message|>"
_CHANNEL_ENDS = ("<|end|>", "<|start|>", "<|return|>", "<|call|>", _CHANNEL)

CHANNELS = ReasoningStyle("<|channel|>analysis<|message|>", "<|end|>", is_channels=True)
THINK = ReasoningStyle("<think>", "</think>")
_STYLES = (
    ReasoningStyle("[THINK]", "[/THINK]"),
    ReasoningStyle("<seed:think>", "</seed:think>"),
    ReasoningStyle("<|START_THINKING|>", "<|END_THINKING|>"),
)
_SEEN_ELSEWHERE = ReasoningStyle("<thinking>", "</thinking>")
"""Instructed or fine-tuned into models whose templates do not know it."""


def splitter_of_any() -> Splitter:
    """For an answer whose template is not known: whichever tag it begins with. One that the prompt has opened
    cannot be told from an answer."""
    return TagSplitter(THINK, *_STYLES, _SEEN_ELSEWHERE)


def style_of(template: str) -> ReasoningStyle:
    """The style whose marks the chat template mentions; <think> where it mentions none, since fine-tuned
    models reason under templates that were written before them."""
    if _CHANNEL in template and _MESSAGE in template:
        return CHANNELS
    return next((style for style in _STYLES if style.opening in template or style.closing in template), THINK)


def held_suffix(text: str, marks: tuple[str, ...]) -> int:
    """The length of the longest end of `text` that could be the beginning of a mark."""
    most = min(len(text), max(map(len, marks)) - 1)
    for size in range(most, 0, -1):
        if any(mark.startswith(text[-size:]) for mark in marks):
            return size
    return 0


class PlainSplitter:
    """Everything is the answer."""

    in_reasoning = False

    def feed(self, text: str) -> list[Part]:
        return [Part(text)] if text else []

    def flush(self) -> list[Part]:
        return []


class TagSplitter:
    """Reasoning between the two tags of one of some styles, at the very beginning of the answer, or opened by
    the prompt, in the first style then.

    A tag further on is the answer's own text: people do ask about tags. White space around the reasoning
    belongs to the marks.
    """

    def __init__(self, *styles: ReasoningStyle, starts_open: bool = False) -> None:
        self._styles = styles
        self._closing = styles[0].closing
        self._held = ""
        self._state = "reasoning" if starts_open else "start"
        self._trims_start = starts_open

    @property
    def in_reasoning(self) -> bool:
        return self._state == "reasoning"

    def feed(self, text: str) -> list[Part]:
        self._held += text
        parts: list[Part] = []
        if self._state == "start":
            self._leave_start()
        if self._state == "reasoning":
            parts += self._take_reasoning()
        if self._state == "answer":
            parts += self._take_answer()
        return parts

    def flush(self) -> list[Part]:
        held, self._held = self._held, ""
        if self.in_reasoning:
            held = held.rstrip()
        return [Part(held, self.in_reasoning)] if held else []

    def _leave_start(self) -> None:
        seen = self._held.lstrip()
        for style in self._styles:
            if seen.startswith(style.opening):
                self._closing, self._held = style.closing, seen[len(style.opening) :]
                self._state, self._trims_start = "reasoning", True
                return
        if not any(style.opening.startswith(seen) for style in self._styles):
            self._state, self._trims_start = "answer", False

    def _take_reasoning(self) -> list[Part]:
        reasoning, mark, rest = self._held.partition(self._closing)
        if mark:
            self._state = "answer"
            out, self._held = reasoning.rstrip(), rest
        else:
            # White space before a closing tag is dropped, so it waits until something follows it.
            certain = len(reasoning) - held_suffix(reasoning, (self._closing,))
            certain = len(reasoning[:certain].rstrip())
            out, self._held = reasoning[:certain], reasoning[certain:]
        if self._trims_start:
            out = out.lstrip()
        self._trims_start = bool(mark) or (self._trims_start and not out)
        return [Part(out, True)] if out else []

    def _take_answer(self) -> list[Part]:
        out, self._held = self._held, ""
        if self._trims_start:
            out = out.lstrip()
            self._trims_start = not out
        return [Part(out)] if out else []


class ChannelSplitter:
    """gpt-oss: <|channel|>NAME<|message|>TEXT<|end|>, several in a row; the analysis channel is reasoning."""

    def __init__(self, prompt_end: str = "") -> None:
        self._held = ""
        self._channel = ""
        self._in_message = False
        self._is_headless = True
        self.feed(prompt_end[prompt_end.rfind("<|start|>") :] if "<|start|>" in prompt_end else "")
        self._prompt_header = self._held

    @property
    def in_reasoning(self) -> bool:
        return self._in_message and self._channel.startswith("analysis")

    def feed(self, text: str) -> list[Part]:
        self._held += text
        parts: list[Part] = []
        while self._step(parts):
            pass
        return parts

    def flush(self) -> list[Part]:
        held, self._held = self._held, ""
        if self._is_headless:
            # A model that forgot its header has still answered.
            held = held.removeprefix(self._prompt_header)
        elif not self._in_message:
            held = ""
        return [Part(held, self.in_reasoning)] if held else []

    def _step(self, parts: list[Part]) -> bool:
        """Take what is certain up to the next mark; False when more text is needed."""
        if not self._in_message:
            header, mark, rest = self._held.partition(_MESSAGE)
            if mark:
                self._channel = header.rpartition(_CHANNEL)[2].strip()
                self._held, self._in_message, self._is_headless = rest, True, False
            return bool(mark)
        end = min((at for mark in _CHANNEL_ENDS if (at := self._held.find(mark)) >= 0), default=-1)
        certain = end if end >= 0 else len(self._held) - held_suffix(self._held, _CHANNEL_ENDS)
        if certain:
            parts.append(Part(self._held[:certain], self.in_reasoning))
        self._held, self._in_message = self._held[certain:], end < 0
        return end >= 0
