"""Where a round begins: what each cache class needs to get back there, also where an exception broke off an append.

References where an append makes arrays of its own, a length where it writes behind the rows that are there, a copy of
the one row that a full ring overwrites. Knows cache classes only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

Undo = Callable[[], None]  # takes one cache back; may be called again, also where it was broken off itself


class CanNotRewind(RuntimeError):
    """A cache has lost what would be needed: nothing was copied for a plain round or the prompt."""


def _cut_to(cache: Any, rows: int, whole: bool = False) -> None:
    """Both arrays end at `rows` where an append was broken off between them (`whole`: in any case)."""
    if rows == 0:
        cache.keys = cache.values = None
        return
    keys, values = ([x] if isinstance(x, mx.array) else x for x in (cache.keys, cache.values))
    if whole or keys[0].shape[-2] != values[0].shape[-2]:
        cut = [[x[..., :rows, :] for x in arrays] for arrays in (keys, values)]
        cache.keys, cache.values = (x[0] if isinstance(cache.keys, mx.array) else tuple(x) for x in cut)


def _note_rows(cache: Any, width: int, plain: bool) -> Undo:
    """An append writes behind the rows that are there. Their arrays are not kept: twice the memory when they grow."""
    offset = cache.offset

    def undo() -> None:
        _cut_to(cache, offset, type(cache) is ConcatenateKVCache)
        cache.offset = offset

    return undo


def _note_chunked(cache: ChunkedKVCache, width: int, plain: bool) -> Undo:
    """A forward first drops old chunks, into arrays of its own."""
    keys, values, offset, start = cache.keys, cache.values, cache.offset, cache.start_position
    if not plain:
        return partial(vars(cache).update, keys=keys, values=values, offset=offset, start_position=start)

    def undo() -> None:
        if cache.start_position != start:
            raise CanNotRewind("its chunked cache has dropped the rows that would be needed")
        _cut_to(cache, offset - start)
        cache.offset = offset

    return undo


def _note_rotating(cache: RotatingKVCache, width: int, plain: bool) -> Undo:
    """Only an append of one row to a full ring writes over a row that is needed; that row is copied."""
    offset, index = cache.offset, cache._idx
    if offset < cache.max_size and (plain or width == 1):

        def undo() -> None:
            _cut_to(cache, index, whole=True)
            cache.offset, cache._idx = offset, index

        return undo
    if plain:
        return _overwritten
    assert cache.keys is not None
    assert cache.values is not None
    if width > 1 or cache.keys.shape[2] > cache.max_size:  # into arrays of its own
        return partial(vars(cache).update, keys=cache.keys, values=cache.values, offset=offset, _idx=index)
    at = cache.keep if index == cache.max_size else index
    # Taken before the append is queued, so that MLX may still write into the buffer instead of copying it.
    rows = [mx.take(array, mx.array([at]), axis=2) for array in (cache.keys, cache.values)]
    mx.async_eval(rows)

    def put_back() -> None:
        for array, row in zip((cache.keys, cache.values), rows, strict=True):
            assert array is not None
            array[..., at : at + 1, :] = row
        cache.offset, cache._idx = offset, index

    return put_back


def _overwritten() -> None:
    raise CanNotRewind("its rotating cache has overwritten the row that would be needed")


def _note_arrays(cache: ArraysCache, width: int, plain: bool) -> Undo:
    arrays = list(cache.cache)

    def undo() -> None:
        cache.cache = list(arrays)

    return undo


def _note_unknown(cache: Any, width: int, plain: bool) -> Undo:
    def undo() -> None:
        raise CanNotRewind(f"nothing is known of its {type(cache).__name__}")

    return undo


# Exact classes: a subclass may hold state that this does not know.
NOTE: dict[type, Callable[[Any, int, bool], Undo]] = {
    KVCache: _note_rows,
    QuantizedKVCache: _note_rows,
    ConcatenateKVCache: _note_rows,
    ChunkedKVCache: _note_chunked,
    RotatingKVCache: _note_rotating,
    ArraysCache: _note_arrays,
}


def note(cache: Any, width: int, plain: bool = False) -> Undo:
    """How to get back from an append of `width` rows, whole or broken off; see `Rewinder.mark`."""
    if type(cache) is CacheList:
        members = [note(member, width, plain) for member in cache.caches]
        return partial(_each, members)
    return NOTE.get(type(cache), _note_unknown)(cache, width, plain)


def note_beside(cache: Any) -> Undo:
    """The same for a drafter's cache: its own `note()`, where it has one or is a cache of rows."""
    if NOTE.get(type(cache)) is _note_rows:
        return _note_rows(cache, 1, plain=True)
    own = getattr(cache, "note", None)
    return own() if own is not None else partial(_each, ())


def _each(undos: Sequence[Undo]) -> None:
    for undo in undos:
        undo()
