"""How wide the next block is: pinned, or chosen from what rounds cost and what of them is accepted.

Knows the limits of a request, costs and acceptance; knows no model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from .costs import STALE_BLOCK, STALE_PLAIN, RoundCosts

# What a request expects before its first round, and how fast it forgets (docs/experiments.md).
PRIOR = 0.75  # share of draft tokens kept
PRIOR_WEIGHT = 3.0  # in draft tokens
FORGET_ROUND = 0.97  # weight of the past after a round with a draft
FORGET_PLAIN = 0.97  # and after a plain one: a draft that failed gets another chance
ALLOWANCE = 2.5  # plain steps that a request may lose to rounds which did not pay
ALLOWANCE_SHARE = 0.015  # and the share of its time on top
CREDIT = 8.0  # plain steps of earlier gains that it may lose on top
REST = 2  # plain rounds from one look at a draft that rests to the next
PAUSE = 3.0  # a round that took so many times its usual time was waiting for somebody else
FIRST_WIDTHS = (1, 2, 4)  # measured before anything is known, each so often as `TRIALS`
TRIALS = 3


@dataclass(frozen=True)
class Widths:
    """Slots that the draft fills and rows that the target verifies, anchor included; verify 1 means no draft."""

    draft: int
    verify: int


class BlockSize(Protocol):
    """Chooses the width of each round and is told how it went."""

    def next(self, context: int, remaining: int, room: int | None = None, offered: int | None = None) -> Widths:
        """Widths of the next round.

        Args:
            context: tokens in the target's cache.
            remaining: tokens still wanted, at least 1. No more rows are verified, so a round emits no more.
            room: rows that the target's cache can take back, None where that has no limit.
            offered: tokens that a lookup will propose, None where the draft is asked.
        """

    def observe(self, context: int, width: int, accepted: int, seconds: float | None, lookup: bool = False) -> None:
        """A finished round: its width, the draft tokens kept, its time where that could be measured, and by whom."""


def _limited(size: int, remaining: int, room: int | None, offered: int | None) -> Widths:
    verify = min(size, remaining if room is None else min(remaining, max(room, 1)))
    if offered is not None:
        verify = min(verify, offered + 1)
        return Widths(draft=verify, verify=verify)
    # One slot more than is verified near the end: the draft then sees the block it would have seen if the
    # text went on, as in the reference.
    return Widths(draft=min(size, remaining + 1), verify=verify)


@dataclass
class FixedBlockSize:
    """The same block every round, cut to what is still wanted."""

    size: int

    def next(self, context: int, remaining: int, room: int | None = None, offered: int | None = None) -> Widths:
        return _limited(self.size, remaining, room, offered)

    def observe(self, context: int, width: int, accepted: int, seconds: float | None, lookup: bool = False) -> None:
        pass


class Acceptance:
    """How likely each slot's draft token is kept, given that those before it were; one request's own.

    A slot's rate leans on the rate over all slots, and that on `PRIOR`, by `PRIOR_WEIGHT` tokens each.
    """

    def __init__(self, slots: int):
        self.kept = [0.0] * slots  # of slot i + 1
        self.offered = [0.0] * slots
        self._fade = 1.0  # what all of them are still to be multiplied with

    def add(self, width: int, accepted: int) -> None:
        self.forget(FORGET_ROUND)
        self._settle()
        for i in range(min(width - 1, accepted + 1)):  # behind the first miss nothing is known
            self.offered[i] += 1
            self.kept[i] += i < accepted

    def forget(self, share: float) -> None:
        """Give what is known the weight `share`."""
        self._fade *= share

    def _settle(self) -> None:
        if self._fade != 1.0:
            self.kept = [n * self._fade for n in self.kept]
            self.offered = [n * self._fade for n in self.offered]
            self._fade = 1.0

    def expected(self) -> list[float]:
        """Tokens that a round of width 1, 2, ... emits on average."""
        self._settle()
        rate = (sum(self.kept) + PRIOR_WEIGHT * PRIOR) / (sum(self.offered) + PRIOR_WEIGHT)
        tokens, reach = [1.0], 1.0
        for kept, offered in zip(self.kept, self.offered, strict=True):
            reach *= (kept + PRIOR_WEIGHT * rate) / (offered + PRIOR_WEIGHT)
            tokens.append(tokens[-1] + reach)
        return tokens


class Proposer:
    """What one request knows of one source of proposals: what its rounds cost, and how they went so far."""

    def __init__(self, slots: int, costs: RoundCosts):
        self.costs, self.acceptance = costs, Acceptance(slots)
        self.lost = 0.0  # seconds, below 0 a credit
        self.rests = 0  # plain rounds until it is looked at again


class AutoBlockSize:
    """The width with the most tokens for its time, plain decoding among them; nothing is carried to a next request.

    Widths whose cost is unknown are taken at the line through their neighbours and measured when they win; what has
    not been chosen for long is measured again, since a machine that was busy then may be idle now. A
    round that emits less than plain steps would have in its time is a loss; losses stay within `ALLOWANCE`.

    Args:
        widest: the draft's own block.
        costs: of this pair on this machine; shared by all requests and learned from each.
        lookup_costs: of rounds whose proposals a lookup copies, where there is one; without a draft's part in them.
    """

    def __init__(self, widest: int, costs: RoundCosts, lookup_costs: RoundCosts | None = None):
        self.widest = widest
        self.draft = Proposer(widest - 1, costs)
        self.lookup = Proposer(widest - 1, lookup_costs or RoundCosts())
        self.elapsed = 0.0  # seconds
        self.reason = ""  # why the last choice was plain

    def next(self, context: int, remaining: int, room: int | None = None, offered: int | None = None) -> Widths:
        limit = _limited(self.widest, remaining, room, offered).verify
        proposer = self.draft if offered is None else self.lookup
        if offered == 0:
            width = 1
        elif proposer.rests:
            width = 1
            proposer.rests -= 1
        else:
            width = self._choose(proposer, context, limit)
        return _limited(width, remaining, room, offered)

    def _choose(self, proposer: Proposer, context: int, limit: int) -> int:
        costs = proposer.costs.at(context)
        for width in FIRST_WIDTHS:
            if width <= limit and costs.count(width) < TRIALS:
                return width
        if limit == 1:
            return 1
        expected, curve = proposer.acceptance.expected(), costs.curve(limit)
        step = curve[0]
        best = max(range(2, limit + 1), key=lambda width: expected[width - 1] / curve[width - 1])
        tokens, price = expected[best - 1], curve[best - 1] / step
        if proposer.costs.since_plain >= STALE_PLAIN:
            return 1
        if proposer.costs.since_block >= STALE_BLOCK:
            return best
        if tokens <= price:
            self.reason = f"a block of {best} costs {price:.2f} plain steps and gives {tokens:.2f} tokens here"
            proposer.rests = REST - 1
            return 1
        if proposer.lost + curve[best - 1] - step > ALLOWANCE * step + ALLOWANCE_SHARE * self.elapsed:
            self.reason = f"blocks gave fewer tokens than plain steps in the same time ({price:.2f} steps a block)"
            proposer.rests = REST - 1
            return 1
        self.reason = ""
        # A neighbour that was never measured may hide behind a line drawn over a step of the kernels.
        return next((w for w in (best + 1, best - 1) if 2 <= w <= limit and costs.count(w) < 2), best)

    def observe(self, context: int, width: int, accepted: int, seconds: float | None, lookup: bool = False) -> None:
        if width == 1:
            told = [self.draft, self.lookup]
            for proposer in told:
                proposer.acceptance.forget(FORGET_PLAIN)
        else:
            told = [self.lookup if lookup else self.draft]
            told[0].acceptance.add(width, accepted)
        if seconds is None:
            return
        for proposer in told:
            proposer.costs.add(context, width, seconds)
        costs = told[0].costs.at(context).known()
        usual = min(seconds, PAUSE * costs.get(width, seconds))
        self.elapsed += usual
        if width > 1 and 1 in costs:
            told[0].lost = max(-CREDIT * costs[1], told[0].lost + usual - (accepted + 1) * costs[1])
