"""A heavier target that computes the same: wider MLPs whose new rows and columns are zero.

For measuring a tiny pair's real acceptance at a real model's cost. The new columns of `down_proj` are zero, so
whatever the new units hold adds nothing. Knows mlx-lm's dense layers, no draft.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
from mlx import nn

from ..errors import TargetError
from ..target import Target

# projection -> the axis of its weight `[out, in]` that runs over the MLP's units
UNITS = {"gate_proj": 0, "up_proj": 0, "down_proj": 1}


def widen(model: nn.Module, width: int) -> None:
    """Give every MLP `width` units; the model's function stays as it is.

    Works on models whose layers all have a gated `mlp` of three plain `nn.Linear`, as Llama, Qwen and Mistral.

    Raises:
        TargetError: the layers are of another kind, are quantised, or are wider already; nothing is changed then.
    """
    target = Target(model)
    if not target.layers:
        raise TargetError(f"{target.name}: --heavy found no layers")
    mlps = [_mlp(target, i, layer, width) for i, layer in enumerate(target.layers)]
    for mlp in mlps:
        for name, axis in UNITS.items():
            linear = mlp[name]
            linear.weight = _padded(linear.weight, axis, width)
            if "bias" in linear and axis == 0:
                linear.bias = _padded(linear.bias, 0, width)
            mx.eval(linear.parameters())


def widened_config(config: Mapping[str, Any], width: int) -> dict[str, Any]:
    """A target's `config.json` for the widened weights."""
    return {**config, "intermediate_size": width}


def _mlp(target: Target, index: int, layer: nn.Module, width: int) -> dict[str, nn.Linear]:
    mlp: Any = getattr(layer, "mlp", None)
    found: dict[str, Any] = {name: getattr(mlp, name, None) for name in UNITS}
    for name, linear in found.items():
        if type(linear) is not nn.Linear:
            kind = "missing" if linear is None else f"a {type(linear).__name__}"
            raise TargetError(
                f"{target.name}: --heavy needs dense, unquantised layers with an mlp of {', '.join(UNITS)}; "
                f"layer {index}: {name} is {kind}"
            )
    if others := set(dict(mlp.named_modules())) - {"", *UNITS}:
        raise TargetError(f"{target.name}: --heavy: the mlp of layer {index} also holds {', '.join(sorted(others))}")
    units = found["down_proj"].weight.shape[1]
    if units > width:
        raise TargetError(f"{target.name}: --heavy {width} is less than the {units} units that layer {index} has")
    return found


def _padded(array: mx.array, axis: int, width: int) -> mx.array:
    pads = [(0, 0)] * array.ndim
    pads[axis] = (0, width - array.shape[axis])
    return mx.pad(array, pads)
