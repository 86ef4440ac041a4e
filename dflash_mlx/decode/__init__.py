"""Rounds of draft, verify and rewind, and the text that comes out of them."""

from .drafter import DFlashDrafter, Drafter, DraftRequest, Proposal, as_drafter
from .lookup import PromptLookup
from .stats import GenerationStats

__all__ = ["DFlashDrafter", "DraftRequest", "Drafter", "GenerationStats", "PromptLookup", "Proposal", "as_drafter"]
