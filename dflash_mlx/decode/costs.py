"""What a round costs on this machine, by width: learned from the rounds themselves.

The figures belong to a range of context lengths. Kernels make costs a staircase whose steps nobody knows ahead, so a
width that was not measured has bounds, not a figure. What the rounds gave stands beside it. Knows no models.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import AbstractContextManager
from typing import NamedTuple

from .rates import SlotRates

STANDS_FOR = 3  # rounds that a figure stands for which was measured elsewhere
SAMPLES = 4 * STANDS_FOR  # latest rounds of a width that its cost is taken from: as many in its lower quartile
BUCKET = 2048  # tokens of the first range of context lengths; each further one is twice as long
RANGES = 32  # of them, more than any context needs
DOUBT = 0.3  # share by which a width measured once may be cheaper than it looked: its first round compiles kernels
AGE = 1000.0  # rounds without one of its width after which a figure means nothing: a machine's load changes


class Bounds(NamedTuple):
    """Seconds of a round of some width: at least `low`, with `chance` hardly more than that, and `high` at most."""

    low: float
    high: float
    chance: float


class WidthCosts:
    """Seconds of a round by width for one range of context lengths.

    A figure is the lower quartile of the latest rounds, since whatever else runs on a machine only adds to it.

    Args:
        known: what to start from, and for how many rounds it was not measured. dearer: costs of rounds with more work
            in them, which stand in for widths that were measured less than `STANDS_FOR` times.
    """

    def __init__(self, known: dict[int, tuple[float, float]] | None = None, dearer: WidthCosts | None = None):
        self.dearer = dearer
        start = sorted((known or {}).items())
        self.samples = {width: deque([seconds] * STANDS_FOR, SAMPLES) for width, (seconds, _) in start}
        self.rounds = 0  # of any width
        self._seen: dict[int, float] = {width: -age for width, (_, age) in start}  # value of `rounds` back then
        self._figures: dict[int, float] | None = None

    def add(self, width: int, seconds: float | None) -> None:
        """A round, and what it took where that could be measured."""
        self.rounds += 1
        if seconds is None:
            return
        self.samples.setdefault(width, deque(maxlen=SAMPLES)).append(seconds)
        self._seen[width] = self.rounds
        self._figures = None

    def count(self, width: int) -> int:
        """Rounds of this width that a figure rests on."""
        own = len(self.samples.get(width, ()))
        return own if self.dearer is None else max(own, self.dearer.count(width))

    def age(self, width: int) -> float:
        """Rounds since this width was measured."""
        return self.rounds - self._seen[width] if width in self._seen else 0.0

    def known(self) -> dict[int, float]:
        """Widths that were measured, ascending, with their seconds.

        Fewer rows cost no more than what was measured of more, and a row no more than a plain step: a figure above
        that was taken while the machine was busy, unless it was seen often.
        """
        if self.dearer is not None:
            return self._beside(self.dearer.known())
        if self._figures is None:
            self._figures = _falling({width: _quartile(samples) for width, samples in sorted(self.samples.items())})
            narrower = 1
            for width, seconds in self._figures.items():
                if self.count(width) < STANDS_FOR and narrower in self._figures and 1 in self._figures:
                    most = self._figures[narrower] + (width - narrower + 1) * self._figures[1]
                    self._figures[width] = min(seconds, most)  # and one step for the draft
                narrower = width
        return self._figures

    def _beside(self, dearer: dict[int, float]) -> dict[int, float]:
        own = {width: _quartile(samples) for width, samples in self.samples.items()}
        trusted = {width: seconds for width, seconds in own.items() if len(self.samples[width]) >= STANDS_FOR}
        return _falling(dict(sorted({**own, **dearer, **trusted}.items())))

    def bounds(self, widest: int) -> list[Bounds]:
        """Of rounds of width 1 to `widest`; a plain step must have been measured.

        Between two measured widths there is a step of the kernels, anywhere; how far the last measured width's cost
        reaches is anybody's guess (as far again with even chances), and a further row costs a plain step at most.
        """
        figures = self.known()
        step = figures[1]
        found = [Bounds(step * (1 - self._doubt(1)), step, 0.5)]
        last, below = 1, step
        for width, seconds in figures.items():
            if width > 1:
                gap = width - last
                for row in range(1, gap):
                    found.append(Bounds(below, min(seconds, below + row * step), 1 - row / gap))
                found.append(Bounds(max(below, seconds * (1 - self._doubt(width))), seconds, 0.5))
                last, below = width, seconds
            if width >= widest:
                return found[:widest]
        found += [Bounds(below, below + (width - last) * step, last / width) for width in range(last + 1, widest + 1)]
        return found

    def _doubt(self, width: int) -> float:
        if width not in self.samples and self.dearer is not None:
            return self.dearer._doubt(width)
        return min(1.0, DOUBT / self.count(width) ** 2 + max(0.0, self.age(width)) / AGE)


def _quartile(samples: deque[float]) -> float:
    return sorted(samples)[len(samples) // 4]


def _falling(figures: dict[int, float]) -> dict[int, float]:
    """Each at most what a wider round costs."""
    least = float("inf")
    for width in reversed(figures):
        least = figures[width] = min(least, figures[width])
    return figures


class RoundCosts:
    """What is known of one pair, machine and way of decoding; see `WidthCosts` for the arguments.

    Whoever reads or changes it holds `lock`: requests of several threads share it.

    Attributes:
        ranges: costs of rounds by range of context lengths.
        rates: acceptance by slot, by temperature (one decimal).
        lost: seconds that blocks cost beyond plain steps, below 0 a credit. elapsed: seconds of rounds since there was
            one.
    """

    def __init__(
        self, ranges: dict[int, dict[int, tuple[float, float]]] | None = None, dearer: RoundCosts | None = None
    ):
        self.dearer = dearer
        self.lock: AbstractContextManager[bool | None] = threading.RLock() if dearer is None else dearer.lock
        self.rates: dict[str, SlotRates] = {}
        self.lost = self.elapsed = 0.0
        self.ranges: dict[int, WidthCosts] = {}
        for i, known in (ranges or {}).items():
            self.ranges[i] = self._range(i, known)

    def at(self, context: int) -> WidthCosts:
        """The costs at a context of so many tokens; a new range starts from the nearest, by preference shorter.

        Costs of a shorter context are too low, and a width that looks too cheap is tried and found out.
        """
        i = (context // BUCKET).bit_length()
        if i not in self.ranges:
            others = sorted(self.ranges, key=lambda j: (j > i, abs(j - i)))
            nearest = self.ranges[others[0]].known() if others else {}
            self.ranges[i] = self._range(i, {width: (seconds, 0.0) for width, seconds in nearest.items()})
        return self.ranges[i]

    def _range(self, i: int, known: dict[int, tuple[float, float]]) -> WidthCosts:
        return WidthCosts(known, self.dearer.at((BUCKET << i) // 2) if self.dearer else None)

    def add(self, context: int, width: int, seconds: float | None) -> None:
        """Take one round into account."""
        self.at(context).add(width, seconds)

    def rates_at(self, temp: float) -> SlotRates:
        """Acceptance at a temperature; a new one starts from what the nearest showed."""
        key = f"{temp:.1f}"
        if key not in self.rates:
            nearest = min(self.rates, key=lambda other: abs(float(other) - temp), default=None)
            self.rates[key] = SlotRates() if nearest is None else self.rates[nearest].hint()
        return self.rates[key]
