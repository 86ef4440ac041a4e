"""Rounds of draft, verify and rewind, and the text that comes out of them."""

from .drafter import DFlashDrafter, Drafter, DraftRequest, Proposal, as_drafter
from .stats import GenerationStats

__all__ = ["DFlashDrafter", "DraftRequest", "Drafter", "GenerationStats", "Proposal", "as_drafter"]
