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


# Added to the positions of noise where recurrent caches come from elsewhere and nobody knows how many tokens they hold:
# no text is so long that noise is used twice.
FAR = 1 << 32


def note_tokens(caches: Sequence[Any], count: int) -> None:
    """Note with a target's caches how many tokens they hold, where all are recurrent and do not say themselves."""
    if caches and all(map(recurrent, caches)):
        vars(caches[0])["dflash_tokens"] = count


def _noted_tokens(caches: Sequence[Any]) -> int:
    """As noted, behind `FAR` where nothing was; 0 where other entries say it, or nothing is held."""
    if cached_tokens(caches) or not all(map(recurrent, caches)) or all(cache.empty() for cache in caches):
        return 0
    return vars(caches[0]).get("dflash_tokens", FAR)


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
) -> tuple[list[Any], list[Any], int, int]:
    """The caches of both models, fresh ones or the given list split in two.

    Returns:
        The target's, the draft's, how many tokens they hold, and how far behind these the noise of the next is.
    """
    fresh = target.make_cache(max_kv_size)
    if given is None:
        return fresh, drafter.make_cache() if drafter else [], 0, 0
    target_cache, draft_cache = given[: len(fresh)], given[len(fresh) :]
    if len(target_cache) < len(fresh):
        raise ValueError(f"prompt_cache has {len(given)} entries, the target needs {len(fresh)}")
    noted = _noted_tokens(target_cache)
    held = cached_tokens(target_cache) or noted % FAR
    if drafter is None:
        return target_cache, [], held, noted - noted % FAR
    if not draft_cache:
        # The draft sees nothing of what came before, only proposes worse for a while; positions stay absolute.
        return target_cache, drafter.make_cache(offset=held), held, noted - noted % FAR
    expected = len(drafter.make_cache())
    if len(draft_cache) != expected:
        raise DraftError(f"prompt_cache has {len(draft_cache)} draft entries, this draft needs {expected}")
    if noted == FAR:
        noted = held = draft_cache[0].offset  # of caches that come from a file the draft's rows say it
    align(draft_cache, held)  # it may be behind, e.g. when a turn was decoded without it
    return target_cache, draft_cache, held, noted - noted % FAR
