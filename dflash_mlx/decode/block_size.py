"""How wide the next block is. Knows the limits of a request, not the models."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Widths:
    """Slots that the draft fills and rows that the target verifies, anchor included; verify 1 means no draft."""

    draft: int
    verify: int


@dataclass
class FixedBlockSize:
    """The same block every round, cut to what is still wanted."""

    size: int

    def next(self, remaining: int, room: int | None = None) -> Widths:
        """Widths of the next round.

        Args:
            remaining: tokens still wanted, at least 1. No more rows are verified, so a round emits no more.
            room: rows that the target's cache can take back, None where that has no limit.
        """
        verify = min(self.size, remaining if room is None else min(remaining, max(room, 1)))
        # One slot more than is verified near the end: the draft then sees the block it would have seen if the
        # text went on, as in the reference.
        return Widths(draft=min(self.size, remaining + 1), verify=verify)
