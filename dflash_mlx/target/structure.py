"""Where a model keeps its parts, found by structure: paths of modules and who is called with the token ids.

Knows mlx modules, no family by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx import nn

from .intercept import intercept


def find_inner(model: nn.Module, layers: Sequence[nn.Module]) -> nn.Module | None:
    """The innermost module that holds the decoder layers and a token embedding beside them.

    Its output is the normed hidden state that the head reads.
    """
    modules, path = dict(model.named_modules()), _path(model, layers)
    while path is not None:
        if path in modules and _embeddings(model, path, layers):
            return modules[path]
        path = path.rpartition(".")[0] if path else None
    return None


def find_embedding(model: nn.Module, inner: nn.Module, layers: Sequence[nn.Module]) -> nn.Module | None:
    """The embedding that is called with the token ids (others may hold positions); nothing is evaluated."""
    path = next(name for name, module in model.named_modules() if module is inner)
    candidates = _embeddings(model, path, layers)
    if len(candidates) < 2:
        return candidates[0] if candidates else None
    ids, called = mx.array([[0, 1]]), []

    def see(own: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        called.append((own.args[0], x))
        return own(x, *args, **kwargs)

    with intercept([(module, see) for module in candidates]):
        model(ids, cache=None)
    return next((module for module, x in called if x is ids), candidates[0])


def array_arguments(args: Sequence[Any], kwargs: dict[str, Any]) -> list[mx.array]:
    """The arrays among the arguments of a call, in order."""
    return [value for value in (*args, *kwargs.values()) if isinstance(value, mx.array)]


def _path(model: nn.Module, layers: Sequence[nn.Module]) -> str | None:
    """Path of the last layer."""
    return next((name for name, module in model.named_modules() if layers and module is layers[-1]), None)


def _embeddings(model: nn.Module, below: str, layers: Sequence[nn.Module]) -> list[nn.Module]:
    """Embedding tables below a path and outside the layers."""
    inside = [name for name, module in model.named_modules() if any(module is layer for layer in layers)]
    prefix = f"{below}." if below else ""
    return [
        module
        for name, module in model.named_modules()
        if name.startswith(prefix)
        and hasattr(module, "as_linear")
        and not any(name.startswith(f"{layer}.") for layer in inside)
    ]
