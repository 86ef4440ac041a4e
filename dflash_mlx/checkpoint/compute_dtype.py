"""Which dtype a draft computes in: that of its file, but for chips that only emulate bfloat16.

float16 is never chosen for a draft of another dtype: its range ends at 65504, drafts exceed it, and then no token is
accepted and nothing says why. Knows chips and dtypes; knows no tensor.
"""

from __future__ import annotations

import re

import mlx.core as mx

# Before M3, bfloat16 is emulated. Measured by others on an M1 Max with a 4-bit draft (tokens/s, plain decoding 18.5):
# 8.2 with float16 activations, 23.3 with an unquantised draft in bfloat16, 27.1 with 4 bits and float32.
EMULATES_BFLOAT16 = re.compile(r"Apple M[12]\b")


def compute_dtype(
    stored: mx.Dtype, quantized: bool, wanted: mx.Dtype | None = None, chip: str | None = None
) -> tuple[mx.Dtype, str | None]:
    """The dtype for what is not quantised, and a line for the user where that is not the file's.

    Args:
        stored: dtype of the file's norms and scales.
        quantized: whether its matrices are quantised.
        wanted: what the user asked for; it is taken.
        chip: as `mx.device_info` names it, None for this machine's.
    """
    if wanted is not None:
        return wanted, None
    chip = str(mx.device_info().get("device_name", "")) if chip is None else chip
    if quantized and stored == mx.bfloat16 and EMULATES_BFLOAT16.match(chip):
        return mx.float32, f"{chip} emulates bfloat16: the draft computes in float32; draft_dtype overrides it"
    return stored, None
