"""Rewind: take a target's caches back to a length within the last rounds, exactly.

`rewind` cuts the newest round where it was not kept whole. One table by cache class says how: caches of rows are cut;
recurrent state can't be cut, so the layer that owns it runs again on the kept inputs of the round, from the state
before it (its output is never computed: MLX is lazy). `restore` goes back to where a round began, from whatever state
an exception left (`undo.py`). A class that is not in the table is refused by name. Knows modules and caches, no model
and no draft.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

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

from .pinned import unpin
from .replay import LayerCall, RowAxes
from .undo import CanNotRewind, Undo, note


@dataclass
class Mark:
    """Where a round begins: tokens before it, its rows, the caches then and how each gets back there."""

    start: int
    width: int
    caches: list[Any]
    undo: list[Undo]
    beside: Sequence[Undo] = ()  # of caches that are not the target's
    calls: list[LayerCall] = field(default_factory=list)
    idle: bool = False  # nothing has been touched since


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


class Rewinder:
    """Marks rounds as they begin and takes the caches back when part of one was not kept, or it was broken off.

    Args:
        caches: a target's caches, one list for its whole life. layers: those that may own recurrent state.
        axes: asked when such a layer runs again.
    """

    def __init__(self, caches: list[Any], layers: Sequence[nn.Module], axes: Callable[[], RowAxes] = dict):
        self.caches, self.axes = caches, axes
        self.replayed = frozenset(i for i, cache in enumerate(caches) if recurrent(cache))
        self.layers = list(layers) if self.replayed else []
        self.marks: list[Mark] = []

    def mark(self, start: int, width: int, plain: bool = False, beside: Sequence[Undo] = ()) -> Mark:
        """Before a round of `width` rows behind `start` tokens. The last two rounds can be undone.

        Args:
            plain: where a round is undone only after an interrupt, nothing is copied for it and no array is kept.
            beside: what takes back caches that are not the target's.
        """
        mark = Mark(start, width, list(self.caches), [note(cache, width, plain) for cache in self.caches], beside)
        self.marks = [*self.marks[-1:], mark]
        return mark

    def watch(self) -> list[tuple[nn.Module, Callable[..., Any]]]:
        """Handlers that record the newest round's calls of the layers whose state would have to be replayed."""
        mark = self.marks[-1]
        if mark.width == 1:
            return []

        def record(layer: int, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if receivers(self.caches, (*args, *kwargs.values())) & self.replayed:
                mark.calls.append(LayerCall(layer, own, args, kwargs))
            return own(*args, **kwargs)

        return [(layer, partial(record, i)) for i, layer in enumerate(self.layers)]

    def states(self) -> list[Any]:
        """What the recurrent caches hold; logits do not depend on the state behind their own row."""
        return [self.caches[i].state for i in self.replayed]

    def rewind(self, fed: int, length: int) -> int:
        """From `fed` tokens, all rounds being whole, back to `length`; lazy.

        Returns:
            Where the caches stand: at `length`, or before it (where a round began); the tokens from there are to be
            fed.
        """
        if fed <= length:
            return fed
        newest = self.marks[-1]
        if length <= newest.start:
            return self.restore(length)
        for i, cache in enumerate(self.caches):
            if i in self.replayed:
                newest.undo[i]()
            else:
                _drop(cache, fed - length)
        for call in newest.calls:
            call.replay(newest.width, length - newest.start, self.axes())
        return length

    def restore(self, length: int) -> int:
        """Back to where the newest round that starts at `length` or before began, from whatever state.

        Returns:
            The tokens that the caches hold then. May be called again where it was broken off.
        """
        unpin(self.caches)
        for i, mark in reversed([*enumerate(self.marks)]):
            if not mark.idle:
                self.caches[:] = mark.caches  # quantising replaces them
                for undo in (*mark.beside, *mark.undo):
                    undo()
            if mark.start <= length:
                self.marks = self.marks[: i + 1]
                return mark.start
        raise CanNotRewind(f"no round is known that begins at {length} tokens or before")


def _drop(cache: Any, n: int) -> None:
    if type(cache) is CacheList:
        for member in cache.caches:
            _drop(member, n)
    else:
        CUT[type(cache)](cache, n)
