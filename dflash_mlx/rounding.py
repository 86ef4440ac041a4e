"""What rounding does to a target on this machine: mlx-lm's own forward of several rows against its single steps.

Both feed the same tokens through the model as it is, no code of ours between. Where they lie apart by no more than a
dtype's rounding amounts to over the layers, that distance is what two tokens may swap within; where they lie further
apart, the wide forward itself is wrong, and excuses nothing. Knows no draft and no text.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
from mlx import nn
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import make_prompt_cache

from .target.structure import named_modules

WIDTHS = (4, 16)  # rows of the wide forwards: kernels for few rows and for many
SIGMAS = 6  # that two logits may lie apart by: 4 standard deviations of the difference of two
# Distance of two forwards relative to the logits' spread, in eps, per root of the number of layers (their errors add up
# like a random walk). Measured over mlx-lm's families on a CPU: at most 1.2 in half precision, which rounds once an
# operation, and 7 in float32, which takes sums in another order; a wrong mask gives 8 in bfloat16, noise of 0.12 5.
MOST_HALF, MOST_SINGLE = 2.0, 32.0
# Units in the last place of the largest logit (in float32 of 16 at least) that may always swap: ours has other widths.
LEAST_HALF, LEAST_SINGLE = 1.0, 4.0
KV_DEFAULTS: dict[str, Any] = {"kv_bits": None, "kv_group_size": 64, "quantized_kv_start": 5000}  # mlx-lm's


@dataclass(frozen=True)
class Distance:
    """Between the logits of a single step and those of wide forwards, behind one token.

    Attributes:
        sigma: standard deviation of the difference, the greatest of the widths. spread: of the logits themselves.
        size: of the largest logit.
    """

    sigma: float
    spread: float
    size: float

    @classmethod
    def of(cls, single: mx.array, wide: Sequence[mx.array]) -> Distance:
        """From rows `[V]`; masked entries do not count."""
        a = single.astype(mx.float32)
        real = mx.abs(a) < 1e4  # false for infinities and NaN
        count = mx.maximum(real.sum(), 1)

        def deviation(x: mx.array) -> mx.array:
            x = mx.where(real, x, 0)
            return mx.sqrt(mx.where(real, mx.square(x - x.sum() / count), 0).sum() / count)

        apart = mx.max(mx.stack([deviation(a - row.astype(mx.float32)) for row in wide]))
        figures = mx.stack([apart, deviation(a), mx.where(real, mx.abs(a), 0).max()])
        sigma, spread, size = cast(list[float], figures.tolist())
        return cls(sigma if math.isfinite(sigma) else math.inf, spread, size)


class Rounding:
    """What rounding can explain at each token of a text.

    Args:
        prompt, tokens: what is fed.
        see: called with the index of each token and the rows `[V]` that it is picked from: of the single step, and of
            the wide forwards.
        prefill_step_size, options: of mlx-lm's `generate_step`.
    """

    def __init__(
        self,
        model: nn.Module,
        prompt: Sequence[int],
        tokens: Sequence[int],
        see: Callable[[int, mx.array, list[mx.array]], None],
        prefill_step_size: int = 2048,
        **options: Any,
    ):
        self.layers = max(len(getattr(model, "layers", ())), 1)
        self.eps = _eps(model)
        self.distances: list[Distance] = []
        fed = [prompt[-1], *tokens[:-1]]
        for i, (single, wide) in enumerate(_rows(model, prompt[:-1], fed, prefill_step_size, options)):
            self.distances.append(Distance.of(single, wide))
            see(i, single, wide)
        self.typical = statistics.median(each.sigma / max(each.spread, 1e-30) for each in self.distances)

    @property
    def half(self) -> bool:
        return self.eps > 1e-4

    @property
    def most(self) -> float:
        """The greatest distance relative to the logits' spread that rounding amounts to."""
        return (MOST_HALF if self.half else MOST_SINGLE) * math.sqrt(self.layers) * self.eps

    @property
    def explains(self) -> bool:
        """Whether the wide forward is the single steps but for rounding."""
        return self.typical <= self.most

    def limit(self, position: int) -> float:
        """The margin between two logits that rounding can turn round there."""
        if not self.explains:
            return 0.0
        here = self.distances[position]
        least = LEAST_HALF * here.size if self.half else LEAST_SINGLE * max(here.size, 16)
        return max(least * self.eps, SIGMAS * min(here.sigma, self.most * here.spread))


def _rows(
    model: nn.Module, prompt: Sequence[int], fed: Sequence[int], step_size: int, options: dict[str, Any]
) -> Iterator[tuple[mx.array, list[mx.array]]]:
    """The rows `[V]` behind each of the tokens `fed`, which follow the prompt: of a single step, of each width."""
    kv = {name: options.get(name, default) for name, default in KV_DEFAULTS.items()}

    def forward(tokens: Sequence[int], caches: list[Any]) -> mx.array:
        logits = model(mx.array(list(tokens))[None], cache=caches)[0]
        maybe_quantize_kv_cache(caches, **kv)
        return logits

    start = make_prompt_cache(model, max_kv_size=options.get("max_kv_size"))
    for i in range(0, len(prompt), step_size):
        forward(prompt[i : i + step_size], start)
        mx.eval([cache.state for cache in start])
    single, *wide = (copy.deepcopy(start) for _ in range(1 + len(WIDTHS)))
    for i in range(0, len(fed), max(WIDTHS)):
        part = fed[i : i + max(WIDTHS)]
        steps = [forward([token], single)[0] for token in part]
        blocks = []
        for width, caches in zip(WIDTHS, wide, strict=True):
            pieces = [forward(part[j : j + width], caches) for j in range(0, len(part), width)]
            blocks.append(mx.concatenate(pieces, axis=0))
        mx.eval(steps, blocks)
        for j, step in enumerate(steps):
            yield step, [block[j] for block in blocks]


def _eps(model: nn.Module) -> float:
    """Of the coarsest dtype that the model computes in."""
    arrays = (value for _, part in named_modules(model) for value in part.values() if isinstance(value, mx.array))
    return max(mx.finfo(dtype).eps for dtype in {a.dtype for a in arrays} if mx.issubdtype(dtype, mx.floating))
