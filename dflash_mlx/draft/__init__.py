"""The draft model alone. Knows no file and no target."""

from .attention import DFlashAttention
from .cache import DraftKVCache
from .config import DraftConfig
from .dflash2 import DFlash2DraftModel
from .model import DFlashDecoderLayer, DFlashDraftModel, build_target_layer_ids, extract_context_feature

__all__ = [
    "DFlash2DraftModel",
    "DFlashAttention",
    "DFlashDecoderLayer",
    "DFlashDraftModel",
    "DraftConfig",
    "DraftKVCache",
    "build_target_layer_ids",
    "extract_context_feature",
]
