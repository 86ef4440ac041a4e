"""The DFlash draft as a drafter; nothing else of a round knows what a draft model is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..draft import DFlashDraftModel
from ..draft.model import Draw
from .drafter import Drafter, DraftRequest, Proposal

# Share of the target's sampling noise that the draft adds to its own logits (docs/experiments.md). With anything
# but 1 the tokens would not be drawn from `Proposal.scores`, which the rejection rule needs.
DRAFT_NOISE = 1.0


class DFlashDrafter:
    """A draft model, of DFlash or DFlash 2, behind the protocol."""

    def __init__(self, draft: DFlashDraftModel):
        self.draft = draft
        self.block_size = draft.config.widest_block
        self.target_layer_ids: Sequence[int] = draft.config.target_layer_ids
        self.taps_before_norm = draft.config.taps_before_norm

    @property
    def dtype(self) -> mx.Dtype:
        """What it computes in (norms are never quantised)."""
        return self.draft.norm.weight.dtype

    def make_cache(self, offset: int = 0) -> list[Any]:
        return self.draft.make_cache(offset)

    def context(self, taps: mx.array) -> mx.array:
        return self.draft.context_feature(taps)

    def extend(self, context: mx.array, cache: list[Any]) -> None:
        self.draft.extend(context, cache)

    def propose(self, request: DraftRequest) -> Proposal:
        context = request.context
        if context is None:
            context = mx.zeros((1, 0, self.draft.config.hidden_size), self.dtype)
        block = self.draft.block(request.anchor[None], request.width - 1)
        hidden = self.draft.hidden(block, context, request.cache, request.target.embed)
        return Proposal(*self.draft.pick(hidden, request.anchor, request.target.head, self._draw(request)))

    @staticmethod
    def _draw(request: DraftRequest) -> Draw | None:
        picker, noise = request.picker, request.noise
        if noise is None:
            return None
        return Draw(lambda logits: picker.scores(logits, noise.coin), picker.temp, DRAFT_NOISE * noise.gumbel)


def model_drafter(draft_model: Any) -> Drafter:
    """The drafter of a draft model; a drafter is its own. Raises `TypeError` for anything else."""
    if isinstance(draft_model, DFlashDraftModel):
        return DFlashDrafter(draft_model)
    if isinstance(draft_model, Drafter):
        return draft_model
    raise TypeError(
        f"draft_model is a {type(draft_model).__name__}, expected a DFlash draft (dflash_mlx.load_draft), "
        "an object with the Drafter protocol or 'lookup'"
    )
