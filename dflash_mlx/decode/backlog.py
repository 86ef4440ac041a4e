"""What a draft has not seen yet: the taps of emitted tokens, kept until it is asked again. Knows no model."""

from __future__ import annotations

import mlx.core as mx

from .drafter import Drafter


class Backlog:
    """Taps of the tokens behind the rows in a draft's cache, by absolute position; its length is how many tokens wait.

    They are cut and projected where they are used: a plain round costs no projection, and a lazy slice belongs to the
    thread that made it, while a generator may be finished in another. What was taken is kept for two rounds, which an
    exception may undo.

    Args:
        start: position of the first token whose taps will come.
    """

    def __init__(self, start: int = 0) -> None:
        self.taps: list[tuple[int, mx.array, int]] = []  # position, [1, L, taps * Ht], how many of the rows count
        self.taken = self.end = start
        self._undone = (start, start)  # what had been taken when the last two rounds began

    def __len__(self) -> int:
        return self.end - self.taken

    def add(self, start: int, taps: mx.array, count: int) -> None:
        """The first `count` rows of a round's taps, the first of them at position `start`."""
        if start < self.end:  # an exception has undone a round
            self.taps = [(at, rows, min(n, start - at)) for at, rows, n in self.taps if at < start]
        self.taps.append((start, taps, count))
        self.end = start + count

    def begin_round(self, taken: int) -> None:
        """A round began when `taken` tokens had been taken: what neither it nor the one before needs goes."""
        self._undone = (self._undone[1], taken)
        first = self._undone[0]
        if self.taps and self.taps[0][0] + self.taps[0][2] <= first:
            self.taps = [entry for entry in self.taps if entry[0] + entry[2] > first]

    def take(self, drafter: Drafter | None) -> mx.array | None:
        """Context rows `[1, S, ...]` of all that wait, projected together; None where nothing does or nobody asks."""
        first, self.taken = self.taken, self.end
        return self.context(drafter, first, self.end)

    def context(self, drafter: Drafter | None, first: int, end: int) -> mx.array | None:
        """Context rows `[1, S, ...]` of the positions `first` up to `end`, as far as all from `first` on are known."""
        rows = []
        for at, taps, count in self.taps:
            if at <= first < min(at + count, end):
                stop = min(at + count, end)
                rows.append(taps[:, first - at : stop - at])
                first = stop
        if not rows or drafter is None:
            return None
        return drafter.context(mx.concatenate(rows, axis=1) if len(rows) > 1 else rows[0])
