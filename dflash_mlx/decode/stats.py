"""What a generation did: counts that reconcile, times, and whether the draft was used."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class GenerationStats:
    """Figures of one generation; times in seconds, memory in GB (1e9 bytes), rates in tokens a second.

    The first token comes with the prefill and belongs to no round, so
    `generation_tokens == 1 + sum(accepted) + bonus` and `tau == (sum(accepted) + bonus) / rounds`.

    Attributes:
        accepted: draft tokens kept, round by round.
        block_sizes: rows verified, round by round; 1 is a plain step.
        bonus: tokens that rounds emitted beyond the draft's, the target's own.
        draft_used: whether any round had a draft.
        lookup_rounds: rounds whose proposals were copied from the text.
        draft_off_reason: why the draft was not used, or not to the end.
        cache_lost: whether an exception left the prompt cache at anything but prompt and emitted tokens (a warning
            says at what).
        draft_broken: whether it was switched off for what it computed; its cache is empty then.
        block_size: the pinned block, or with `auto` the widest that was allowed; `block_sizes` has what was chosen.
        draft_seconds, verify_seconds, host_seconds: device time of both models and time to build their graphs;
            only measured when profiling, since telling them apart needs a second sync a round.
    """

    prompt_tokens: int = 0
    generation_tokens: int = 0
    accepted: list[int] = field(default_factory=list)
    block_sizes: list[int] = field(default_factory=list)
    bonus: int = 0
    draft_used: bool = False
    lookup_rounds: int = 0
    draft_off_reason: str | None = None
    draft_broken: bool = False
    cache_lost: bool = False
    block_size: int = 1
    auto: bool = False
    prefill_seconds: float = 0.0
    generation_seconds: float = 0.0
    draft_seconds: float | None = None
    verify_seconds: float | None = None
    host_seconds: float | None = None
    peak_memory: float = 0.0

    @property
    def rounds(self) -> int:
        return len(self.accepted)

    @property
    def tau(self) -> float:
        """Tokens a round emits on average; 1.0 for plain decoding."""
        return (sum(self.accepted) + self.bonus) / self.rounds if self.rounds else 0.0

    @property
    def prompt_tps(self) -> float:
        return self.prompt_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def generation_tps(self) -> float:
        """Without the prompt, and as mlx-lm counts it: all tokens over the time since the first."""
        return self.generation_tokens / self.generation_seconds if self.generation_seconds else 0.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """Share of the rounds that offered slot i (from 1) and kept its token."""
        shares = []
        for slot in range(1, max(self.block_sizes, default=1)):
            offered = [kept for kept, width in zip(self.accepted, self.block_sizes, strict=True) if width > slot]
            shares.append(sum(kept >= slot for kept in offered) / len(offered))
        return shares

    def record(self, width: int, accepted: int, emitted: int) -> None:
        """Count one round that emitted `emitted` tokens (fewer than accepted + 1 where the text ended)."""
        kept = min(accepted, emitted)
        # Python looks for signals at calls: with none in between, the lists stay equally long.
        self.accepted += [kept]
        self.block_sizes += [width]
        self.bonus += emitted - kept
        self.draft_used = self.draft_used or width > 1

    @property
    def why_plain(self) -> str | None:
        """Why the draft was not used, or not to the end; None where it was."""
        if self.draft_used or self.draft_off_reason:
            return self.draft_off_reason
        return "the text ended before anything was proposed"

    def summary(self) -> str:
        """One line for the terminal."""
        if self.draft_used:
            slots = " ".join(f"{share:.2f}" for share in self.acceptance_by_position)
            rounds = "" if self.auto else f" {self.rounds} rounds,"
            found = f" ({self.lookup_rounds} by lookup)," if self.lookup_rounds else ""
            head = f"block {self._chosen()},{rounds}{found} tau {self.tau:.2f}, acceptance by position {slots}"
            if self.draft_off_reason:
                head += f" (draft off later: {self.draft_off_reason})"
        else:
            head = f"no draft used: {self.why_plain}"
        return (
            f"{head}; prompt {self.prompt_tokens} tokens, {self.prompt_tps:.1f} tokens/s; "
            f"generated {self.generation_tokens} tokens, {self.generation_tps:.1f} tokens/s; "
            f"peak memory {self.peak_memory:.2f} GB"
        )

    def _chosen(self) -> str:
        """The block as a reader wants it: pinned, or which widths were chosen how often."""
        if not self.auto:
            return str(self.block_size)
        often = Counter(self.block_sizes).most_common(3)
        return "auto (" + ", ".join(f"{width} in {n}" for width, n in often) + f" of {self.rounds} rounds)"

    def to_dict(self) -> dict[str, Any]:
        """All figures as plain JSON values."""
        names = ("rounds", "tau", "prompt_tps", "generation_tps", "acceptance_by_position")
        return {**vars(self), **{name: getattr(self, name) for name in names}}
