"""How the target picks a token: greedy, seeded temperature, or any mlx-lm sampler, after any processors.

The noise of a seeded pick depends on (seed, absolute position, token) alone, so the text does not depend on
the draft, the block size or what ran before. Probabilities are float32. Knows no model.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from ..arguments import number, whole
from .filters import Filters

Sampler = Callable[[mx.array], mx.array]  # log-probabilities [1, V] -> token [1]
LogitsProcessor = Callable[[mx.array, mx.array], mx.array]  # tokens so far [n], logits [1, V] -> logits


@dataclass(frozen=True)
class Noise:
    """Noise of consecutive tokens: `gumbel` `[L, V]` float32, and XTC's `coin` `[L, 1]` where it is used."""

    gumbel: mx.array
    coin: mx.array | None = None


@dataclass(frozen=True)
class TokenPicker:
    """The target's choice of tokens.

    Args:
        temp: temperature; 0 is greedy.
        seed: noise of a sampled run; None draws one at random.
        sampler: replaces temperature and seed; called row by row as in mlx-lm, since some draw once a call.
        rejection: accept draft tokens by the classic rule instead of by match (only where the picks are seeded).
        filters: top-p and its like, applied before the temperature as in mlx-lm.
        logits_processors: called row by row, each with the tokens before that row, as in mlx-lm.
    """

    temp: float = 0.0
    seed: int | None = None
    filters: Filters = field(default_factory=Filters)
    rejection: bool = False
    sampler: Sampler | None = None
    logits_processors: Sequence[LogitsProcessor] = ()
    _key: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        number("temp", self.temp, 0)
        whole("seed", self.seed, none=True)
        seed = secrets.randbits(64) if self.seed is None else self.seed
        object.__setattr__(self, "_key", str(int(seed)).encode())

    @property
    def seeded(self) -> bool:
        """Whether picks use our noise."""
        return self.sampler is None and self.temp > 1e-30  # below, float32 has no room and the best token wins

    def gumbel(self, positions: Sequence[int], vocab: int, purpose: str = "pick") -> mx.array:
        """Gumbel noise `[len(positions), vocab]` for the tokens at these absolute positions."""
        keys = self._keys(positions, purpose)
        return mx.vmap(lambda key: mx.random.gumbel((vocab,), key=key))(keys)

    def uniform(self, positions: Sequence[int], purpose: str) -> mx.array:
        """Uniform numbers in [0, 1), `[len(positions), 1]`, one a position; purposes are independent."""
        return mx.vmap(lambda key: mx.random.uniform(shape=(1,), key=key))(self._keys(positions, purpose))

    def _keys(self, positions: Sequence[int], purpose: str) -> mx.array:
        digests = [
            hashlib.blake2b(b"%s:%d" % (self._key, p), digest_size=8, person=purpose.encode()).digest()
            for p in positions
        ]
        words = [[int.from_bytes(d[:4], "little"), int.from_bytes(d[4:], "little")] for d in digests]
        return mx.array(words, mx.uint32)  # [len(positions), 2]

    def pick(self, logits: mx.array, noise: Noise | None) -> tuple[mx.array, mx.array]:
        """Pick a token for every row.

        Args:
            logits: `[L, V]`, after the processors. noise: of these rows where `seeded`, else None.

        Returns:
            Picks `[L]` and log-probabilities `[L, V]` in the model's dtype as in mlx-lm.
        """
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        if self.sampler is not None:
            rows = [self.sampler(logprobs[i : i + 1]).reshape(-1) for i in range(logprobs.shape[0])]
            return mx.concatenate(rows), logprobs
        if noise is None:
            return mx.argmax(logprobs, axis=-1), logprobs
        return mx.argmax(self.scores(logits, noise.coin) + noise.gumbel, axis=-1), logprobs

    def processed(self, logits: mx.array, before: mx.array, block: mx.array) -> mx.array:
        """Logits `[L, V]` after the processors; row i follows block token i and is given all tokens up to it.

        Rows behind a draft token that is then rejected are computed too, so a processor may see a prefix that is
        never emitted; what it returns for it is not used.

        Args:
            before: `[n]` int32, the tokens before the anchor. block: `[L]`, anchor first.
        """
        tokens = mx.concatenate([before, block.astype(mx.int32)])
        rows = []
        for i in range(logits.shape[0]):
            row = logits[i : i + 1]  # its own array: some processors write into what they are given
            for process in self.logits_processors:
                row = process(tokens[: before.shape[0] + i + 1], row)
            rows.append(row)
        return mx.concatenate(rows, axis=0)

    def noise(self, first: int, rows: int, vocab: int, purpose: str = "pick") -> Noise | None:
        """The noise of the tokens at positions `first ..`, None where picks use none."""
        if not self.seeded:
            return None
        positions = range(first, first + rows)
        coin = self.uniform(positions, "xtc") if self.filters.xtc_probability else None
        return Noise(self.gumbel(positions, vocab, purpose), coin)

    def scores(self, logits: mx.array, coin: mx.array | None) -> mx.array:
        """Filtered log-probabilities over the temperature, `[L, V]` float32; their softmax is what is sampled."""
        # An infinite logit is certain: of infinity less infinity nothing could be drawn.
        wide = mx.minimum(logits.astype(mx.float32), mx.finfo(mx.float32).max)
        return self.filters(wide - mx.logsumexp(wide, axis=-1, keepdims=True), coin) / self.temp
