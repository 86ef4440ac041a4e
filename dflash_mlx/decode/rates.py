"""How likely each slot's draft token is kept: what a pair of models showed so far, and one request beside it.

Knows counts only, no costs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

PRIOR = 0.75  # share of draft tokens kept, before anything was seen, worth `PRIOR_WEIGHT` tokens
PRIOR_WEIGHT = 3.0
SURE = 1 - 1e-6  # no rate is higher: slots that lean on each other would come to 1, which has no log-odds
PAIR_MEMORY = 500.0  # rounds after which a pair's counts weigh 1/e
REQUEST_MEMORY = 33.0  # and a request's: a text's easy and hard passages are about so long
SPREAD = 1.0  # standard deviation of requests' log-odds around their pair's, before any showed it; worth one request


class SlotRates:
    """A pair's rates, slot by slot: that a token is kept, given that those before it were.

    A slot that was seldom reached leans on the one before it, the first on `PRIOR`.

    Attributes:
        shifts: how many requests showed by how much their log-odds differ from these, and the sum of its squares.
    """

    def __init__(self, kept: Sequence[float] = (), offered: Sequence[float] = (), shifts: Sequence[float] = (0.0, 0.0)):
        self.kept, self.offered = list(kept), list(offered)
        self.shifts = (shifts[0], shifts[1])
        self._rates: list[float] = []  # as far as they were asked for since the last round

    def add(self, width: int, accepted: int) -> None:
        self._rates = []
        new = width - 1 - len(self.kept)
        self.kept += [0.0] * new
        self.offered += [0.0] * new
        fade = 1 - 1 / PAIR_MEMORY
        for i in range(min(width - 1, accepted + 1)):  # behind the first miss nothing is known
            self.offered[i] = fade * self.offered[i] + 1
            self.kept[i] = fade * self.kept[i] + (i < accepted)

    def rates(self, slots: int) -> list[float]:
        if len(self._rates) < slots:
            rate, self._rates = PRIOR, []
            for i in range(slots):
                if i < len(self.kept):
                    rate = (self.kept[i] + PRIOR_WEIGHT * rate) / (self.offered[i] + PRIOR_WEIGHT)
                rate = min(rate, SURE)
                self._rates.append(rate)
        return self._rates[:slots]

    def spread(self) -> float:
        """Variance of requests' log-odds around these."""
        count, squares = self.shifts
        return (SPREAD**2 + squares) / (1 + count)

    def add_shift(self, count: float, squares: float) -> None:
        """Of a request, or what a further round of it changed."""
        self.shifts = (self.shifts[0] + count, self.shifts[1] + squares)

    def hint(self) -> SlotRates:
        """The same rates, of little weight: what another temperature may do."""
        offered = [min(n, PRIOR_WEIGHT) for n in self.offered]
        kept = [n * rate for n, rate in zip(offered, self.rates(len(offered)), strict=True)]
        return SlotRates(kept, offered, self.shifts)

    def to_list(self) -> list[list[float]]:
        """As plain JSON values."""
        return [[round(n, 3) for n in counts] for counts in (self.kept, self.offered, self.shifts)]

    @classmethod
    def from_list(cls, stored: Sequence[Sequence[float]]) -> SlotRates:
        """Raises ValueError or TypeError for anything but counts."""
        kept, offered, *shifts = ([float(n) for n in counts] for counts in stored)
        if len(kept) != len(offered) or not all(0 <= k <= n < 1e6 for k, n in zip(kept, offered, strict=True)):
            raise ValueError("no counts of tokens kept and offered")
        count, squares = shifts[0] if shifts else (0.0, 0.0)  # earlier versions kept none
        if not (0 <= count < 1e9 and 0 <= squares <= 100 * count):  # a deviation of 10 is beyond any text
            raise ValueError("no requests and squares of their shifts")
        return cls(kept, offered, (count, squares))

    def variance(self, rates: Sequence[float]) -> float:
        """Of the pair's own log-odds, as far as they are known."""
        known = PRIOR_WEIGHT * PRIOR * (1 - PRIOR)
        known += sum(n * rate * (1 - rate) for n, rate in zip(self.offered, rates, strict=False))
        return 1 / known


class RequestRates:
    """One request's: the pair's, all of their log-odds moved by what this text showed.

    The shift is the likeliest one if requests differ as the pair's do; what was seen fades, and faster than a pair's.
    """

    def __init__(self, pair: SlotRates, slots: int):
        self.pair, self.slots = pair, slots
        self.offered = [0.0] * slots
        self.kept = 0.0
        self.shift = 0.0
        self.prior = 1 / pair.spread()  # inverse variances of the shift
        self.certain = self.prior
        self._told = (0.0, 0.0)  # what of this request stands in the pair's `shifts`

    def add(self, width: int, accepted: int) -> None:
        """A round with a draft."""
        self.forget()
        for i in range(min(width - 1, accepted + 1)):
            self.offered[i] += 1
        self.kept += accepted
        self._fit(3)
        self._tell()

    def forget(self) -> None:
        """A round without one."""
        fade = 1 - 1 / REQUEST_MEMORY
        self.offered = [n * fade for n in self.offered]
        self.kept *= fade
        self._fit(1)

    def _tell(self) -> None:
        """The pair learns how much requests differ, from each as far as it showed its shift."""
        count = 1 - self.prior / self.certain
        squares = count * (self.shift**2 + 1 / self.certain)
        self.pair.add_shift(count - self._told[0], squares - self._told[1])
        self._told = (count, squares)

    def _fit(self, steps: int) -> None:
        """Newton's method from the last shift."""
        slots = [
            (n, rate / (1 - rate))
            for n, rate in zip(self.offered, self.pair.rates(self.slots), strict=True)
            if n > 0.01
        ]
        for _ in range(steps if slots else 0):
            slope, value, factor = self.prior, self.kept - self.shift * self.prior, math.exp(self.shift)
            for n, odds in slots:
                rate = odds * factor / (1 + odds * factor)
                value -= n * rate
                slope += n * rate * (1 - rate)
            self.shift += max(-1.0, min(1.0, value / slope))
            self.certain = slope

    def expected(self, widest: int, surprise: float = 0.0) -> tuple[list[float], list[float]]:
        """Tokens that a round of width 1 to `widest` emits: mean and standard deviation.

        Args:
            surprise: standard deviations by which the request may be better than it looks.
        """
        rates = self.pair.rates(widest - 1)
        shift = self.shift
        if surprise:
            shift += surprise * math.sqrt(1 / self.certain + self.pair.variance(rates))
        factor = math.exp(shift)
        means, deviations = [1.0], [0.0]
        reach, square = 1.0, 0.0  # of the draft's tokens
        for i, rate in enumerate(rates):
            reach *= rate * factor / (1 - rate + rate * factor)
            square += (2 * i + 1) * reach
            means.append(means[-1] + reach)
            deviations.append(math.sqrt(max(0.0, square - (means[-1] - 1) ** 2)))
        return means, deviations
