"""What one request did: the `dflash` block of its reply."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from ..decode import GenerationStats

RECENT = 16  # rounds that the figures of a stream's packet show: a packet may come some rounds late


@dataclass
class Report:
    """Figures of one request; counts reconcile: `completion_tokens == accepted + bonus + plain_tokens`.

    Attributes:
        draft: public name of the draft, None when the server has none. wanted: whether the request would use it.
        stats: rounds of the parts that ran alone. ways: how it ran, in order: "score", "dflash", "plain", "batch".
        cached: prompt tokens that a stored cache held.
    """

    draft: str | None = None
    wanted: bool = False
    stats: GenerationStats = field(default_factory=GenerationStats)
    ways: list[str] = field(default_factory=list)
    prompt_tokens: int = 0
    tokens: int = 0
    cached: int = 0
    queued_at: float = field(default_factory=time.perf_counter)
    started_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None

    def start(self, way: str) -> None:
        """Note that the engine has taken it up, and how."""
        if self.started_at is None:
            self.started_at = time.perf_counter()
        if self.ways[-1:] != [way]:
            self.ways.append(way)

    def count_token(self) -> None:
        self.tokens += 1
        self.last_token_at = time.perf_counter()
        if self.first_token_at is None:
            self.first_token_at = self.last_token_at

    @property
    def accepted(self) -> int:
        return sum(self.stats.accepted)

    @property
    def decode_seconds(self) -> float:
        return _between(self.first_token_at, self.last_token_at)

    def live(self) -> dict[str, Any]:
        """Figures so far, for a stream that asks for them."""
        return {
            "rounds": self.stats.rounds,
            "accepted": self.accepted,
            "recent": self._recent(),
            "tau": round(self.stats.tau, 4),
            "tokens_per_second": round(_rate(self.tokens, self.decode_seconds), 2),
        }

    def _recent(self) -> list[tuple[int, int]]:
        """Draft tokens kept and rows verified of the last rounds, up to round number `rounds`."""
        rounds = self.stats.rounds
        first = max(0, rounds - RECENT)
        return list(zip(self.stats.accepted[first:rounds], self.stats.block_sizes[first:rounds], strict=False))

    def to_dict(self) -> dict[str, Any]:
        """All figures."""
        fed = self.prompt_tokens - self.cached
        prefill = _between(self.started_at, self.first_token_at)
        return {
            "draft_used": self.stats.draft_used,
            "draft_model": self.draft,
            "ran": "+".join(self.ways),
            "draft_off_reason": self._off_reason(),
            "block_size": self.stats.block_size if self.stats.draft_used else 1,
            "auto": self.stats.auto,
            **self.live(),
            "bonus": self.stats.bonus,
            "plain_tokens": self.tokens - self.accepted - self.stats.bonus,
            "acceptance_by_position": [round(share, 4) for share in self.stats.acceptance_by_position],
            "rounds_by_accepted": {str(k): n for k, n in sorted(Counter(self.stats.accepted).items())},
            "cached_tokens": self.cached,
            "queue_seconds": round(_between(self.queued_at, self.started_at), 4),
            "prefill_seconds": round(prefill, 4),
            "prompt_tokens_per_second": round(_rate(fed, prefill), 2),
        }

    def _off_reason(self) -> str | None:
        if self.draft is None:
            return "the server runs without a draft"
        if not self.wanted:
            return "block size 1 is plain decoding"
        if self.ways == ["score"]:
            return "no token was asked for"
        if self.ways in (["batch"], ["score", "batch"]):
            return "other requests were waiting, so it ran in a batch"
        if "batch" in self.ways:
            return self.stats.draft_off_reason or "other requests came, so it went on in a batch"
        return self.stats.why_plain


def _between(start: float | None, end: float | None) -> float:
    return max(0.0, end - start) if start is not None and end is not None else 0.0


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 and count > 0 else 0.0
