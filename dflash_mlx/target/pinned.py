"""Masks for a block on a rotating cache that pins its first tokens (`max_kv_size` pins 4).

mlx-lm's mask for several rows hides the pinned tokens and shows evicted ones once the cache is full, so a block
would see something else than single steps do. For the time of a verify each such cache makes the mask that
single steps amount to. (Prefill keeps mlx-lm's own mask: it has to equal mlx-lm's prefill.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList, RotatingKVCache


def pin(caches: Sequence[Any]) -> None:
    """Let pinning caches make exact masks until `unpin`."""
    for cache in _pinning(caches):
        vars(cache)["make_mask"] = partial(_mask, cache)


def unpin(caches: Sequence[Any]) -> None:
    """Their class's own masks again; may be called at any time."""
    for cache in _pinning(caches):
        vars(cache).pop("make_mask", None)


def _pinning(caches: Sequence[Any]) -> Iterator[RotatingKVCache]:
    for cache in caches:
        if type(cache) is CacheList:
            yield from _pinning(cache.caches)
        elif type(cache) is RotatingKVCache and cache.keep:
            yield cache


def _mask(cache: RotatingKVCache, n: int, window_size: int | None = None, return_array: bool = False) -> Any:
    if n == 1:
        return RotatingKVCache.make_mask(cache, n, window_size, return_array)
    old = min(cache.max_size - 1, cache.offset)
    query = mx.arange(old, old + n)[:, None]
    row = mx.arange(old + n)[None]
    window = min(window_size or cache.max_size, cache.max_size) - cache.keep
    return (row <= query) & ((row < cache.keep) | (query - row < window))
