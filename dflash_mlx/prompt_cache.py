"""Caches that outlive one call: what of a new prompt they already hold, and how they are kept in a file.

Knows tokens and caches of both models; knows no text and no template.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_unflatten
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.models.cache import CacheList, RotatingKVCache
from mlx_lm.models.cache import save_prompt_cache as save_prompt_cache

from .arguments import whole
from .decode.caches import align, cached_tokens
from .decode.lookup import TokenIndex, as_drafter
from .draft import DraftKVCache
from .errors import DFlashError
from .target import Target
from .target.rewind import CUT


class PromptCache:
    """The caches of one conversation and the tokens that they hold.

    Args:
        model: the target. draft_model: as in `stream_generate`, or None. max_kv_size: as in mlx-lm.
    """

    def __init__(self, model: nn.Module, draft_model: Any = None, max_kv_size: int | None = None):
        whole("max_kv_size", max_kv_size, 1, none=True)
        self.max_kv_size = max_kv_size
        self.target = Target(model)
        self.drafter = None if draft_model is None else as_drafter(draft_model)
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.tokens: list[int] = []
        target = self.target.make_cache(self.max_kv_size)
        self._size = len(target)
        self.caches: list[Any] = target + (self.drafter.make_cache() if self.drafter else [])

    def rest(self, ids: Sequence[int]) -> list[int]:
        """The tokens of a prompt that are not cached yet, at least one; the caches are cut to fit.

        A prompt that continues what is cached always hits. One that only shares a beginning hits where the target's
        caches can be cut; recurrent state and a window that has wrapped can't, so everything is fed again.
        """
        if not ids:
            raise ValueError("the prompt holds no tokens")
        self._believe_the_caches()
        shared = 0
        for ours, theirs in zip(self.tokens, ids, strict=False):
            if ours != theirs:
                break
            shared += 1
        shared = min(shared, len(ids) - 1)  # one token is always fed, its logits are needed
        surplus = len(self.tokens) - shared
        if surplus:
            target = self.caches[: self._size]
            if not all(map(can_be_cut, target)):
                self.reset()
                return list(ids)
            cut(target, surplus)
            align(self.caches[self._size :], shared)
            del self.tokens[shared:]
        return list(ids[shared:])

    def _believe_the_caches(self) -> None:
        """After an interrupt they may hold tokens that nobody noted; those are cut, or everything is fed again."""
        held = cached_tokens(self.caches[: self._size])
        surplus = held - len(self.tokens)
        if held and surplus:
            target = self.caches[: self._size]
            if surplus > 0 and all(map(can_be_cut, target)):
                cut(target, surplus)
                align(self.caches[self._size :], len(self.tokens))
            else:
                self.reset()

    def extend(self, fed: Sequence[int], emitted: Sequence[int]) -> None:
        """Note what a call has put into the caches: what it was given and what it emitted."""
        self.tokens += [*fed, *emitted]


def can_be_cut(cache: Any) -> bool:
    """Whether a target's cache entry can drop its last rows as it stands."""
    if type(cache) is CacheList:
        return all(map(can_be_cut, cache.caches))
    if type(cache) is RotatingKVCache:
        return cache.offset < cache.max_size
    return type(cache) in CUT and not getattr(cache, "start_position", 0)  # a chunked cache that dropped chunks


def cut(caches: Sequence[Any], n: int) -> None:
    """Drop the last `n` tokens of a target's caches, which must be able to."""
    for cache in caches:
        if type(cache) is CacheList:
            cut(cache.caches, n)
        else:
            CUT[type(cache)](cache, n)


def load_prompt_cache(file_name: str, return_metadata: bool = False) -> Any:
    """Caches written by `save_prompt_cache` (mlx-lm's format), a draft's rows included.

    Returns:
        The list of caches, and with `return_metadata` the metadata as well.

    Raises:
        DFlashError: the file is missing, damaged or no prompt cache.
    """
    try:
        arrays, flat = cast(tuple[dict[str, Any], dict[str, Any]], mx.load(file_name, return_metadata=True))
        metadata, classes, scalars = cast(list[Any], tree_unflatten(list(flat.items())))
        for place, kind in scalars[1:]:
            value = arrays[place]
            if kind == "scalar":
                arrays[place] = value.item()
            elif kind == "string":
                arrays[place] = "".join(map(chr, value.tolist()))
            else:
                arrays[place] = None
        states = cast(list[Any], tree_unflatten(list(arrays.items())))
        known = {**vars(mlx_lm_cache), **{kind.__name__: kind for kind in (DraftKVCache, TokenIndex)}}
        if unknown := [name for name in classes if not hasattr(known.get(name), "from_state")]:
            raise LookupError(f"this mlx-lm has no {unknown[0]}")
        caches = [known[name].from_state(state) for name, state in zip(classes, states, strict=True)]
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise DFlashError(f"{file_name}: not a prompt cache of this mlx-lm, or damaged ({error})") from None
    return (caches, metadata) if return_metadata else caches
