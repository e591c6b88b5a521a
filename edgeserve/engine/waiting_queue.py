"""Who waits, and who is next: interactive requests, short prompts first, then batch requests; both age.

Owns the order. Knows nothing of cells, slots or clocks: a request ages by how many later ones were let past
it, so that its wait is bounded on a fast machine as on a slow one.

Short prompts first because a slot is taken for as long as its prompt is computed: behind a few long ones,
everybody else's first token would come late (the shortest job first has the least mean wait). Prompts of
about the same length keep their order.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

from edgeserve.engine.request import Priority, Sequence

MAX_OVERTAKES = 8
"""So many later requests at most go before the one of its priority that has waited longest."""


_SHORT_TOKENS = 127
"""Prompts up to this are all short: a second's work at most on the slowest machine that is any use."""


@dataclass(slots=True)
class _Line:
    """The requests of one priority."""

    sequences: dict[int, Sequence] = field(default_factory=dict)
    """By arrival, the first one first."""
    by_length: list[tuple[int, int]] = field(default_factory=list)
    """A heap of (length, arrival); of those that have left, too, until they come up."""
    num_overtakes: int = 0
    """Of the first one, so far."""

    def copy(self) -> _Line:
        return _Line(self.sequences.copy(), self.by_length.copy(), self.num_overtakes)

    @property
    def first(self) -> int:
        return next(iter(self.sequences))

    @property
    def is_first_due(self) -> bool:
        return bool(self.sequences) and self.num_overtakes >= MAX_OVERTAKES

    @property
    def shortest(self) -> int:
        while self.by_length[0][1] not in self.sequences:
            heapq.heappop(self.by_length)
        return self.by_length[0][1]

    def left(self, arrival: int) -> None:
        """Take out who arrived then, admitted or not."""
        self.num_overtakes = 0 if arrival == self.first else self.num_overtakes
        del self.sequences[arrival]
        if len(self.by_length) > 2 * len(self.sequences) + 16:
            self.by_length = [entry for entry in self.by_length if entry[1] in self.sequences]
            heapq.heapify(self.by_length)

    def overtaken_by(self, arrival: int) -> None:
        self.num_overtakes += bool(self.sequences) and arrival > self.first


@dataclass(slots=True)
class WaitingQueue:
    """Sequences in the order in which they will be admitted."""

    _interactive: _Line = field(default_factory=_Line)
    _batch: _Line = field(default_factory=_Line)
    _num_arrived: int = 0

    def __len__(self) -> int:
        return len(self._interactive.sequences) + len(self._batch.sequences)

    def __iter__(self) -> Iterator[Sequence]:
        """In order of admission, if nobody else comes."""
        rest = WaitingQueue(self._interactive.copy(), self._batch.copy(), self._num_arrived)
        while rest:
            yield rest.pop()

    def by_arrival(self) -> list[Sequence]:
        """All that wait, interactive ones first: for who only counts them, since the order of admission takes
        longer to find."""
        return [*self._interactive.sequences.values(), *self._batch.sequences.values()]

    @property
    def head(self) -> Sequence:
        """The next to be admitted. There must be one."""
        line, arrival = self._next()
        return line.sequences[arrival]

    def append(self, sequence: Sequence, num_cached_tokens: int = 0) -> None:
        """`num_cached_tokens`: how many of the prompt's tokens are expected to need no computing."""
        line = self._batch if sequence.request.urgency.priority is Priority.BATCH else self._interactive
        # To a power of two: prompts of about the same length stay in the order of their arrival. Batch
        # requests always do, since nobody looks at their first token.
        length = max(_SHORT_TOKENS, sequence.num_uncomputed_tokens - num_cached_tokens).bit_length()
        line.sequences[self._num_arrived] = sequence
        heapq.heappush(line.by_length, (0 if line is self._batch else length, self._num_arrived))
        self._num_arrived += 1

    def pop(self) -> Sequence:
        line, arrival = self._next()
        sequence = line.sequences[arrival]
        line.left(arrival)
        self._interactive.overtaken_by(arrival)
        self._batch.overtaken_by(arrival)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Take out one that gave up. Raises ValueError when it does not wait."""
        for line in (self._interactive, self._batch):
            for arrival, waiting in line.sequences.items():
                if waiting is sequence:
                    return line.left(arrival)
        raise ValueError("not waiting")

    def _next(self) -> tuple[_Line, int]:
        line = self._interactive
        if self._batch.is_first_due or not line.sequences:
            line = self._batch
        return line, line.first if line.is_first_due else line.shortest
