"""Rounds of known cost for the chooser of widths: cost curves, drafts and machines, simulated in pure Python.

`python tests/width_zoo.py [tokens]` prints all of it; the tests take a part. Times are in plain steps. Means count the
tokens that a round emits on average, not those that it happened to emit: luck moves all choosers alike.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

from dflash_mlx.decode.block_size import AutoBlockSize
from dflash_mlx.decode.costs import RoundCosts

Curve = Callable[[int], float]
STEP = 0.02  # seconds


def through(points: dict[int, float], draft: float = 0.0) -> Curve:
    """Lines between measured points; a draft's part on top of blocks."""

    def price(width: int) -> float:
        if width == 1:
            return 1.0
        below = max(w for w in points if w <= width)
        above = min((w for w in points if w >= width), default=below)
        share = (width - below) / (above - below) if above > below else 0.0
        return points[below] + share * (points[above] - points[below]) + draft

    return price


# Measured ones: the block sizes of a 27B on an M2 Max, MLX's 4-bit matmul by rows on an M3 Max, M4 Pro, M5 Max and M3
# Ultra (0.2 steps for a draft), the bundled pair with a heavy target on OpenBLAS.
CURVES: dict[str, Curve] = {
    "memory bound": lambda w: 1.0 if w == 1 else 1.25 + 0.02 * w,
    "middling": lambda w: 1.0 if w == 1 else 1.4 + 0.1 * w,
    "OpenBLAS": through({1: 1, 2: 1.35, 4: 1.6, 8: 1.85, 16: 2.17}),
    "every row costs": lambda w: 1.0 if w == 1 else 0.3 + w,
    "a row costs 0.6": lambda w: 1.0 if w == 1 else 0.6 + 0.6 * w,
    "concave": lambda w: 1.0 if w == 1 else 0.3 + math.sqrt(w),
    "steps of 4 rows": lambda w: 1.0 if w == 1 else 0.2 + 2.2 * ((w + 3) // 4),
    "steps of 8 rows": lambda w: 1.0 if w == 1 else 0.3 + 1.6 * ((w + 7) // 8),
    "M3 Max": through({1: 1, 2: 1.0, 4: 1.28, 6: 2.04, 8: 2.5, 9: 3.14, 10: 3.94, 32: 3.97}, 0.2),
    "M4 Pro": through({1: 1, 2: 0.99, 3: 1.13, 4: 1.43, 5: 1.75, 8: 2.84, 10: 4.5, 32: 4.5}, 0.2),
    "M5 Max": through({1: 1, 3: 1.12, 5: 1.42, 8: 2.2, 12: 3.16, 16: 3.9, 17: 4.2, 32: 4.5}, 0.2),
    "M3 Ultra": through({1: 1, 2: 1.83, 4: 3.26, 7: 5.28, 8: 6.12, 16: 6.32, 32: 6.4}, 0.2),
    "M2 Max, 27B": through({1: 1, 2: 2.0, 3: 3.0, 5: 4.5, 6: 4.0, 8: 4.04, 16: 4.3}),
    "flat from 6 rows": lambda w: 1.0 if w == 1 else (1 + 0.85 * (w - 1) if w < 6 else 4.2),
    "flat to 16 rows": lambda w: 1.0 if w == 1 else 2.2,
    "flat to 32 rows": lambda w: 1.0 if w == 1 else 1.5,
    "a wall at 6 rows": lambda w: 1.0 if w == 1 else 1.2 + 0.05 * w + (2.0 if w > 5 else 0.0),
    "a cliff at 2 rows": lambda w: 1.0 if w == 1 else 2.4,
}
KEEPS = (0.0, 0.3, 0.5, 0.75, 0.85, 0.9, 0.95, 0.97)


@dataclass
class Machine:
    """What a round takes.

    Args:
        noise: standard deviation of the logarithm. pause: share of rounds that wait 2 to 8 times as long.
        drift: of the machine's pace over some 50 rounds. grow: share a token of context. first: factor of the first
            round of a width.
    """

    curve: Curve
    rng: random.Random
    noise: float = 0.0
    pause: float = 0.0
    drift: float = 0.0
    grow: float = 0.0
    first: float = 1.0
    pace: float = 0.0
    seen: set[int] = field(default_factory=set)

    def usual(self, width: int, context: int) -> float:
        return STEP * self.curve(width) * (1 + self.grow * context) * math.exp(self.pace)

    def round(self, width: int, context: int) -> float:
        """Seconds of the next round."""
        took = self.usual(width, context) * math.exp(self.noise * self.rng.gauss(0, 1))
        self.pace = 0.98 * self.pace + 0.2 * self.drift * self.rng.gauss(0, 1)
        if self.rng.random() < self.pause:
            took *= self.rng.choice([2, 4, 8])
        if width not in self.seen:
            took *= self.first
        self.seen.add(width)
        return took


MACHINES: dict[str, dict[str, float]] = {
    "steady": {},
    "noisy": {"noise": 0.05, "pause": 0.01, "first": 1.5},
    "drifting": {"noise": 0.03, "drift": 0.1},
    "growing": {"grow": 1 / 2000},
}


def expected(keep: float, width: int) -> float:
    return (1 - keep**width) / (1 - keep)


def best(curve: Curve, keep: float, widest: int = 16) -> tuple[float, int]:
    """Plain steps a token of the best pinned width, and that width."""
    return min((curve(width) / expected(keep, width), width) for width in range(1, widest + 1))


@dataclass
class Outcome:
    """One request: plain steps it took a token by the tokens that came and by those expected, and its widths."""

    real: float
    mean: float
    widths: list[int]


def request(
    memory: RoundCosts, machine: Machine, keep: float, tokens: int, rng: random.Random, widest: int = 16
) -> Outcome:
    """Decode; rounds are measured as by the loop, which can't tell the first of plain rounds that follow each other."""
    chooser = AutoBlockSize(widest, memory)
    emitted, took, plain, mean, widths = 0, 0.0, 0.0, 0.0, [0]
    while emitted < tokens:
        context = 100 + emitted
        width = chooser.next(context, tokens + 100 - emitted).verify
        accepted = next((i for i in range(width - 1) if rng.random() >= keep), width - 1)
        step, usual = machine.usual(1, context), machine.usual(width, context)
        seconds = machine.round(width, context)
        chooser.observe(context, width, accepted, None if width == 1 != widths[-1] else seconds)
        share = min(1.0, (tokens - emitted) / (accepted + 1))  # of a round that reaches beyond the end
        emitted += accepted + 1
        took += usual * share  # a pause is nobody's fault
        plain += step * (accepted + 1) * share
        mean += step * expected(keep, width) * share
        widths.append(width)
    return Outcome(took / plain, took / mean, widths[1:])


@dataclass
class Cell:
    """Requests of a pair that knew nothing at first, `seeds` times over."""

    best: float  # plain steps a token of the best pinned width
    width: int  # and that width
    requests: list[list[Outcome]]  # by number of the request, by seed

    def mean(self, number: int) -> float:
        """Of the best pinned width's time."""
        return sum(outcome.mean for outcome in self.requests[number]) / len(self.requests[number]) / self.best

    def worst(self, number: int) -> float:
        """Of plain decoding's time, one request's."""
        return max(outcome.real for outcome in self.requests[number])


def cell(curve: Curve, keep: float, tokens: int, seeds: int = 4, machine: str = "steady", count: int = 3) -> Cell:
    requests: list[list[Outcome]] = [[] for _ in range(count)]
    for seed in range(seeds):
        rng = random.Random(f"{keep} {seed}")
        memory, device = RoundCosts(), Machine(curve, rng, **MACHINES[machine])
        for outcomes in requests:
            outcomes.append(request(memory, device, keep, tokens, rng))
    return Cell(*best(curve, keep), requests)


def main() -> None:
    tokens = int(sys.argv[1]) if len(sys.argv) > 1 else 256
    for machine in MACHINES:
        print(f"{machine}, third request of {tokens} tokens, of the best pinned width's time (p: that is plain), ")
        print(f"{'':20}" + "".join(f"{keep:>8}" for keep in KEEPS))
        cells = []
        for name, curve in CURVES.items():
            row = [cell(curve, keep, tokens, machine=machine) for keep in KEEPS]
            print(f"{name:20}" + "".join(f"{c.mean(2):7.2f}{'p' if c.width == 1 else ' '}" for c in row), flush=True)
            cells += row
        means = [c.mean(2) for c in cells]
        first, later = max(c.worst(0) for c in cells), max(c.worst(n) for c in cells for n in (1, 2))
        print(f"mean {sum(means) / len(means):.3f}; worst first request {first:.2f} of plain, later {later:.2f}\n")


if __name__ == "__main__":
    main()
