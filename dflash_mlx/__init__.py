"""DFlash speculative decoding for any mlx-lm model, in pure MLX.

The public names load on first use, so that importing the package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import GenerationResponse, generate, generate_step, stream_generate
    from .convert import convert_draft, inspect_draft
    from .decode import Drafter, DraftRequest, GenerationStats, PromptLookup, Proposal
    from .errors import DFlashError, DraftError, TargetError
    from .loading import load, load_draft
    from .prompt_cache import PromptCache, load_prompt_cache, save_prompt_cache

__version__ = "0.1.0"

_HOME = {
    "convert_draft": "convert",
    "inspect_draft": "convert",
    "Drafter": "decode",
    "DraftRequest": "decode",
    "GenerationStats": "decode",
    "PromptLookup": "decode",
    "Proposal": "decode",
    "DFlashError": "errors",
    "DraftError": "errors",
    "TargetError": "errors",
    "GenerationResponse": "api",
    "generate": "api",
    "generate_step": "api",
    "stream_generate": "api",
    "load": "loading",
    "load_draft": "loading",
    "PromptCache": "prompt_cache",
    "load_prompt_cache": "prompt_cache",
    "save_prompt_cache": "prompt_cache",
}

__all__ = [
    "DFlashError",
    "DraftError",
    "DraftRequest",
    "Drafter",
    "GenerationResponse",
    "GenerationStats",
    "PromptCache",
    "PromptLookup",
    "Proposal",
    "TargetError",
    "convert_draft",
    "generate",
    "generate_step",
    "inspect_draft",
    "load",
    "load_draft",
    "load_prompt_cache",
    "save_prompt_cache",
    "stream_generate",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
