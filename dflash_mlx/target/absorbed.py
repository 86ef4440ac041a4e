"""Latent attention (MLA) of a block in the absorbed form.

MLA caches one latent a token. For one row mlx-lm takes query and output to the latent ("absorbed"); for several
rows it builds keys and values of the whole context, at every call. A verify has few rows, so the absorbed form
costs far less there. Both are the same function, `q (E c)^T = (q E) c^T`.

The attention runs its own code with one name bound differently: a private copy of its `__call__` finds `attend`
where it looks for `scaled_dot_product_attention`. The keys and values that it has built by then are never
evaluated. Found by structure; knows no family by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import FunctionType
from typing import Any, cast

import mlx.core as mx
from mlx import nn
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import CacheList, KVCache

from .intercept import Handler
from .structure import members

ATTEND = scaled_dot_product_attention.__name__


def absorbing(layers: Sequence[nn.Module]) -> list[tuple[nn.Module, Handler]]:
    """Handlers by which every latent attention of these layers takes the absorbed form where that is cheaper."""
    parts = [part for layer in layers for part in members(layer)]
    return [(part, _absorb) for part in parts if "embed_q" in part and "unembed_out" in part]


def absorbed_is_cheaper(rows: int, context: int, rank: int, head: int) -> bool:
    """Compare multiply-adds of one head.

    Building keys and values costs `context * rank * head` and attending to them `rows * context * head`; absorbed,
    queries and outputs cost `rows * rank * head` and attending to the latents `rows * context * 2 * rank`. (The part
    with rotary embedding is the same.) For DeepSeek-V3 (rank 512, head 256) absorbed wins up to 63 rows at 100 tokens
    of context and up to 157 at 2,048.

    Args:
        rows: of the block. context: rows of the cache, block included. rank: of the latent.
        head: a head's dimensions of key (without rotary embedding) and value, together.
    """
    return rows * rank * (head + 2 * context) < context * head * (rank + rows)


def _absorb(own: Any, *args: Any, **kwargs: Any) -> Any:
    call, attention = own.func, own.args[0]
    if ATTEND not in call.__code__.co_names:
        return own(*args, **kwargs)
    return _rebound(call, partial(attend, attention))(attention, *args, **kwargs)


def _rebound(call: FunctionType, attend: Callable[..., mx.array]) -> Callable[..., Any]:
    """A copy of a method that finds `attend` where it looks for mlx-lm's attention."""
    names = {**call.__globals__, ATTEND: attend}
    return FunctionType(call.__code__, names, call.__name__, call.__defaults__, call.__closure__)


def attend(
    attention: nn.Module, queries: mx.array, keys: mx.array, values: mx.array, cache: Any, scale: float, mask: Any
) -> mx.array:
    """Attention of one call, absorbed if that is cheaper; arguments of mlx-lm's function behind the module.

    Args:
        queries: `[B, H, L, Dk]`, with or without their rotary part. keys, values: `[B, H, K, D]`, not evaluated yet.
        mask: scores of the rotary part `[B, H, L, K]` with the mask in them where the queries come without it, else
            what `mx.fast.scaled_dot_product_attention` takes.

    Returns:
        `[B, H, L, Dv]`.
    """
    rows = cache[0] if type(cache) is CacheList else cache
    length = queries.shape[2]
    plain = partial(scaled_dot_product_attention, queries, keys, values, cache=cache, scale=scale, mask=mask)
    if length == 1 or type(rows) is not KVCache:  # one row is absorbed by the model itself
        return plain()
    stored = cast(tuple[mx.array, mx.array], (rows.keys, rows.values))
    latent, k_pe = (part[..., : rows.offset, :] for part in stored)  # [B, 1, K, R], [B, 1, K, P]
    context, rank = latent.shape[2:]
    scores = isinstance(mask, mx.array) and mask.dtype != mx.bool_
    nope = queries.shape[-1] - (0 if scores else k_pe.shape[-1])
    if not absorbed_is_cheaper(length, context, rank, nope + values.shape[-1]):
        return plain()
    if not scores:
        queries, q_pe = mx.split(queries, [nope], axis=-1)
        mask = _masked((q_pe * scale) @ k_pe.swapaxes(-1, -2), mask)
    output = mx.fast.scaled_dot_product_attention(attention.embed_q(queries), latent, latent, scale=scale, mask=mask)
    return attention.unembed_out(output)


def _masked(scores: mx.array, mask: mx.array | str | None) -> mx.array:
    """Scores `[B, H, L, K]` with what a mask hides at the least number of their dtype."""
    if mask is None:
        return scores
    if isinstance(mask, str):  # "causal"
        length, context = scores.shape[-2:]
        mask = mx.arange(context) <= mx.arange(context - length, context)[:, None]
    return mx.where(mask, scores, mx.array(mx.finfo(scores.dtype).min, scores.dtype))
