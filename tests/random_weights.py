"""Reproducible random weights for tiny mlx-lm models of any family.

Every value depends only on (seed, parameter path, shape): not on build order, the global generator or other
parameters. Float parameters become float32.
"""

from __future__ import annotations

import math
import re
import zlib

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten

# The norm before the head. Its weight gets spread 1, else a tied head with a large embedding
# scale repeats the last token for ever.
FINAL_NORM = re.compile(
    r"(^|\.)(norm|norm_f|ln_f|final_norm|final_layernorm|final_layer_norm|output_norm|out_norm"
    r"|embedding_norm|norm_out)\.weight$"
)


def _key(seed: int, name: str) -> mx.array:
    return mx.random.key(zlib.crc32(f"{seed}:{name}".encode()))


def _value(seed: int, name: str, p: mx.array) -> mx.array:
    leaf = name.rsplit(".", 1)[-1]
    key = _key(seed, name)
    if p.dtype == mx.uint8 and leaf == "weight":  # BitLinear: 4 ternary codes per byte
        codes = mx.random.randint(0, 3, (4, *p.shape), key=key)
        shifts = mx.array([1, 4, 16, 64]).reshape(4, *([1] * p.ndim))
        return (codes * shifts).sum(0).astype(mx.uint8)
    if p.dtype == mx.uint32 and leaf == "weight":  # packed quantised weights
        shifts = mx.array([1, 1 << 8, 1 << 16, 1 << 24], dtype=mx.uint32).reshape(4, *([1] * p.ndim))
        return (mx.random.randint(0, 256, (4, *p.shape), key=key).astype(mx.uint32) * shifts).sum(0)
    if not mx.issubdtype(p.dtype, mx.floating):
        return p
    shape = p.shape
    if p.ndim == 0 and not leaf.startswith("quant_"):  # XieLU's alpha, beta, eps ...
        return p
    n = mx.random.normal(shape, key=key)
    if leaf == "A_log":
        return mx.log(mx.random.uniform(1.0, 8.0, shape, key=key))
    if leaf == "dt_bias":
        return 0.5 * n
    if leaf == "D":
        return 1.0 + 0.1 * n
    if leaf == "weight_scale":  # BitLinear
        return mx.full(shape, 0.2)
    if leaf in ("quant_key_scale", "quant_value_scale"):  # afm7: 8-bit K/V grid
        return mx.full(shape, 1 / 16)
    if leaf in ("scales", "biases") and p.ndim == 2:  # prism_hadamard_qwen35: 2 bits, groups of 128
        return mx.full(shape, (1.2 if leaf == "scales" else -1.8) * (128 * shape[-1]) ** -0.5)
    if leaf == "signs":  # prism_hadamard_qwen35
        return mx.where(n < 0, -1.0, 1.0)
    if leaf == "recurrent_param":  # recurrent_gemma: a decay near 0.8
        return -3.0 + 0.5 * n
    if leaf == "sinks":
        return n
    if leaf.endswith("bias"):  # also e_score_correction_bias, expert_bias
        return 0.1 * n
    if p.ndim >= 2:
        # Conv weights are [out, k, in / groups]; everything else has its inputs last.
        fan = math.prod(shape[1:]) if "conv" in name and p.ndim == 3 else shape[-1]
        return n * (1.5 * fan**-0.5)
    # Norm weights and other vectors: around their initial constant (0 for "1 + w" norms).
    lo, hi = (p.min().item(), p.max().item()) if p.size else (0.0, 0.0)
    const = lo if lo == hi else 0.0
    if FINAL_NORM.search(name) and not re.search(r"\.\d+\.", name):
        return const - 1.0 + n
    return const + 0.1 * n


def randomise(model: nn.Module, seed: int = 0) -> nn.Module:
    """Overwrite every parameter of `model`, switch it to eval mode and return it."""
    new = [
        (name, _value(seed, name, p).astype(mx.float32 if mx.issubdtype(p.dtype, mx.floating) else p.dtype))
        for name, p in tree_flatten(model.parameters())
    ]
    model.update(tree_unflatten(new))
    model.eval()
    mx.eval(model.parameters())
    return model


def slow(model: nn.Module) -> nn.Module:
    """Let recurrent state fade slowly and convolutions weigh much, so that what should not be in there shows."""
    new = []
    for name, p in tree_flatten(model.parameters()):
        leaf = name.rsplit(".", 1)[-1]
        if leaf == "A_log":
            p = p - 4.0  # decays near 0.97 where they were near 0.1
        elif leaf == "recurrent_param":
            p = p - 3.0
        elif "w_lora" in name:
            p = 0.1 * p - (3.0 if leaf == "bias" else 0.0)
        elif "conv" in name and p.ndim >= 2 and "_proj" not in name:
            p = 2.0 * p
        new.append((name, p))
    model.update(tree_unflatten(new))
    mx.eval(model.parameters())
    return model
