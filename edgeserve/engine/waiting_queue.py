"""Who waits, and who is next: interactive requests by arrival, then batch requests, which age.

Owns the order. Knows nothing of cells, slots or clocks: a batch request ages by how many interactive ones
were let past it, so that its wait is bounded on a fast machine as on a slow one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from edgeserve.engine.request import Priority, Sequence

MAX_OVERTAKES = 8
"""So many later interactive requests at most go before the batch request that has waited longest."""


@dataclass(slots=True)
class WaitingQueue:
    """Sequences in the order in which they will be admitted."""

    _interactive: deque[tuple[int, Sequence]] = field(default_factory=deque)
    _batch: deque[tuple[int, Sequence]] = field(default_factory=deque)
    _num_arrived: int = 0
    _num_overtakes: int = 0
    """Of the first batch request, so far."""

    def __len__(self) -> int:
        return len(self._interactive) + len(self._batch)

    def __iter__(self) -> Iterator[Sequence]:
        """In order of admission, if nobody else comes."""
        rest = WaitingQueue(
            self._interactive.copy(), self._batch.copy(), self._num_arrived, self._num_overtakes
        )
        while rest:
            yield rest.pop()

    @property
    def head(self) -> Sequence:
        """The next to be admitted. There must be one."""
        return self._first()[0][1]

    def append(self, sequence: Sequence) -> None:
        line = self._batch if sequence.request.urgency.priority is Priority.BATCH else self._interactive
        line.append((self._num_arrived, sequence))
        self._num_arrived += 1

    def pop(self) -> Sequence:
        line = self._first()
        arrived, sequence = line.popleft()
        if line is self._batch:
            self._num_overtakes = 0
        elif self._batch and arrived > self._batch[0][0]:
            self._num_overtakes += 1
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Take out one that gave up. Raises ValueError when it does not wait."""
        for line in (self._interactive, self._batch):
            for entry in line:
                if entry[1] is sequence:
                    is_first_batch = line is self._batch and entry is line[0]
                    line.remove(entry)
                    self._num_overtakes = 0 if is_first_batch else self._num_overtakes
                    return
        raise ValueError("not waiting")

    def _first(self) -> deque[tuple[int, Sequence]]:
        if not self._interactive or (self._batch and self._num_overtakes >= MAX_OVERTAKES):
            return self._batch
        return self._interactive
