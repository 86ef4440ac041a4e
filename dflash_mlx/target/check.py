"""Proof, at load, that a target is understood: its blocks are its single steps, and taps, embedding and head are right.

A few forwards of a few dummy tokens. A family is never trusted by its name, but two are
refused by it, because mlx-lm itself is wrong there in a way that a short check can't show.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import CacheList

from .intercept import intercept
from .model import TargetModel, hidden
from .replay import LayerCall, RowAxes, row_axes
from .rewind import Rewinder, receivers, recurrent
from .structure import array_arguments

# mlx-lm computes several rows differently from single ones here, so no block can equal plain decoding.
INCONSISTENT = {
    "phi3small": "mlx-lm lets its block-sparse layers see later tokens when several rows are computed",
    "plamo3": "mlx-lm's window mask for several rows is one wider than its cache",
}


@dataclass
class _Seen:
    """Calls of one module: the arrays it was given, whether a cache was among its arguments, what it returned."""

    inputs: list[list[mx.array]] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    by_hand: list[Any] = field(default_factory=list)

    def __call__(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # Run twice, unless the layer is given a cache, which would hold the tokens twice.
        if not any(hasattr(value, "update_and_fetch") for value in (*args, *kwargs.values())):
            self.by_hand.append(own(*args, **kwargs))
        self.inputs.append(array_arguments(args, kwargs))
        self.outputs.append(own(*args, **kwargs))
        return self.outputs[-1]


def check_blocks(target: TargetModel) -> None:
    """Check that a block is computed as single steps are: the first row of two as a single row, and a layer with
    recurrent state, which runs again when a round is cut, to the same result.

    Needs no taps, head or embedding, so it holds for every drafter.

    Raises:
        TargetError: something is not what it should be; the text says what.
    """
    if reason := INCONSISTENT.get(target.name):
        raise target.refusal(reason)
    ids = mx.array([[0, 1]])
    replayed = target.layers if any(map(recurrent, target.make_cache())) else []
    seen = {i: _Seen() for i in range(len(replayed))}
    with intercept([(target.layers[i], calls) for i, calls in seen.items()]):
        logits = target.model(ids, cache=None)
    for i, calls in seen.items():
        _check_repeats(target, i, calls)
    single = target.model(ids[:, :1], cache=None)
    if _distance(single[:, :1], logits[:, :1]) > _tolerance(logits):
        raise target.refusal("it computes a row differently when another follows")


def find_row_axes(target: TargetModel) -> RowAxes:
    """Which axes of what the layers are given are rows, from two forwards that are built and never computed.

    Raises:
        TargetError: a recurrent cache is given to no layer.
    """
    (two, owned), (three, _) = (_calls(target, n) for n in (2, 3))
    if missing := [i for i, cache in enumerate(target.make_cache()) if recurrent(cache) and i not in owned]:
        raise target.refusal(f"no layer is given its recurrent cache {missing[0]}, so it can't be replayed")
    return row_axes(two, three)


def check_replay(target: TargetModel, axes: RowAxes) -> None:
    """Check that layers with recurrent state run again on a part of a block as if they had seen no more.

    Raises:
        TargetError: a cache holds something else after a replay.
    """
    ours, clean, ids = target.make_cache(), target.make_cache(), [0, 1, 1, 0, 1, 0]
    rewinder = Rewinder(ours, target.layers, lambda: axes)
    target.forward(mx.array([ids[:2]]), ours)
    rewinder.mark(2, 4)
    logits, _ = target.forward(mx.array([ids[2:]]), ours, watch=rewinder.watch())
    rewinder.rewind(6, 4)
    target.forward(mx.array([ids[:2]]), clean)
    target.forward(mx.array([ids[2:4]]), clean, watch=())
    for i in rewinder.replayed:
        states = [_recurrent_state(caches[i]) for caches in (ours, clean)]
        if any(_distance(a, b) > _tolerance(logits) for a, b in zip(*states, strict=True)):
            raise target.refusal(f"its recurrent cache {i} holds something else after a replay")


def _calls(target: TargetModel, tokens: int) -> tuple[list[LayerCall], set[int]]:
    """The calls of the layers in a forward, and the caches that they are given."""
    fresh, calls = target.make_cache(), []
    owned: set[int] = set()

    def see(layer: int, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        calls.append(LayerCall(layer, own, args, kwargs))
        owned.update(receivers(fresh, (*args, *kwargs.values())))
        return own(*args, **kwargs)

    with intercept([(layer, partial(see, i)) for i, layer in enumerate(target.layers)]):
        target.model(mx.array([[1] * tokens]), cache=fresh)
    return calls, owned


def _recurrent_state(cache: Any) -> list[mx.array]:
    if type(cache) is CacheList:
        return [array for member in cache.caches for array in _recurrent_state(member)]
    return [array for array in cache.cache if array is not None] if recurrent(cache) else []


def check_taps(target: TargetModel, taps: Sequence[int]) -> float:
    """Check taps, head and embedding of a target.

    The output of a tapped layer must be what the next layer is called with, and what the layer returns when it is
    run by hand on the same inputs.

    Returns:
        The factor between the embedding table and layer 0.

    Raises:
        TargetError: something is not what it should be; the text says what.
    """
    ids = mx.array([[0, 1]])
    seen = {i: _Seen() for i in {0, *taps, *(i + 1 for i in taps if i + 1 < len(target.layers))}}
    normed: list[Any] = []

    def watch_inner(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        normed.append(own(*args, **kwargs))
        return normed[-1]

    with intercept([*((target.layers[i], calls) for i, calls in seen.items()), (target.inner, watch_inner)]):
        logits = target.model(ids, cache=None)
    for i in taps:
        _check_tap(target, i, seen)
    if not _equal(target.head(hidden(normed[0])), logits):
        raise target.refusal("its head could not be found")
    return _scale(target.embed_tokens(ids), seen[0].inputs[0], target.inner)


def _check_tap(target: TargetModel, i: int, seen: dict[int, _Seen]) -> None:
    calls = seen[i]
    if len(calls.outputs) != 1:
        raise target.refusal(f"layer {i} is called {len(calls.outputs)} times in a forward, so it has no one output")
    out = hidden(calls.outputs[0])
    if not isinstance(out, mx.array) or out.ndim != 3 or out.shape[-1] != target.hidden_size:
        shape = getattr(out, "shape", type(out).__name__)
        raise target.refusal(f"layer {i} returns {shape}, not one hidden state a token")
    _check_repeats(target, i, calls)
    if i + 1 in seen and not any(x.shape == out.shape and _equal(x, out) for call in seen[i + 1].inputs for x in call):
        raise target.refusal(f"the output of layer {i} is not what layer {i + 1} is given")


def _check_repeats(target: TargetModel, i: int, calls: _Seen) -> None:
    if calls.by_hand and not _equal(hidden(calls.outputs[0]), hidden(calls.by_hand[0])):
        raise target.refusal(f"layer {i} returns something else when it is run again")


def _tolerance(logits: mx.array) -> float:
    return 0.1 if logits.dtype != mx.float32 else 1e-2


def _equal(a: mx.array, b: mx.array) -> bool:
    return a.shape == b.shape and cast(bool, mx.array_equal(a, b, equal_nan=True).item())


def _distance(a: mx.array, b: mx.array) -> float:
    """Relative distance of two rows of logits; masked entries (-inf) count where they differ."""
    a, b = (mx.maximum(x.astype(mx.float32), -1e4) for x in (a, b))
    return cast(float, (mx.linalg.norm(a - b) / mx.maximum(mx.linalg.norm(b), 1e-6)).item())


def _scale(embedded: mx.array, entering: Sequence[mx.array], inner: nn.Module) -> float:
    """The factor between the embedding table and layer 0, 1.0 where there is none or it is no plain factor."""
    first = next((x for x in entering if x.shape == embedded.shape), None)
    if first is None or _equal(first, embedded):
        return 1.0
    a, b = embedded.astype(mx.float32), first.astype(mx.float32)
    factor = (a * b).sum() / (a * a).sum()
    plain_factor = mx.abs(b - a * factor).max() <= 0.02 * mx.abs(b).max()  # false for NaN too
    if not plain_factor.item():
        return 1.0
    # Bfloat16 tables give 11.9953 for 12; published factors have few digits.
    return float(getattr(inner, "embed_scale", None) or f"{cast(float, factor.item()):.3g}")
