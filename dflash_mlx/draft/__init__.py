"""The draft model. Knows nothing of any target."""

from .attention import DFlashAttention
from .cache import DraftKVCache
from .config import DraftConfig
from .model import DFlashDecoderLayer, DFlashDraftModel, build_target_layer_ids, extract_context_feature

__all__ = [
    "DFlashAttention",
    "DFlashDecoderLayer",
    "DFlashDraftModel",
    "DraftConfig",
    "DraftKVCache",
    "build_target_layer_ids",
    "extract_context_feature",
]
