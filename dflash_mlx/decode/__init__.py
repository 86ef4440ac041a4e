"""Rounds of draft, verify and rewind, and the text that comes out of them."""

from .dflash import DFlashDrafter
from .drafter import Drafter, DraftRequest, Proposal
from .lookup import PromptLookup, as_drafter
from .stats import GenerationStats

__all__ = ["DFlashDrafter", "DraftRequest", "Drafter", "GenerationStats", "PromptLookup", "Proposal", "as_drafter"]
