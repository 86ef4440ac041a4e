"""Drafter: the one interface through which proposals enter a round.

Whatever has these few members can stand in for `draft_model`: the DFlash draft, a scripted one in a
test, a prompt lookup. A drafter can only change the speed: its tokens count while they equal the target's
own pick and are dropped from the first that does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import mlx.core as mx

from ..target import Target
from .sampling import Noise, TokenPicker


@dataclass(frozen=True)
class DraftRequest:
    """What one block may be proposed from.

    Attributes:
        anchor: `[1]`, the last emitted token, slot 0 of the block.
        width: slots of the block; `width - 1` proposals are wanted.
        tokens: prompt and emitted tokens up to and including the anchor (read only).
        context: what `Drafter.context` made of the tokens before the anchor that `cache` has not seen,
            `[1, S, ...]`, or None.
        cache: the drafter's own cache.
        target: gives `embed` and `head`.
        picker: how the target picks; noise: what to pick the proposals with, None for the argmax.
    """

    anchor: mx.array
    width: int
    tokens: Sequence[int]
    context: mx.array | None
    cache: list[Any]
    target: Target
    picker: TokenPicker = field(default_factory=TokenPicker)
    noise: Noise | None = None


@dataclass(frozen=True)
class Proposal:
    """What was proposed.

    Attributes:
        tokens: `[width - 1]`.
        finite: whether they rest on finite numbers (scalar bool), None: surely.
        scores: `[width - 1, V]` whose softmax the tokens were drawn from, None if they were not drawn. Only the
            rejection rule looks at it.
        lookup: whether they were copied from the text.
    """

    tokens: mx.array
    finite: mx.array | None = None
    scores: mx.array | None = None
    lookup: bool = False


@runtime_checkable
class Drafter(Protocol):
    """Proposes the tokens of a block.

    One that proposes from the tokens alone has a further method, `offer(tokens, start, cache) -> int | None`. It is
    asked before each round and told all tokens since absolute position `start`, the last of them perhaps not yet
    known; the request of that round then has no context, which is kept for later. Returns how many tokens `propose`
    will give (0: the round is plain), or None to be asked like any other.

    Attributes:
        block_size: widest useful block, anchor included.
        target_layer_ids: taps it wants from the target, in this order; may be empty. The last layer's comes normed,
            as in transformers' hidden states, unless a further attribute `taps_before_norm` is true.
    """

    block_size: int
    target_layer_ids: Sequence[int]

    def make_cache(self, offset: int = 0) -> list[Any]:
        """A fresh cache (mlx-lm's protocol, may be an empty list) that starts at an absolute position."""

    def context(self, taps: mx.array) -> mx.array:
        """Turn taps `[1, S, taps * Ht]` into context rows `[1, S, ...]`; called only if taps are wanted."""

    def extend(self, context: mx.array, cache: list[Any]) -> None:
        """Take context rows into the cache without drafting."""

    def propose(self, request: DraftRequest) -> Proposal:
        """Build the proposals; lazy, nothing may wait for the device."""
