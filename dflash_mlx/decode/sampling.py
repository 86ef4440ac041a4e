"""How the target picks a token: greedy, seeded temperature, or any mlx-lm sampler, after any processors.

The noise of a seeded pick depends on (seed, absolute position, token) alone, so the text does not depend on
the draft, the block size or what ran before. Probabilities are float32. Knows no model.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

Sampler = Callable[[mx.array], mx.array]  # log-probabilities [L, V] -> tokens [L]
LogitsProcessor = Callable[[mx.array, mx.array], mx.array]  # tokens so far [n], logits [1, V] -> logits


@dataclass(frozen=True)
class TokenPicker:
    """The target's choice of tokens.

    Args:
        temp: temperature; 0 is greedy.
        seed: noise of a sampled run; None draws one at random.
        sampler: replaces temperature and seed; called with rows of log-probabilities as in mlx-lm.
        logits_processors: called row by row, each with the tokens before that row, as in mlx-lm.
    """

    temp: float = 0.0
    seed: int | None = None
    sampler: Sampler | None = None
    logits_processors: Sequence[LogitsProcessor] = ()
    _key: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temp) and self.temp >= 0):
            raise ValueError(f"temp is {self.temp}, expected 0 or more")
        seed = secrets.randbits(64) if self.seed is None else self.seed
        object.__setattr__(self, "_key", str(int(seed)).encode())

    @property
    def seeded(self) -> bool:
        """Whether picks use our noise."""
        return self.sampler is None and self.temp > 0

    def gumbel(self, positions: Sequence[int], vocab: int) -> mx.array:
        """Noise `[len(positions), vocab]` for the tokens at these absolute positions."""
        keys = [hashlib.blake2b(b"%s:%d" % (self._key, p), digest_size=8).digest() for p in positions]
        words = [[int.from_bytes(key[:4], "little"), int.from_bytes(key[4:], "little")] for key in keys]
        return mx.vmap(lambda key: mx.random.gumbel((vocab,), key=key))(mx.array(words, mx.uint32))

    def pick(
        self, logits: mx.array, gumbel: mx.array | None, before: Sequence[int], block: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Pick a token for every row.

        Args:
            logits: `[L, V]`, row i follows block token i.
            gumbel: `[L, V]` noise where `seeded`, else None.
            before: the tokens before the anchor; only processors look at them.
            block: `[L]` tokens of the block, anchor first.

        Returns:
            Picks `[L]` and log-probabilities `[L, V]` after the processors, in the model's dtype as in mlx-lm.
        """
        if self.logits_processors:
            logits = self._processed(logits, before, block)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        if self.sampler is not None:
            return self.sampler(logprobs), logprobs
        if gumbel is None:
            return mx.argmax(logprobs, axis=-1), logprobs
        return mx.argmax(logprobs.astype(mx.float32) / self.temp + gumbel, axis=-1), logprobs

    def _processed(self, logits: mx.array, before: Sequence[int], block: mx.array) -> mx.array:
        tokens = mx.concatenate([mx.array(list(before), mx.int32), block.astype(mx.int32)])
        rows = []
        for i in range(logits.shape[0]):
            row = logits[i : i + 1]  # its own array: some processors write into what they are given
            for process in self.logits_processors:
                row = process(tokens[: len(before) + i + 1], row)
            rows.append(row)
        return mx.concatenate(rows, axis=0)
