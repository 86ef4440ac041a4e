"""Rewind: cut a target's cache back after a block of which only a part was kept.

One table by cache class says how; a class that is not in it is refused by name. Knows no model and no draft.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mlx_lm.models.cache import KVCache, QuantizedKVCache


def _trim(cache: Any, n: int) -> None:
    if (done := cache.trim(n)) != n:
        raise RuntimeError(f"{type(cache).__name__} dropped {done} of {n} rows")


# Exact classes: a subclass may hold state that this does not know.
REWIND: dict[type, Callable[[Any, int], None]] = {KVCache: _trim, QuantizedKVCache: _trim}


def unsupported(caches: Sequence[Any]) -> str | None:
    """The name of the first cache class that can't be rewound, or None."""
    return next((type(cache).__name__ for cache in caches if type(cache) not in REWIND), None)


def rewind(caches: Sequence[Any], n: int) -> None:
    """Drop the last `n` rows of every cache; lazy, no copy."""
    if n:
        for cache in caches:
            REWIND[type(cache)](cache, n)
