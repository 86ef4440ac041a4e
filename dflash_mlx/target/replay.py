"""Replay: a layer's call in a round is made again with the rows that were kept.

Which axes of an argument are rows is learned from calls of two widths, not guessed from sizes: a mask of 16 heads looks
like 16 rows. Knows modules, arrays and their shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

Path = tuple[int | str, ...]  # layer, argument, and places within tuples
RowAxes = dict[Path, tuple[int, ...]]  # of every array among the arguments


@dataclass(frozen=True)
class LayerCall:
    """One call of a layer during a round."""

    layer: int
    own: Callable[..., Any]
    args: tuple
    kwargs: dict[str, Any]

    def replay(self, width: int, keep: int, axes: RowAxes) -> None:
        """Call again with the first `keep` of `width` rows; only the caches change."""
        cut = {at: _cut(value, (self.layer, at), width, keep, axes) for at, value in _arguments(self.args, self.kwargs)}
        self.own(*(cut[i] for i in range(len(self.args))), **{name: cut[name] for name in self.kwargs})


def row_axes(two: list[LayerCall], three: list[LayerCall]) -> RowAxes:
    """The axes that grow by a row with each token, from the calls of a forward of two tokens and one of three."""
    shapes = [{path: array.shape for call in calls for path, array in _arrays(call)} for calls in (two, three)]
    return {
        path: tuple(axis for axis, (a, b) in enumerate(zip(short, shapes[1][path], strict=True)) if b == a + 1)
        for path, short in shapes[0].items()
        if len(shapes[1].get(path, ())) == len(short)
    }


def _arguments(args: tuple, kwargs: dict[str, Any]) -> Iterator[tuple[int | str, Any]]:
    yield from enumerate(args)
    yield from kwargs.items()


def _arrays(call: LayerCall) -> Iterator[tuple[Path, mx.array]]:
    for at, value in _arguments(call.args, call.kwargs):
        yield from _members(value, (call.layer, at))


def _members(value: Any, path: Path) -> Iterator[tuple[Path, mx.array]]:
    if isinstance(value, tuple):
        for i, item in enumerate(value):
            yield from _members(item, (*path, i))
    elif isinstance(value, mx.array):
        yield path, value


def _cut(value: Any, path: Path, width: int, keep: int, axes: RowAxes) -> Any:
    """The argument at `path` without its last rows."""
    if isinstance(value, tuple):
        return tuple(_cut(item, (*path, i), width, keep, axes) for i, item in enumerate(value))
    if not isinstance(value, mx.array) or keep == width:
        return value
    grown = axes.get(path)
    if grown is None:  # a short text needed none: a mask [..., width, keys]
        grown = (value.ndim - 2, value.ndim - 1) if value.ndim >= 2 and value.shape[-2] == width else ()
    kept = [slice(size - (width - keep)) if axis in grown else slice(None) for axis, size in enumerate(value.shape)]
    return value[tuple(kept)]
