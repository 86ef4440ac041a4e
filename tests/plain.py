"""One block of a draft in plain numpy, float64: no cache, no fused call, every rule written out from its source.

Independent of `dflash_mlx`: whatever a layout adds is an argument here, so a wrong option in the model can't hide.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

Arrays = Mapping[str, np.ndarray]

# What z-lab's v1 draft of the tests is; a case changes some.
V1: dict[str, Any] = {
    "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "eps": 1e-6, "theta": (10000.0, 10000.0),
    "partial": (1.0, 1.0), "neox": True, "windows": (None, None), "causal": (False, False), "value_scale": 1.0,
    "gate": None, "context_norm": False, "from_anchor": False, "mask": 255, "scale": 1.0, "multiplier": 1.0,
    "cap": None, "vocab": 256,
}  # fmt: skip


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def rotated(x: np.ndarray, positions: np.ndarray, theta: float, partial: float, neox: bool) -> np.ndarray:
    """Rope on the first `partial` of each head; `x` `[rows, heads, head_dim]`."""
    size = int(x.shape[-1] * partial)
    angles = positions[:, None, None] * theta ** (-np.arange(0, size, 2) / size)
    cos, sin = np.cos(angles), np.sin(angles)
    turned, rest = x[..., :size], x[..., size:]
    if neox:
        one, two = turned[..., : size // 2], turned[..., size // 2 :]
        out = np.concatenate([one * cos - two * sin, two * cos + one * sin], -1)
    else:
        one, two = turned[..., ::2], turned[..., 1::2]
        out = np.stack([one * cos - two * sin, two * cos + one * sin], -1).reshape(turned.shape)
    return np.concatenate([out, rest], -1)


def visible(query: np.ndarray, key: np.ndarray, window: int | None, causal: bool) -> np.ndarray:
    distance = query[:, None] - key[None]
    seen = distance >= 0 if causal else np.ones(distance.shape, bool)
    if window is not None:
        seen &= (distance < window) if causal else (np.abs(distance) < window)
    return seen


def block_logits(weights: Arrays, ids: np.ndarray, taps: np.ndarray, table: np.ndarray, **changes: Any) -> np.ndarray:
    """Logits `[proposals, vocab]`: `ids` `[L]`, `taps` `[S, taps * Ht]` of the positions before, `table` `[V, H]` the
    target's tied embedding. `weights` are named as z-lab does."""
    say = {**V1, **changes}
    w = {name: value.astype(np.float64) for name, value in weights.items()}
    eps, heads, kv_heads, dim = say["eps"], say["heads"], say["kv_heads"], say["head_dim"]
    if norms := [w[name] for name in sorted(w) if name.startswith("aux_hidden_norms.")]:
        parts = np.split(taps, len(norms), -1)
        taps = np.concatenate([rms_norm(part, norm, eps) for part, norm in zip(parts, norms, strict=True)], -1)
    context = rms_norm(taps @ w["fc.weight"].T, w["hidden_norm.weight"], eps)
    h = w.get("embed_tokens.weight", table)[ids] * say["scale"]
    if "mask_embedding" in w:
        h = np.where((ids == say["mask"])[:, None], w["mask_embedding"], h)
    before, length = len(context), len(ids)
    key_at, query_at = np.arange(before + length), np.arange(before, before + length)

    def linear(x: np.ndarray, path: str) -> np.ndarray:
        return x @ w[f"{path}.weight"].T + w.get(f"{path}.bias", 0.0)

    for i in range(say["layers"]):
        path = f"layers.{i}."
        attention = f"{path}self_attn."
        x = rms_norm(h, w[f"{path}input_layernorm.weight"], eps)
        mine = rms_norm(context, w[f"{path}input_layernorm.weight"], eps) if say["context_norm"] else context
        rows = np.concatenate([mine, x])
        q = linear(x, f"{attention}q_proj").reshape(length, heads, dim)
        k = linear(rows, f"{attention}k_proj").reshape(-1, kv_heads, dim)
        v = linear(rows, f"{attention}v_proj").reshape(-1, kv_heads, dim) * say["value_scale"]
        if f"{attention}q_norm.weight" in w:
            q, k = (rms_norm(a, w[f"{attention}{n}_norm.weight"], eps) for a, n in ((q, "q"), (k, "k")))
        rope = (say["theta"][i], say["partial"][i], say["neox"])
        q, k = rotated(q, query_at, *rope), rotated(k, key_at, *rope)
        k, v = (np.repeat(a, heads // kv_heads, axis=1) for a in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) * dim**-0.5
        scores = np.where(visible(query_at, key_at, say["windows"][i], say["causal"][i]), scores, -np.inf)
        sink = w.get(f"{attention}attention_sink_bias")
        top = scores.max(-1, keepdims=True)
        weight = np.exp(scores - top)
        total = weight.sum(-1, keepdims=True) + (0 if sink is None else np.exp(sink[:, None, None] - top))
        out = np.einsum("hqk,khd->qhd", weight / total, v)
        if say["gate"]:
            gate = linear(x, f"{attention}g_proj")
            gate = np.log1p(np.exp(gate)) if say["gate"] == "softplus" else 1 / (1 + np.exp(-gate))
            out = out * gate.reshape(length, heads, -1)
        h = h + linear(out.reshape(length, -1), f"{attention}o_proj")
        x = rms_norm(h, w[f"{path}post_attention_layernorm.weight"], eps)
        gate = linear(x, f"{path}mlp.gate_proj")
        h = h + linear(gate / (1 + np.exp(-gate)) * linear(x, f"{path}mlp.up_proj"), f"{path}mlp.down_proj")
    h = rms_norm(h, w["norm.weight"], eps)[0 if say["from_anchor"] else 1 :]
    logits = h @ w.get("lm_head.weight", table).T * say["multiplier"]
    if say["cap"]:
        logits = np.tanh(logits / say["cap"]) * say["cap"]
    if "d2t" in weights:
        everything = np.full((len(logits), say["vocab"]), -np.inf)
        everything[:, np.arange(len(weights["d2t"])) + weights["d2t"]] = logits
        return everything
    return logits
