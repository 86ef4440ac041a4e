"""Scripted draft: proposes the target's own continuation, with errors where the test wants them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step as plain_step

from dflash_mlx.decode import DraftRequest, Proposal


def plain_tokens(model: Any, prompt: Sequence[int], n: int, **options: Any) -> list[int]:
    """The oracle: mlx-lm's own plain decoding."""
    return [token for token, _ in plain_step(mx.array(prompt), model, max_tokens=n, **options)]


class ScriptedDrafter:
    """Right for `right(round)` tokens of every block, then wrong.

    Args:
        script: prompt and continuation, so that `script[i]` is the token at absolute position i.
    """

    target_layer_ids: Sequence[int] = ()

    def __init__(self, script: Sequence[int], right: Callable[[int], int], block_size: int = 8, vocab: int = 256):
        self.script, self.right, self.block_size, self.vocab = list(script), right, block_size, vocab
        self.rounds = 0
        self.log: list[str] = []

    def make_cache(self, offset: int = 0) -> list[Any]:
        return []

    def context(self, taps: mx.array) -> mx.array:
        raise AssertionError("no taps were asked for")

    def extend(self, context: mx.array, cache: list[Any]) -> None:
        raise AssertionError("no taps were asked for")

    def propose(self, request: DraftRequest) -> Proposal:
        self.log.append("draft")
        position = len(request.tokens)  # of the first proposal
        truth = self.script[position : position + request.width - 1]
        truth += [0] * (request.width - 1 - len(truth))
        keep = self.right(self.rounds)
        self.rounds += 1
        tokens = [t if i < keep else (t + 1) % self.vocab for i, t in enumerate(truth)]
        return Proposal(mx.array(tokens, mx.int32))
