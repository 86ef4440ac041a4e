"""Rewind: take a target's caches back to a length within the last rounds, exactly.

One table by cache class says how. Caches of rows are cut; recurrent state can't be cut, so the layer that owns
it runs again on the kept inputs of the round, from the state before it (its output is never computed: MLX is
lazy). A class that is not in the table is refused by name. Knows modules and caches, no model and no draft.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)


@dataclass(frozen=True)
class LayerCall:
    """One call of a layer during a round, and the indices of the caches it was given."""

    own: Callable[..., Any]
    args: tuple
    kwargs: dict[str, Any]
    caches: frozenset[int]

    def replay(self, width: int, keep: int) -> None:
        """Call again with the first `keep` of `width` rows; only the caches change."""
        self.own(
            *(_cut(a, width, keep) for a in self.args), **{k: _cut(a, width, keep) for k, a in self.kwargs.items()}
        )


@dataclass
class Mark:
    """A round that may have to be undone: tokens before it, its rows, state before it and calls in it."""

    start: int
    width: int
    states: list[Any]
    calls: list[LayerCall] = field(default_factory=list)
    kept: int = 0  # rows of it that the caches still hold


# Trimming rows -------------------------------------------------------------------------------------------------------


def _trim(cache: Any, n: int) -> None:
    if cache.offset == 0:
        return  # some models make a cache for a layer that never fills it
    if (done := cache.trim(n)) != n:
        raise RuntimeError(f"{type(cache).__name__} dropped {done} of {n} rows")


def _cut_concatenated(cache: Any, n: int) -> None:
    """Its own `trim` moves the offset only, and the next append brings the dropped rows back."""
    end = cache.offset - n
    cache.keys, cache.values, cache.offset = cache.keys[..., :end, :], cache.values[..., :end, :], end


def _cut_rotating(cache: Any, n: int) -> None:
    """Valid behind an append of several rows: that leaves rows in time order, and enough old ones for any cut."""
    if n == 0:
        return
    end = cache._idx - n
    cache.keys, cache.values = cache.keys[..., :end, :], cache.values[..., :end, :]
    cache.offset -= n
    cache._idx = end


def _step_back(cache: RotatingKVCache, n: int) -> None:
    """Undo `n` one-row appends without a snapshot, which is possible until the ring wraps."""
    if n == 0:
        return
    if cache.offset > cache.max_size:
        raise CanNotRewind("its rotating cache has overwritten the row that would be needed")
    cache.trim(n)


# How each class drops its last n rows. Exact classes: a subclass may hold state that this does not know.
CUT: dict[type, Callable[[Any, int], None]] = {
    KVCache: _trim,
    QuantizedKVCache: _trim,
    ChunkedKVCache: _trim,
    ConcatenateKVCache: _cut_concatenated,
    RotatingKVCache: _cut_rotating,
}


def unsupported(caches: Sequence[Any]) -> str | None:
    """The name of the first cache class that can't be rewound, or None."""
    for cache in caches:
        if type(cache) is CacheList:
            if inner := unsupported(cache.caches):
                return inner
        elif type(cache) not in CUT and type(cache) is not ArraysCache:
            return type(cache).__name__
    return None


def recurrent(cache: Any) -> bool:
    """Whether a cache holds state that can't be cut, so that its layer has to run again."""
    if type(cache) is CacheList:
        return any(recurrent(member) for member in cache.caches)
    return type(cache) is ArraysCache


def receivers(caches: Sequence[Any], args: Sequence[Any]) -> frozenset[int]:
    """Indices of the caches among the arguments of a call, also as members of a list of caches."""
    found = set()
    for i, cache in enumerate(caches):
        members = {id(cache)} | ({id(m) for m in cache.caches} if type(cache) is CacheList else set())
        if any(id(arg) in members for arg in args):
            found.add(i)
    return frozenset(found)


# Snapshots -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReplacedRow:
    """The row of a rotating cache that a one-row append is about to overwrite, and where the cache stood."""

    at: int
    key: mx.array
    value: mx.array
    offset: int
    index: int

    @classmethod
    def of(cls, cache: RotatingKVCache) -> ReplacedRow | None:
        """None where the append makes arrays of its own first: while the buffer grows, or is cut back to the window."""
        assert cache.keys is not None
        assert cache.values is not None
        rows = cache.keys.shape[2]
        if rows > cache.max_size or cache._idx == rows < cache.max_size:
            return None
        at = cache.keep if cache._idx == cache.max_size else cache._idx
        # Taken before the append is queued, so that MLX may still write into the buffer instead of copying it.
        key, value = (mx.take(array, mx.array([at]), axis=2) for array in (cache.keys, cache.values))
        mx.async_eval(key, value)
        return cls(at, key, value, cache.offset, cache._idx)

    def put_back(self, cache: RotatingKVCache) -> None:
        assert cache.keys is not None
        assert cache.values is not None
        cache.keys[..., self.at : self.at + 1, :] = self.key
        cache.values[..., self.at : self.at + 1, :] = self.value
        cache.offset, cache._idx = self.offset, self.index


def snapshot(cache: Any, width: int, plain: bool = False) -> Any:
    """What `restore` needs before an append of `width` rows: references, since appends replace what they refer to.

    Only a rotating cache that appends one row writes into its arrays in place; that row is copied.
    """
    if type(cache) is CacheList:
        return [snapshot(member, width, plain) for member in cache.caches]
    if type(cache) is ArraysCache:
        return list(cache.cache)
    if type(cache) is ChunkedKVCache:  # a forward first drops old chunks, into arrays of its own
        return cache.keys, cache.values, cache.offset, cache.start_position
    if type(cache) is RotatingKVCache:
        if width == 1 and cache.keys is not None:
            if plain:
                return None
            if row := ReplacedRow.of(cache):
                return row
        return cache.keys, cache.values, cache.offset, cache._idx
    return None


