"""Text of a wanted length in tokens, cold by default, for a server whose tokenizer is not at hand.

Owns: the words, the calibration against the server's own prompt counts, and what makes a prompt cold or warm.
Does not know: when a prompt is sent. How long it really was, and how much of it the server found resident, is
read from the answer afterwards; these are only aims.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from edgeserve.bench.workload import TRACE_BLOCK_TOKENS, Planned

ChatMessages = tuple[Mapping[str, str], ...]

# Short, frequent words: one token each, with their leading space, in the vocabularies of most models.
_WORDS = (
    "time year people way day man thing woman life child world school state family student group country "
    "problem hand part place case week company system program question work number night point home water "
    "room mother area money story fact month lot right study book eye job word business issue side kind "
    "head house service friend father power hour game line end member law car city name president team "
    "minute idea body back parent face others level office door health person art war history party "
    "result change morning reason research girl guy moment air teacher force education foot boy age "
    "policy music market sense"
)
WORDS = tuple(_WORDS.split())


@dataclass(frozen=True)
class Calibration:
    """The server's own counting: tokens for one word, and for everything around the words."""

    tokens_per_word: float = 1.0
    overhead_tokens: float = 0.0

    @classmethod
    def from_counts(cls, few: tuple[int, int], many: tuple[int, int]) -> Calibration:
        """Two prompts as (words, prompt tokens); falls back to one token a word when they make no sense."""
        (few_words, few_tokens), (many_words, many_tokens) = few, many
        if many_words <= few_words or many_tokens <= few_tokens:
            return cls()
        per_word = (many_tokens - few_tokens) / (many_words - few_words)
        return cls(per_word, max(0.0, few_tokens - per_word * few_words))

    def num_words(self, num_tokens: int) -> int:
        return max(1, round((num_tokens - self.overhead_tokens) / self.tokens_per_word))


class PromptMaker:
    """Prompts of one run. `salt` differs from run to run, `seed` does not: the words repeat, the first
    characters never do, so that a second run on the same server does not find the first one's prompts cached.

    The salt and the request's number go to the very start, before anything shared: behind one different token
    nothing can be reused. `has_system_role` False moves the start into the user's message.
    """

    def __init__(
        self,
        seed: int,
        salt: str,
        calibration: Calibration | None = None,
        has_system_role: bool = True,
    ) -> None:
        self._seed = seed
        self._salt = salt
        self._calibration = calibration or Calibration()
        self._has_system_role = has_system_role

    def messages(self, planned: Planned) -> ChatMessages:
        if planned.block_ids:
            return self._from_blocks(planned)
        if planned.shared_prefix_tokens:
            shared = self._calibration.num_words(planned.shared_prefix_tokens)
            own = max(1, self._calibration.num_words(planned.num_prompt_tokens) - shared)
            start = f"{self._salt} shared: {self.words(shared, 'shared')}"
            return self._join(start, f"{planned.index}: {self.words(own, planned.label, planned.index)}")
        words = self.words(
            self._calibration.num_words(planned.num_prompt_tokens), planned.label, planned.index
        )
        return self._join(self.nonce(planned.label, planned.index), words)

    def nonce(self, *key: object) -> str:
        """Eight characters that depend on the run and the request; the first ones differ already."""
        return f"{random.Random(repr((self._salt, key))).getrandbits(32):08x}"

    def words(self, num_words: int, *key: object) -> str:
        """Always the same words for the same seed and key."""
        return " ".join(random.Random(repr((self._seed, key))).choices(WORDS, k=num_words))

    def _from_blocks(self, planned: Planned) -> ChatMessages:
        """Requests with the same leading block ids share that much of their prompt, and no more."""
        num_words = self._calibration.num_words(planned.num_prompt_tokens)
        per_block = max(1, round(TRACE_BLOCK_TOKENS / self._calibration.tokens_per_word))
        blocks = " ".join(self.words(per_block, "block", block) for block in planned.block_ids).split()
        return self._join(self._salt, " ".join(blocks[:num_words]))

    def _join(self, start: str, text: str) -> ChatMessages:
        if not self._has_system_role:
            return ({"role": "user", "content": f"{start} {text}"},)
        return ({"role": "system", "content": start}, {"role": "user", "content": text})


def calibration_messages(maker: PromptMaker, num_words: int) -> ChatMessages:
    """A cold prompt of exactly this many words, to read the server's count of it."""
    planned = Planned(index=num_words, num_prompt_tokens=num_words, max_tokens=1, label="calibration")
    return maker.messages(planned)


def with_answer(messages: Sequence[Mapping[str, str]], answer: str, question: str) -> ChatMessages:
    """The next turn of a chat: what was said, plus a new question."""
    return (*messages, {"role": "assistant", "content": answer}, {"role": "user", "content": question})
