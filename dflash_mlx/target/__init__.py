"""Everything that touches an mlx-lm model: taps, head, embedding, rewind. Knows nothing of any draft."""

from .rewind import Rewinder
from .target import Target

__all__ = ["Rewinder", "Target"]
