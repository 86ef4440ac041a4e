"""Rotary embeddings of a draft, by mlx-lm's rope."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.rope_utils import initialize_rope

ORIGINAL = "original_max_position_embeddings"  # the length that was trained without scaling


@dataclass(frozen=True)
class Rope:
    """One rotary embedding: base, transformers' scaling section or None, and the share of a head that is rotated."""

    theta: float
    scaling: dict[str, Any] | None = None
    partial: float = 1.0

    def build(self, head_dim: int, max_positions: int | None, neox: bool = True) -> nn.Module:
        """The module; `neox` rotates halves of a head, else neighbours."""
        scaling = dict(self.scaling or {})
        truncate = scaling.pop("truncate", True)
        if (stated := scaling.pop("attention_factor", None)) is not None:  # mlx-lm's is 0.1 mscale ln(factor) + 1
            scaling["mscale"] = (stated - 1) / (0.1 * math.log(scaling["factor"]))
        size = int(head_dim * self.partial)
        rope = initialize_rope(
            size,
            base=self.theta,
            traditional=not neox,
            scaling_config=scaling or None,
            max_position_embeddings=max_positions,
        )
        if not truncate:  # mlx-lm always does
            rope._freqs = _exact_yarn(size, self.theta, scaling)
        return rope

    def to_dict(self) -> dict[str, Any]:
        """As a section of its own (`swa_rope_parameters`)."""
        scaling = self.scaling or {"rope_type": "default"}
        return {"rope_theta": self.theta, **scaling, "partial_rotary_factor": self.partial}


def _exact_yarn(size: int, base: float, scaling: dict[str, Any]) -> mx.array:
    """Wavelengths `[size / 2]` of a yarn whose correction range is not rounded to whole dimensions.

    From transformers' `_compute_yarn_parameters` with `truncate: false`, as gpt-oss has it.
    """

    def dimension(rotations: float) -> float:
        return size * math.log(scaling[ORIGINAL] / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = max(dimension(scaling.get("beta_fast") or 32), 0)
    high = min(dimension(scaling.get("beta_slow") or 1), size - 1)
    ramp = (mx.arange(size // 2, dtype=mx.float32) - low) / (high - low or 0.001)
    interpolated = mx.clip(ramp, 0, 1)
    waves = base ** (mx.arange(0, size, 2, dtype=mx.float32) / size)
    return waves / (interpolated / scaling["factor"] + 1 - interpolated)