def restore(cache: Any, state: Any, n: int) -> None:
    """Back to a snapshot; caches that are cut drop `n` rows instead."""
    if type(cache) is CacheList:
        for member, inner in zip(cache.caches, state, strict=True):
            restore(member, inner, n)
    elif type(cache) is ArraysCache:
        cache.cache = list(state)
    elif type(cache) is RotatingKVCache:
        if state is None:
            _step_back(cache, n)
        elif isinstance(state, ReplacedRow):
            state.put_back(cache)
        else:
            cache.keys, cache.values, cache.offset, cache._idx = state
    elif type(cache) is ChunkedKVCache:
        cache.keys, cache.values, cache.offset, cache.start_position = state
    else:
        CUT[type(cache)](cache, n)


class CanNotRewind(RuntimeError):
    """A rotating cache whose ring was overwritten by a plain round, for which no snapshot is kept."""


class Rewinder:
    """Marks rounds as they are queued and takes the caches back when part of one was not kept.

    Args:
        caches: a target's caches, one list for its whole life. layers: those that may own recurrent state.
    """

    def __init__(self, caches: list[Any], layers: Sequence[nn.Module]):
        self.caches = caches
        self.replayed = frozenset(i for i, cache in enumerate(caches) if recurrent(cache))
        self.layers = list(layers) if self.replayed else []
        self.marks: list[Mark] = []

    def mark(self, start: int, width: int, plain: bool = False) -> Mark:
        """Before a round of `width` rows behind `start` tokens. The last two rounds can be undone.

        Args:
            plain: without a draft a round is undone only after an interrupt, so nothing is copied for it.
        """
        mark = Mark(start, width, [snapshot(cache, width, plain) for cache in self.caches], kept=width)
        self.marks = [mark] if plain else [*self.marks[-1:], mark]
        return mark

    def watch(self, mark: Mark) -> list[tuple[nn.Module, Callable[..., Any]]]:
        """Handlers that record the calls of the layers whose state would have to be replayed."""
        if mark.width == 1:
            return []

        def record(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if given := receivers(self.caches, (*args, *kwargs.values())) & self.replayed:
                mark.calls.append(LayerCall(own, args, kwargs, given))
            return own(*args, **kwargs)

        return [(layer, record) for layer in self.layers]

    def states(self) -> list[Any]:
        """What the recurrent caches hold; logits do not depend on the state behind their own row."""
        return [self.caches[i].state for i in self.replayed]

    def undo(self, start: int) -> None:
        """Undo the round behind `start` tokens that an exception broke off, cache by cache."""
        for cache, state in zip(self.caches, self.marks[-1].states, strict=True):
            _drop_to(cache, state, start)

    def rewind(self, fed: int, length: int) -> None:
        """From `fed` tokens back to `length`, which must lie behind the start of the older mark; lazy."""
        if fed == length:
            return
        newest = self.marks[-1]
        if newest.start + newest.kept != fed:
            raise RuntimeError(f"the last round ended at {newest.start + newest.kept} tokens, not at {fed}")
        owner = next((mark for mark in reversed(self.marks) if mark.start < length), None)
        for i, cache in enumerate(self.caches):
            if i not in self.replayed:
                _go_back(cache, newest, newest.states[i], fed, length)
            elif length == newest.start:
                restore(cache, newest.states[i], fed - length)
            elif owner is None:
                raise RuntimeError(f"can't go back from {fed} to {length} tokens")
            else:
                restore(cache, owner.states[i], fed - owner.start)
        if self.replayed and length != newest.start and owner is not None:
            for call in owner.calls:
                call.replay(owner.width, length - owner.start)
        newest.kept = length - newest.start  # below 0 nothing can follow but the end of the request


def _drop_to(cache: Any, state: Any, length: int) -> None:
    """Back to the snapshot of a round that may or may not have reached this cache."""
    if type(cache) is CacheList:
        for member, inner in zip(cache.caches, state, strict=True):
            _drop_to(member, inner, length)
    elif type(cache) in (ArraysCache, RotatingKVCache, ChunkedKVCache):
        restore(cache, state, max(0, getattr(cache, "offset", 0) - length))
    elif cache.offset > length:
        CUT[type(cache)](cache, cache.offset - length)


def _go_back(cache: Any, newest: Mark, state: Any, fed: int, length: int) -> None:
    """Cut a cache of rows. One that drops old rows can't be cut across two appends: the newer is undone first."""
    if type(cache) is CacheList:
        for member, inner in zip(cache.caches, state, strict=True):
            _go_back(member, newest, inner, fed, length)
    elif type(cache) in (RotatingKVCache, ChunkedKVCache) and length <= newest.start < fed:
        restore(cache, state, fed - newest.start)
        CUT[type(cache)](cache, newest.start - length)
    else:
        CUT[type(cache)](cache, fed - length)


def _cut(value: Any, width: int, keep: int) -> Any:
    """An argument of a layer for its first `keep` rows: hidden states, per-row inputs and masks."""
    if isinstance(value, tuple):
        return tuple(_cut(item, width, keep) for item in value)
    if not isinstance(value, mx.array) or keep == width:
        return value
    if value.ndim >= 2 and value.shape[1] == width:  # [B, width, ...]
        return value[:, :keep]
    if value.ndim >= 2 and value.shape[-2] == width:  # mask [..., width, keys]
        return value[..., :keep, : value.shape[-1] - (width - keep)]
    return value
