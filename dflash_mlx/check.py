"""Prove on this machine that the draft changes no token: decode again with plain mlx-lm and compare.

On a GPU a block forward may round differently from single steps; then the first difference must sit at a
near-tie of the target, and the verdict says how near.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import mlx.core as mx
from mlx import nn
from mlx_lm.generate import generate_step as plain_step
from mlx_lm.generate import generation_stream, wired_limit

from .decode.filters import Filters
from .decode.sampling import Noise, TokenPicker
from .generation import generate_step

# Two tokens whose logits lie within this many units in the last place may swap between kernels.
TIE_ULPS = 4


@dataclass(frozen=True)
class Verdict:
    """The comparison of two token lists.

    Attributes:
        tokens: how many were compared; first_difference: index of the first that differs, or None.
        ours, plain: the tokens there, None where that text had ended. margin: how much better plain's token
            scored there than ours, in logits.
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
        if self.margin is None:
            longer = "ours goes on" if self.plain is None else "plain decoding goes on"
            return f"differs from plain decoding ({self.reference}): after {self.first_difference} tokens {longer}"
        cause = "a near-tie that rounding explains" if self.near_tie else "NOT a near-tie: this is a fault, report it"
        return (
            f"differs from plain decoding ({self.reference}) at token {self.first_difference}: {self.ours} against "
            f"{self.plain}; the target's margin between them is {self.margin:.3g} ({cause}, limit {self.tie:.3g})"
        )

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "identical": self.identical, "near_tie": self.near_tie}


def compare_with_plain(
    model: nn.Module,
    prompt: mx.array,
    tokens: Sequence[int],
    *,
    max_tokens: int | None = None,
    end_tokens: Collection[int] = (),
    temp: float = 0.0,
    seed: int | None = None,
    sampling: Mapping[str, Any] | None = None,
    **options: Any,
) -> Verdict:
    """Decode plainly and compare.

    Args:
        prompt: `[n]` ids. tokens: what was generated with the draft. options: cache options of both runs.
        max_tokens: limit of that run, so that a text which ended too early is found; default: `len(tokens)`.
        temp, seed, sampling: of a sampled run (`sampling` holds top_p and its like). It is compared with our own
            plain decoding, since mlx-lm has no noise by position.
    """
    sampling = sampling or {}
    limit = max_tokens or max(len(tokens), 1)
    steps: Iterator[tuple[Any, mx.array]]
    if temp > 0:
        reference = "our own plain decoding with the same seed"
        ours = generate_step(prompt, model, max_tokens=limit, temp=temp, seed=seed, **sampling, **options)
        steps = ((token, logprobs) for token, logprobs, _ in ours)
    else:
        reference = "mlx-lm generate_step"
        steps = plain_step(prompt, model, max_tokens=limit, **options)
    found: tuple[Any, ...] | None = None
    count, first = 0, time.perf_counter()
    with wired_limit(model, [cast(Any, generation_stream)]):
        for i, (token, logprobs) in enumerate(steps):
            if i == 0:
                first = time.perf_counter()
            count += 1
            if found is None and i >= len(tokens):
                found = (i, None, token, None, None)
            elif found is None and token != tokens[i]:
                # 16 is a typical magnitude of logits; rounding errors are relative to it.
                tie = TIE_ULPS * mx.finfo(logprobs.dtype).eps * 16
                if temp > 0:
                    picker = TokenPicker(temp, seed, Filters(**sampling))
                    noise = cast(Noise, picker.noise(prompt.shape[0] + i, 1, logprobs.shape[-1]))
                    logprobs = temp * (picker.scores(logprobs[None], noise.coin) + noise.gumbel)[0]
                margin = (logprobs[token] - logprobs[tokens[i]]).item()
                found = (i, tokens[i], token, margin, tie)
            if token in end_tokens:
                break
    seconds = time.perf_counter() - first
    if found is None and count < len(tokens):
        found = (count, tokens[count], None, None, None)
    position, mine, plain, margin, tie = found or (None,) * 5
    return Verdict(count, position, mine, plain, margin, tie, reference, (count - 1) / seconds if count > 1 else 0.0)
