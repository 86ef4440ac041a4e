"""How wide the next block is: pinned, or chosen from what rounds cost and what of them is accepted.

Knows the limits of a request, costs and acceptance; knows no model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from .costs import BUCKET, Bounds, RoundCosts
from .rates import RequestRates

# What blocks may lose, in plain steps and as a share of the time on top (docs/experiments.md): in a request, half of
# whose steps are for rounds that only try something; and what such rounds may over all of a pair's requests since they
# last were in credit, so that a draft that never pays is looked at ever more seldom.
ALLOWANCE, SHARE = 4.0, 0.04
PAIR_ALLOWANCE, PAIR_SHARE = 3 * ALLOWANCE, 0.015
WORTH = 0.02  # share by which a width must be expected to win to be tried: measuring is no finer
REST = 2  # plain rounds from one look at the choice to the next: each changes little, and looking takes time
LUCK = 0.16  # how often something is better than it looks by a standard deviation or more


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


class Proposer:
    """What one request knows of one source of proposals.

    Args:
        costs: what the pair showed in earlier requests; learned from each.
    """

    def __init__(self, slots: int, costs: RoundCosts, temp: float):
        self.costs, self.pair_rates = costs, costs.rates_at(temp)
        self.rates = RequestRates(self.pair_rates, slots)
        self.lost = 0.0  # seconds, below 0 a credit

    def observe(self, width: int, accepted: int, seconds: float, step: float) -> None:
        """A round of usually so many seconds. Gains count up to what a pair may lose, so that they are not all lost."""
        for account in (self, self.costs):
            account.lost = max(-PAIR_ALLOWANCE * step, account.lost + seconds - (accepted + 1) * step)


class _Choice(NamedTuple):
    width: int
    reason: str = ""  # why plain


class AutoBlockSize:
    """The width with the most tokens for its time, plain decoding among them.

    A width whose cost is not known is tried where the tokens that it may win are worth it and those that it may lose
    are within what is allowed; likewise one that was measured seldom or long ago, and a draft that may do better in
    this text than it looks. A round that emits less than plain steps would have in its time is a loss.

    Args:
        widest: the draft's own block.
        costs: of this pair on this machine.
        lookup: the same of rounds whose proposals a lookup copies, where there is one.
        temp: temperature, which acceptance depends on.
    """

    def __init__(self, widest: int, costs: RoundCosts, lookup: RoundCosts | None = None, temp: float = 0.0):
        self.widest = widest
        self.costs = costs
        with costs.lock:
            self.draft = Proposer(widest - 1, costs, temp)
            self.lookup = Proposer(widest - 1, lookup or RoundCosts(dearer=costs), temp)
        self.elapsed = 0.0  # seconds
        self.reason = ""  # why the last choice was plain
        self._chosen: dict[tuple[bool, int, int, bool], _Choice] = {}  # since the last round; asking again is free

    def next(self, context: int, remaining: int, room: int | None = None, offered: int | None = None) -> Widths:
        limit = _limited(self.widest, remaining, room, offered).verify
        if limit == 1 or offered == 0:
            return Widths(draft=1, verify=1)
        # Near the end of a text nothing is tried: it would be cut to odd widths that nobody wants to know.
        key = (offered is None, (context // BUCKET).bit_length(), limit, remaining > self.widest)
        if key not in self._chosen:
            with self.costs.lock:
                self._chosen[key] = self._choose(self.draft if offered is None else self.lookup, context, *key[2:])
            self.reason = self._chosen[key].reason
        return _limited(self._chosen[key].width, remaining, room, offered)

    def _choose(self, proposer: Proposer, context: int, limit: int, curious: bool) -> _Choice:
        known = proposer.costs.at(context)
        if known.count(1) < 2:
            return _Choice(1, "plain steps are measured first")
        bounds = known.bounds(limit)
        tokens, spread = proposer.rates.expected(limit)
        step = bounds[0].high
        rates = [expected / bound.high for expected, bound in zip(tokens, bounds, strict=True)]
        best = max(range(limit), key=rates.__getitem__)
        if curious:
            worth = _worth_trying(bounds, tokens, proposer.rates.expected(limit, surprise=1.0)[0], best)
            # Half a standard deviation less than expected: two of three rounds do no worse.
            spare = min(self._left(proposer, step, ALLOWANCE / 2), self._left_of_pair(proposer, step))
            for gain, i in sorted(worth, reverse=True):
                if gain > WORTH * rates[best] and bounds[i].high - max(1, tokens[i] - spread[i] / 2) * step <= spare:
                    return _Choice(i + 1)
        price = bounds[best].high / step
        owing = proposer.lost > 0 and self._left_of_pair(proposer, step) < 0
        if best and (owing or self._left(proposer, step, ALLOWANCE) < 0):
            return _Choice(1, f"blocks gave fewer tokens than plain steps in the same time ({price:.2f} steps a block)")
        if best == 0 and limit > 1:
            block = max(range(1, limit), key=rates.__getitem__)
            price = bounds[block].high / step
            what = f"a block of {block + 1} costs {price:.2f} plain steps and gives {tokens[block]:.2f} tokens here"
            return _Choice(1, what)
        return _Choice(best + 1)

    def _left(self, proposer: Proposer, step: float, steps: float) -> float:
        """Seconds that blocks may still lose in this request."""
        return steps * step + SHARE * self.elapsed - proposer.lost

    def _left_of_pair(self, proposer: Proposer, step: float) -> float:
        """And those that only try something in all of a pair's."""
        return PAIR_ALLOWANCE * step + PAIR_SHARE * proposer.costs.elapsed - proposer.costs.lost

    def observe(self, context: int, width: int, accepted: int, seconds: float | None, lookup: bool = False) -> None:
        told = [self.draft, self.lookup] if width == 1 else [self.lookup if lookup else self.draft]
        with self.costs.lock:
            if width > 1 or told[0].costs.at(context).rounds % REST == 0:
                self._chosen = {}
            for proposer in told:
                if width == 1:
                    proposer.rates.forget()
                else:
                    proposer.pair_rates.add(width, accepted)
                    proposer.rates.add(width, accepted)
                proposer.costs.add(context, width, seconds)
            # What such a round usually takes, not what this one did: it may have waited for somebody else.
            known = told[0].costs.at(context).known()
            usual = known.get(width)
            if usual is None or 1 not in known:
                return
            self.elapsed += usual
            for proposer in told:
                proposer.costs.elapsed = proposer.costs.elapsed + usual if proposer.costs.lost > 0 else 0.0
            if width > 1:
                told[0].observe(width, accepted, usual, known[1])


def _worth_trying(bounds: list[Bounds], tokens: list[float], lucky: list[float], best: int) -> list[tuple[float, int]]:
    """By how many tokens a second each width but the best may beat it, times how likely that is."""
    rate = tokens[best] / bounds[best].high
    found = []
    for i, (low, high, chance) in enumerate(bounds):
        if i != best:
            gain = chance * (tokens[i] / low - rate)
            if best == 0:  # of a draft that does well enough its rounds tell
                gain = max(gain, LUCK * chance * (lucky[i] / low - rate), LUCK * (lucky[i] / high - rate))
            found.append((gain, i))
    return found
