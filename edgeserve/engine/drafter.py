"""How many tokens each sequence should have verified in a step, beyond the one that it computes anyway.

Owns the choice, what extra rows cost (learned as it runs) and the account that keeps the promise: a sequence
whose drafts do not pay loses at most a few percent of its time on them. Pure arithmetic: durations are handed
in, in seconds.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from edgeserve.engine.prompt_lookup import PromptLookup
from edgeserve.engine.request import Sequence

DRAFT_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
"""Tokens that a draft may have. Costs are learned for sums of these, so there are few."""

FIRST_ROW_COST = 0.25
"""What an extra row is taken to cost, in steps, before one was measured: little, so that it is tried."""

_SPENDING = 0.015
"""The part of its time that a sequence may lose on drafts that fail."""
_START_CREDIT, _MOST_CREDIT = 1.5, 12.0
"""What it may lose before it has earned anything, and keep of what it earned, in steps."""

_WORTH_IT = 1.05
_OTHERS_LOSE = 1.03
"""The most that a step may take longer for those in it that get nothing from it."""

_PLAIN_EVERY = 24
"""One step in so many has no drafts, so that what it saves stays known as contexts grow."""
_FORGET_AFTER = 400
_STEP = 0.25
_OUTLIER = 1.6


@dataclass(slots=True)
class _Cost:
    """A running average of one kind of step. A hiccup counts as little more than the usual."""

    value_s: float
    seen_at: int

    def add(self, sample_s: float, now: int) -> None:
        self.value_s += _STEP * (min(sample_s, _OUTLIER * self.value_s) - self.value_s)
        self.seen_at = now


@dataclass(slots=True)
class _Account:
    """One sequence's lookup and what it may still lose, in plain steps."""

    lookup: PromptLookup = field(default_factory=PromptLookup)
    credit: float = _START_CREDIT

    def book(self, gain: float) -> None:
        self.credit = min(_MOST_CREDIT, self.credit + gain)


class Drafter:
    """Chooses drafts for the sequences of a step and learns from what they cost and brought."""

    def __init__(self, n_draft_max: int) -> None:
        """`n_draft_max` bounds the drafted tokens of a step, all sequences together."""
        self._n_draft_max = n_draft_max
        self._accounts: dict[str, _Account] = {}
        self._costs: dict[tuple[int, int], _Cost] = {}
        self._num_steps = self._plain_at = 0

    def propose(self, sequences: Seq[Sequence], room: int) -> dict[str, tuple[int, ...]]:
        """Drafts by request for sequences about to decode together, `room` tokens at most; often none."""
        accounts = [self._follow(sequence) for sequence in sequences]
        if not any(account.lookup.is_matched for account in accounts) or self._is_plain_due(len(sequences)):
            return {}
        limits = [_limit(sequence, account) for sequence, account in zip(sequences, accounts, strict=True)]
        size = self._best_size(accounts, limits, min(room, self._n_draft_max))
        return {
            sequence.request_id: account.lookup.draft(min(size, limit))
            for sequence, account, limit in zip(sequences, accounts, limits, strict=True)
            if size and limit
        }

    def observe(self, accepted: dict[str, int], num_drafted: int, duration_s: float) -> None:
        """Learn from a step that only decoded: the accepted draft tokens of each sequence in it, the drafted
        ones of all, and how long it took."""
        self._num_steps += 1
        num_decodes = len(accepted)
        cost = self._costs.get((num_decodes, num_drafted))
        if cost is None:
            self._costs[num_decodes, num_drafted] = _Cost(duration_s, self._num_steps)
        else:
            cost.add(duration_s, self._num_steps)
        plain_s = self._plain_s(num_decodes)
        if not num_drafted:
            self._plain_at = self._num_steps
        for request_id, num_accepted in accepted.items():
            if plain_s is not None and (account := self._accounts.get(request_id)):
                lost = duration_s / plain_s - 1 if num_drafted else 0.0
                account.book(_SPENDING + num_accepted - lost)

    def forget(self, sequence: Sequence) -> None:
        self._accounts.pop(sequence.request_id, None)

    def _follow(self, sequence: Sequence) -> _Account:
        account = self._accounts.setdefault(sequence.request_id, _Account())
        account.lookup.follow(sequence.token_ids)
        return account

    def _is_plain_due(self, num_decodes: int) -> bool:
        return self._plain_s(num_decodes) is None or self._num_steps - self._plain_at >= _PLAIN_EVERY

    def _plain_s(self, num_decodes: int) -> float | None:
        cost = self._costs.get((num_decodes, 0))
        return cost.value_s if cost else None

    def _best_size(self, accounts: Seq[_Account], limits: Seq[int], room: int) -> int:
        """The draft length at which the sequences together get most tokens a second, without any of them
        getting clearly less and within what each may lose; 0 when none is worth it."""
        best, best_rate = 0, _WORTH_IT
        expected = [
            account.lookup.expected(min(limit, room)) for account, limit in zip(accounts, limits, strict=True)
        ]
        for size in DRAFT_SIZES:
            sizes = [min(size, limit) for limit in limits]
            if sum(sizes) > room or size > max(limits):
                break
            cost = self._cost(len(accounts), sum(sizes))
            tokens = [1 + sums[n] for sums, n in zip(expected, sizes, strict=True)]
            rate = sum(tokens) / len(tokens) / cost
            pays = all(cost <= _OTHERS_LOSE * got for got in tokens)
            dares = all(cost - 1 <= account.credit for account, n in zip(accounts, sizes, strict=True) if n)
            if rate > best_rate and pays and dares:
                best, best_rate = size, rate
        return best

    def _cost(self, num_decodes: int, num_drafted: int) -> float:
        """Such a step's duration in plain steps: as measured, or on a line between what was."""
        plain_s = self._plain_s(num_decodes)
        assert plain_s is not None, "drafts are chosen once a plain step is known"
        known = {0: 1.0}
        for (decodes, drafted), cost in self._costs.items():
            if decodes == num_decodes and drafted and self._num_steps - cost.seen_at < _FORGET_AFTER:
                known[drafted] = cost.value_s / plain_s
        if num_drafted in known:
            return known[num_drafted]
        below = max(size for size in known if size < num_drafted)
        above = min((size for size in known if size > num_drafted), default=0)
        if above:
            part = (num_drafted - below) / (above - below)
            return known[below] + part * (known[above] - known[below])
        per_row = (known[below] - 1) / below if below else FIRST_ROW_COST
        return known[below] + max(0.0, per_row) * (num_drafted - below)


def _limit(sequence: Sequence, account: _Account) -> int:
    """The longest draft of use: with the token that a step brings anyway it stays within the cap."""
    if not account.lookup.is_matched:
        return 0
    return max(0, sequence.max_tokens - sequence.num_output_tokens - 1)
