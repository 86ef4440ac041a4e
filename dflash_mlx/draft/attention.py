"""DFlashAttention: a block of tokens attends to the target's context feature and to itself.

The three essentials of the method: keys and values come from context and block through the same
projections, in one matmul; RoPE runs over the full window, context rows at their own positions and block
rows right after; and the block is not causal, every token of it sees all context and the whole block
(sliding layers are causal unless the checkpoint says otherwise). Knows no target.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
from mlx import nn

from .cache import DraftKVCache
from .config import PER_HEAD, DraftConfig

Mask = mx.array | str | None
AttentionFunction = Callable[[mx.array, mx.array, mx.array, float, Mask, "mx.array | None"], mx.array]
GATES: dict[str, Callable[[mx.array], mx.array]] = {"softplus": nn.softplus, "sigmoid": mx.sigmoid}


def eager_attention(
    q: mx.array, k: mx.array, v: mx.array, scale: float, mask: Mask, sinks: mx.array | None = None
) -> mx.array:
    """Plain matmul and float32 softmax, to debug and to compare with PyTorch.

    Shapes: q `[B, nh, L, hd]`, k and v `[B, n_kv, S, hd]`, mask boolean `[L, S]`, "causal" or None; sinks `[nh]`,
    scores of a row that every query sees and that has no value.
    """
    groups = q.shape[1] // k.shape[1]
    k, v = mx.repeat(k, groups, axis=1), mx.repeat(v, groups, axis=1)
    scores = (q * scale) @ k.swapaxes(-1, -2)  # [B, nh, L, S]
    if isinstance(mask, str):
        mask = visible_rows(q.shape[2], k.shape[2], None, causal=True)
    if mask is not None:
        scores = mx.where(mask, scores, mx.finfo(scores.dtype).min)
    if sinks is not None:
        sink = mx.broadcast_to(sinks.astype(scores.dtype)[:, None, None], (*scores.shape[:3], 1))
        return mx.softmax(mx.concatenate([scores, sink], axis=-1), axis=-1, precise=True)[..., :-1] @ v
    return mx.softmax(scores, axis=-1, precise=True) @ v


def sdpa_attention(
    q: mx.array, k: mx.array, v: mx.array, scale: float, mask: Mask, sinks: mx.array | None = None
) -> mx.array:
    """MLX's fused attention; same shapes as `eager_attention`."""
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask, sinks=sinks)


ATTENTION_FUNCTIONS: dict[str, AttentionFunction] = {"eager": eager_attention, "sdpa": sdpa_attention}


def visible_rows(block: int, keys: int, window: int | None, causal: bool) -> mx.array:
    """Boolean mask `[block, keys]`: the block is the last rows of the keys; windows count both ways."""
    query = mx.arange(keys - block, keys)[:, None]
    key = mx.arange(keys)[None]
    mask = key <= query if causal else mx.ones((block, keys), dtype=mx.bool_)
    if window is not None:
        mask = mask & (query - key < window)
        if not causal:
            mask = mask & (key - query < window)
    return mask


class DFlashAttention(nn.Module):
    """Dual-stream attention with QK-RMSNorm per head and GQA (z-lab's `Qwen3DFlashAttention`).

    What other layouts add: biases or no QK norm (Llama, gpt-oss), an attention sink and scaled values (MiMo), a gate on
    the output (Laguna, Qwen3.5).
    """

    def __init__(self, config: DraftConfig, layer: int, attn_implementation: str = "sdpa"):
        super().__init__()
        hidden, head_dim, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.n_heads = config.num_attention_heads
        self.n_kv_heads = config.num_key_value_heads
        self.head_dim = head_dim
        self.scale = head_dim**-0.5
        self.window = config.window(layer)
        self.is_causal = config.causal(layer)
        self.attend = ATTENTION_FUNCTIONS[attn_implementation]
        self.value_scale = config.attention_value_scale
        self.q_proj = nn.Linear(hidden, self.n_heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden, self.n_kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden, self.n_kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(self.n_heads * head_dim, hidden, bias=config.attention_output_bias)
        if config.qk_norm:
            self.q_norm = nn.RMSNorm(head_dim, eps=config.rms_norm_eps)
            self.k_norm = nn.RMSNorm(head_dim, eps=config.rms_norm_eps)
        if layer in config.attention_sink_layers:
            self.attention_sink_bias = mx.zeros((self.n_heads,))
        if config.gating is not None:
            self.gate = GATES[config.gate_activation]
            width = self.n_heads if config.gating == PER_HEAD else self.n_heads * head_dim
            self.g_proj = nn.Linear(hidden, width, bias=False)

    def __call__(self, x: mx.array, context: mx.array, rope: nn.Module, cache: DraftKVCache) -> mx.array:
        """Attend from the block.

        Args:
            x: normed block rows `[B, L, H]`; they follow the context directly.
            context: context feature rows `[B, S, H]` that the cache has not seen (S may be 0).

        Returns:
            `[B, L, H]`. The cache keeps the S context rows and none of the block.
        """
        B, L, _ = x.shape
        context = self._within_window(context, cache)
        S = context.shape[1]
        queries = self._heads(self.q_proj(x), self.n_heads)
        if "q_norm" in self:
            queries = self.q_norm(queries)
        queries = rope(queries.swapaxes(1, 2), offset=cache.offset + S)
        keys, values = self._keys_values(mx.concatenate([context, x], axis=1), rope, cache.offset)
        keys, values = cache.write(keys, values, context_rows=S)
        sinks = self.attention_sink_bias.astype(queries.dtype) if "attention_sink_bias" in self else None
        out = self.attend(queries, keys, values, self.scale, self._mask(L, keys.shape[2]), sinks)
        out = out.swapaxes(1, 2)  # [B, L, nh, hd]
        if "g_proj" in self:
            gate = self.gate(self.g_proj(x).astype(mx.float32)).astype(out.dtype)
            out = out * gate.reshape(B, L, self.n_heads, -1)
        return self.o_proj(out.reshape(B, L, -1))

    def extend(self, context: mx.array, rope: nn.Module, cache: DraftKVCache) -> None:
        """Take context rows `[B, S, H]` into the cache without drafting (prefill, end of a request)."""
        context = self._within_window(context, cache)
        cache.write(*self._keys_values(context, rope, cache.offset), context_rows=context.shape[1])

    def _keys_values(self, rows: mx.array, rope: nn.Module, offset: int) -> tuple[mx.array, mx.array]:
        keys = self._heads(self.k_proj(rows), self.n_kv_heads)
        if "k_norm" in self:
            keys = self.k_norm(keys)
        values = self._heads(self.v_proj(rows), self.n_kv_heads).swapaxes(1, 2)
        if self.value_scale != 1.0:
            values = values * self.value_scale
        return rope(keys.swapaxes(1, 2), offset=offset), values  # [B, n_kv, rows, hd]

    def _heads(self, x: mx.array, heads: int) -> mx.array:
        return x.reshape(*x.shape[:2], heads, self.head_dim)

    def _within_window(self, context: mx.array, cache: DraftKVCache) -> mx.array:
        """Only the last `window - 1` context rows can ever be seen; the rest is not even projected."""
        if cache.window is None or context.shape[1] < cache.window:
            return context
        skipped = context.shape[1] - (cache.window - 1)
        cache.skip(skipped)
        return context[:, skipped:]

    def _mask(self, block: int, keys: int) -> Mask:
        if self.window is not None and keys > self.window:
            return visible_rows(block, keys, self.window, self.is_causal)
        return "causal" if self.is_causal else None
