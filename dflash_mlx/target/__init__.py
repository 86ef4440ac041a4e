"""Everything that touches an mlx-lm model: taps, head, embedding, rewind. Knows nothing of any draft."""

from .rewind import rewind
from .target import Target

__all__ = ["Target", "rewind"]
