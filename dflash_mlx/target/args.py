"""What an mlx-lm model says of itself. Knows no family by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlx import nn


def argument(model: nn.Module, name: str) -> Any:
    """The text model's argument of that name, None where it is not stated.

    Some models call their arguments `config`; a wrapper keeps those of its text model as a dict or as an object.
    """
    args = getattr(model, "args", None) or getattr(model, "config", None)
    for place in (getattr(args, "text_config", None), args):
        value = place.get(name) if isinstance(place, Mapping) else getattr(place, name, None)
        if value is not None:
            return value
    return None


def context_length(model: nn.Module) -> int | None:
    """The longest text that the model was made for, where it says so."""
    length = argument(model, "max_position_embeddings") or argument(model, "n_positions")
    return length if isinstance(length, int) else None
