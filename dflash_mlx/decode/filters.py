"""What sampling leaves of a distribution: top-p, min-p, XTC, top-k, in mlx-lm's order and with its semantics.

Everything is float32: cumulative sums of a 150,000-token vocabulary in bfloat16 keep the wrong tokens. Knows no
model and no noise; the coin of XTC is passed in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from ..arguments import number, token_ids, whole


@dataclass(frozen=True)
class Filters:
    """Sampling filters; the defaults filter nothing (as `mlx_lm.sample_utils.make_sampler`).

    Raises:
        ValueError: a value is of another kind or out of range.
    """

    top_p: float = 0.0
    min_p: float = 0.0
    min_tokens_to_keep: int = 1
    top_k: int = 0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    xtc_special_tokens: Sequence[int] = ()

    def __post_init__(self) -> None:
        number("top_p", self.top_p, 0, 1)
        number("min_p", self.min_p, 0, 1)
        whole("min_tokens_to_keep", self.min_tokens_to_keep, 1)
        whole("top_k", self.top_k, 0)
        number("xtc_probability", self.xtc_probability, 0, 1)
        number("xtc_threshold", self.xtc_threshold, 0, 0.5)
        token_ids("xtc_special_tokens", self.xtc_special_tokens)

    @property
    def any(self) -> bool:
        """Whether anything is filtered at all."""
        return 0 < self.top_p < 1 or self.min_p > 0 or self.top_k > 0 or self.xtc_probability > 0

    def __call__(self, logprobs: mx.array, coin: mx.array | None = None) -> mx.array:
        """Log-probabilities `[L, V]` float32 with what is filtered out at -inf.

        Args:
            coin: `[L, 1]` uniform in [0, 1), one a row; XTC acts where it is at most `xtc_probability`.
        """
        if 0 < self.top_p < 1:
            logprobs = _top_p(logprobs, self.top_p)
        if self.min_p > 0:
            logprobs = _min_p(logprobs, self.min_p, self.min_tokens_to_keep)
        if self.xtc_probability > 0:
            assert coin is not None
            logprobs = mx.where(coin > self.xtc_probability, logprobs, self._without_top_choices(logprobs))
        if 0 < self.top_k < logprobs.shape[-1]:
            kth = mx.argpartition(-logprobs, kth=self.top_k - 1, axis=-1)
            logprobs = mx.put_along_axis(logprobs, kth[..., self.top_k :], mx.array(-math.inf), axis=-1)
        return logprobs

    def _without_top_choices(self, logprobs: mx.array) -> mx.array:
        """All tokens above the threshold go, but for the least likely of them."""
        probs = mx.softmax(logprobs, axis=-1)
        least = mx.where(probs > self.xtc_threshold, probs, math.inf).min(axis=-1, keepdims=True)
        excluded = probs > least
        if special := [token for token in self.xtc_special_tokens if 0 <= token < logprobs.shape[-1]]:
            excluded[..., mx.array(special)] = False
        return mx.where(excluded, -math.inf, logprobs)


def _top_p(logprobs: mx.array, top_p: float) -> mx.array:
    """Keep the most likely tokens until their mass reaches `top_p`; equal ones stay together."""
    ascending = mx.sort(logprobs, axis=-1)
    probs = mx.exp(ascending)
    above = mx.cumsum(probs, axis=-1, reverse=True, inclusive=False)
    total = above[..., :1] + probs[..., :1]
    dropped = (above >= top_p * total).sum(axis=-1, keepdims=True)
    return mx.where(logprobs < mx.take_along_axis(ascending, dropped, axis=-1), -math.inf, logprobs)


def _min_p(logprobs: mx.array, min_p: float, keep: int) -> mx.array:
    """Drop tokens less likely than `min_p` times the best, but never the best `keep`."""
    keep = min(keep, logprobs.shape[-1])
    drop = logprobs < logprobs.max(axis=-1, keepdims=True) + math.log(min_p)
    if keep > 1:
        best = mx.argpartition(logprobs, kth=-keep, axis=-1)[..., -keep:]
        drop = mx.put_along_axis(drop, best, mx.array(False), axis=-1)
    return mx.where(drop, -math.inf, logprobs)
