"""Prove on this machine that the draft changes no token: decode again with plain mlx-lm and compare.

On a GPU a block forward may round differently from single steps; then the first difference must sit at a
near-tie of the target, and the verdict says how near.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import mlx.core as mx
from mlx import nn
from mlx_lm.generate import generate_step as plain_step
from mlx_lm.generate import generation_stream, wired_limit

from .generation import generate_step

# Two tokens whose logits lie within this many units in the last place may swap between kernels.
TIE_ULPS = 8


@dataclass(frozen=True)
class Verdict:
    """The comparison of two token lists.

    Attributes:
        tokens: how many were compared; first_difference: index of the first that differs, or None.
        ours, plain: the tokens there. margin: the target's logit gap between its best two there.
        tie: largest margin that rounding in the target's dtype can explain.
        reference: what was compared with. plain_tps: its speed, tokens a second without the prompt.
    """

    tokens: int
    first_difference: int | None
    ours: int | None
    plain: int | None
    margin: float | None
    tie: float | None
    reference: str
    plain_tps: float

    @property
    def identical(self) -> bool:
        return self.first_difference is None

    @property
    def near_tie(self) -> bool:
        """Whether rounding explains the difference."""
        return self.margin is not None and self.tie is not None and self.margin <= self.tie

    def __str__(self) -> str:
        if self.identical:
            return f"identical to plain decoding ({self.tokens} tokens, {self.reference})"
        cause = "a near-tie that rounding explains" if self.near_tie else "NOT a near-tie: this is a fault, report it"
        return (
            f"differs from plain decoding ({self.reference}) at token {self.first_difference}: {self.ours} against "
            f"{self.plain}; the target's top-2 margin there is {self.margin:.3g} ({cause}, limit {self.tie:.3g})"
        )

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "identical": self.identical, "near_tie": self.near_tie}


def compare_with_plain(
    model: nn.Module,
    prompt: mx.array,
    tokens: Sequence[int],
    *,
    end_tokens: Collection[int] = (),
    temp: float = 0.0,
    seed: int | None = None,
    **options: Any,
) -> Verdict:
    """Decode as many tokens plainly and compare.

    Args:
        prompt: `[n]` ids. tokens: what was generated with the draft. options: cache options of both runs.
        temp, seed: a sampled run is compared with our own plain decoding, since mlx-lm has no noise by position.
    """
    if temp > 0:
        reference = "our own plain decoding with the same seed"
        steps: Iterator[tuple[Any, mx.array]] = (
            (t, p) for t, p, _ in generate_step(prompt, model, max_tokens=len(tokens), temp=temp, seed=seed, **options)
        )
    else:
        reference = "mlx-lm generate_step"
        steps = plain_step(prompt, model, max_tokens=len(tokens), **options)
    difference: tuple[Any, ...] | None = None
    count, first = 0, time.perf_counter()
    with wired_limit(model, [cast(Any, generation_stream)]):
        for i, (token, logprobs) in enumerate(steps):
            if i == 0:
                first = time.perf_counter()
            count += 1
            if difference is None and token != tokens[i]:
                difference = (i, tokens[i], token, *_margin(logprobs))
            if token in end_tokens:
                break
    seconds = time.perf_counter() - first
    if difference is None and count < len(tokens):
        difference = (count, tokens[count], None, None, None)
    position, ours, plain, margin, tie = difference or (None,) * 5
    return Verdict(count, position, ours, plain, margin, tie, reference, (count - 1) / seconds if count > 1 else 0.0)


def _margin(logprobs: mx.array) -> tuple[float, float]:
    """Gap between the best two, and the gap that rounding can explain at their magnitude."""
    second, best = cast(list[float], mx.sort(logprobs.astype(mx.float32))[-2:].tolist())
    # Hidden states and logits of either order of magnitude were rounded on the way; 16 is typical of the latter.
    return best - second, TIE_ULPS * mx.finfo(logprobs.dtype).eps * 16
