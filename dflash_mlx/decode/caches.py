"""The caches of one generation: the target's and the draft's, in one list or apart, and how many tokens they hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mlx_lm.models.cache import CacheList

from ..errors import DraftError
from ..target import Target
from ..target.rewind import recurrent
from .drafter import Drafter


def cached_tokens(caches: Sequence[Any]) -> int:
    """Tokens that a target's cache holds; recurrent entries do not say, and some models leave an entry unused."""
    offsets = [getattr(cache, "offset", None) for cache in _flat(caches)]
    return max((offset for offset in offsets if isinstance(offset, int)), default=0)


def _flat(caches: Sequence[Any]) -> Iterator[Any]:
    for cache in caches:
        yield from _flat(cache.caches) if isinstance(cache, CacheList) else (cache,)


def cache_names(caches: Sequence[Any]) -> list[str]:
    """Distinct classes of a model's cache entries, members of lists included."""

    def name(cache: Any) -> str:
        if isinstance(cache, CacheList):
            return f"CacheList({', '.join(map(name, cache.caches))})"
        return type(cache).__name__

    return sorted({name(cache) for cache in caches})


def align(draft_cache: Sequence[Any], length: int) -> None:
    """Bring a draft's caches to `length` tokens: surplus is cut, rows that are missing are passed over.

    Behind a gap the draft sees less than it could and proposes worse for a while; positions stay absolute.
    """
    for cache in draft_cache:
        if cache.offset > length:
            cache.trim(cache.offset - length)
        elif cache.offset < length:
            cache.skip(length - cache.offset)


def split_caches(
    target: Target, drafter: Drafter | None, given: list[Any] | None, max_kv_size: int | None
) -> tuple[list[Any], list[Any], int]:
    """The caches of both models, and how many tokens they hold: fresh ones, or the given list split in two."""
    fresh = target.make_cache(max_kv_size)
    if given is None:
        return fresh, drafter.make_cache() if drafter else [], 0
    target_cache, draft_cache = given[: len(fresh)], given[len(fresh) :]
    if len(target_cache) < len(fresh):
        raise ValueError(f"prompt_cache has {len(given)} entries, the target needs {len(fresh)}")
    held = cached_tokens(target_cache)
    if drafter is None:
        return target_cache, [], held
    if not draft_cache:
        # The draft sees nothing of what came before, only proposes worse for a while; positions stay absolute.
        return target_cache, drafter.make_cache(offset=held), held
    expected = len(drafter.make_cache())
    if len(draft_cache) != expected:
        raise DraftError(f"prompt_cache has {len(draft_cache)} draft entries, this draft needs {expected}")
    if all(map(recurrent, target_cache)):
        held = draft_cache[0].offset  # recurrent state does not say how many tokens made it
    align(draft_cache, held)  # it may be behind, e.g. when a turn was decoded without it
    return target_cache, draft_cache, held
