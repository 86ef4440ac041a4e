"""Where a model keeps its parts, found by structure: paths of modules and who is called with the token ids.

Knows mlx modules, no family by name. Looked for at every call, so that nothing found can be out of date: the search
does not enter the decoder layers, and what is left is a dozen modules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
from mlx import nn

from .intercept import intercept


def find_inner(model: nn.Module, layers: Sequence[nn.Module]) -> nn.Module | None:
    """The innermost module that holds the decoder layers and a token embedding beside them.

    Its output is the normed hidden state that the head reads.
    """
    modules = dict(named_modules(model, layers))
    path = next((name for name, module in modules.items() if layers and module is layers[-1]), None)
    while path is not None:
        if path in modules and _embeddings(modules, path):
            return modules[path]
        path = path.rpartition(".")[0] if path else None
    return None


def find_embedding(model: nn.Module, inner: nn.Module, layers: Sequence[nn.Module]) -> nn.Module | None:
    """The embedding that is called with the token ids (others may hold positions); nothing is evaluated."""
    modules = dict(named_modules(model, layers))
    candidates = _embeddings(modules, next(name for name, module in modules.items() if module is inner))
    if len(candidates) < 2:
        return candidates[0] if candidates else None
    ids, called = mx.array([[0, 1]]), []

    def see(own: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        called.append((own.args[0], x))
        return own(x, *args, **kwargs)

    with intercept([(module, see) for module in candidates]):
        model(ids, cache=None)
    return next((module for module, x in called if x is ids), candidates[0])


def find_final_norm(model: nn.Module, inner: nn.Module, layers: Sequence[nn.Module]) -> nn.Module | None:
    """The module whose output is the normed output of the last layer.

    That is `inner`, or the norm that is given the last layer's output where `inner` ends before it or goes on to the
    head. A forward of two tokens shows it.
    """
    outside = [module for _, module in named_modules(model, layers) if not any(module is layer for layer in layers)]
    norms = [module for module in outside if "norm" in type(module).__name__.lower()]
    calls: dict[int, tuple[list[mx.array], Any]] = {}

    def see(own: Any, *args: Any, **kwargs: Any) -> Any:
        out = own(*args, **kwargs)
        calls[id(own.args[0])] = array_arguments(args, kwargs), out[0] if isinstance(out, tuple) else out
        return out

    with intercept([(module, see) for module in (layers[-1], inner, *norms)]):
        model(mx.array([[0, 1]]), cache=None)
    last = calls[id(layers[-1])][1]

    def same(x: Any) -> bool:
        return x.shape == last.shape and bool(mx.array_equal(x, last, equal_nan=True).item())

    if (normed := calls[id(inner)][1]).shape == last.shape and not same(normed):
        return inner
    return next((norm for norm in norms if id(norm) in calls and any(map(same, calls[id(norm)][0]))), None)


def named_modules(model: nn.Module, closed: Sequence[nn.Module] = ()) -> Iterator[tuple[str, nn.Module]]:
    """All modules with their paths, but nothing inside those that are `closed`.

    mlx's own walk maps every array on its way, which takes milliseconds on a deep model.
    """
    shut = {id(module) for module in closed}
    waiting: list[tuple[str, Any]] = [("", model)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, nn.Module):
            yield path, value
            if id(value) in shut:
                continue
        members = value.items() if isinstance(value, dict) else enumerate(value)
        prefix = f"{path}." if path else ""
        waiting += [(f"{prefix}{name}", member) for name, member in members if isinstance(member, (dict, list))]


def members(module: nn.Module) -> list[nn.Module]:
    """The modules directly in a module, or in a list of it."""
    values = [part for value in module.values() for part in (value if isinstance(value, list) else [value])]
    return [value for value in values if isinstance(value, nn.Module)]


def array_arguments(args: Sequence[Any], kwargs: dict[str, Any]) -> list[mx.array]:
    """The arrays among the arguments of a call, in order."""
    return [value for value in (*args, *kwargs.values()) if isinstance(value, mx.array)]


def _embeddings(modules: dict[str, nn.Module], below: str) -> list[nn.Module]:
    """Embedding tables below a path."""
    prefix = f"{below}." if below else ""
    return [module for name, module in modules.items() if name.startswith(prefix) and hasattr(module, "as_linear")]
