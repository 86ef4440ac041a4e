"""A layer that runs again is given the rows that were kept, whatever else has as many."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx import nn
from tiny import make_hybrid

from dflash_mlx import TargetError
from dflash_mlx.target import Target, check
from dflash_mlx.target.replay import LayerCall, row_axes


def call(width, given):
    """A block of `width` behind 24 tokens: hidden states, then a mask of 16 heads, positions, scales, a table."""

    def own(*args, **kwargs):
        given.append([x.shape for x in (args[0], *args[1], kwargs["positions"], kwargs["table"])])

    mask = mx.zeros((1, 16, width, 24 + width))
    kwargs = {"positions": mx.zeros((3, 1, width)), "table": mx.zeros((16, 16)), "name": "causal"}
    return LayerCall(0, own, (mx.zeros((1, width, 16)), (mask, mx.zeros((1, 16)))), kwargs)


def test_rows_are_told_from_heads_of_the_same_number():
    given: list = []
    axes = row_axes([call(2, given)], [call(3, given)])
    call(16, given).replay(16, 5, axes)
    assert given == [[(1, 5, 16), (1, 16, 5, 29), (1, 16), (3, 1, 5), (16, 16)]]


def test_a_mask_that_a_short_text_needs_none_of():
    """Seen first when a window is full: its last two axes are rows and keys."""
    given: list = []
    late = LayerCall(0, lambda x, mask: given.append(mask.shape), (mx.zeros((1, 16, 8)), mx.zeros((1, 16, 16, 40))), {})
    late.replay(16, 5, {(0, 0): (1,)})
    assert given == [(1, 16, 5, 29)]


def test_a_replay_that_leaves_another_state_refuses_the_family(monkeypatch):
    model = make_hybrid("qwen3_5")
    monkeypatch.setattr(check, "row_axes", lambda two, three: dict.fromkeys(row_axes(two, three), ()))  # all rows again
    with pytest.raises(TargetError, match="recurrent cache 0 holds something else after a replay"):
        Target(model).check()


def test_an_argument_of_another_rank_has_no_axis_of_rows():
    two, three = ([LayerCall(0, print, (mx.zeros(shape),), {})] for shape in ((1, 2), (1, 1, 3)))
    assert row_axes(two, three) == {}


def test_a_layer_that_is_given_nothing_like_an_embedding_has_no_factor():
    assert check._scale(mx.ones((1, 2, 4)), [mx.ones((2, 4))], nn.Module()) == 1.0
