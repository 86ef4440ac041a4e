"""What a draft has not seen yet: the taps of emitted tokens, kept until it is asked again. Knows no model."""

from __future__ import annotations

import mlx.core as mx

from .drafter import Drafter


class Backlog:
    """Taps of the tokens behind the rows in a draft's cache, in order; its length is how many tokens wait.

    They are cut and projected where they are used: a plain round costs no projection, and a lazy slice belongs to the
    thread that made it, while a generator may be finished in another.
    """

    def __init__(self) -> None:
        self.taps: list[tuple[mx.array, int]] = []  # [1, L, taps * Ht] of a round, and how many of its rows count
        self.tokens = 0

    def __len__(self) -> int:
        return self.tokens

    def add(self, taps: mx.array, count: int) -> None:
        """The first `count` rows of a round's taps."""
        self.taps.append((taps, count))
        self.tokens += count

    def take(self, drafter: Drafter | None) -> mx.array | None:
        """Context rows `[1, S, ...]` of all that wait, projected together; None where nothing does or nobody asks."""
        if not self.taps or drafter is None:
            return None
        rows = [taps[:, :count] for taps, count in self.taps]
        self.taps, self.tokens = [], 0
        return drafter.context(mx.concatenate(rows, axis=1) if len(rows) > 1 else rows[0])
