"""The DFlash draft: a few decoder layers that fill a block of mask tokens in one pass.

Pure: block embeddings and context feature in, hidden states out. Embedding and head belong to the target
and come as callables, never as submodules, so that saving or quantising the draft touches the draft only.
Parameter names equal the PyTorch checkpoint's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx
from mlx import nn
from mlx_lm.models.qwen3 import MLP
from mlx_lm.models.rope_utils import initialize_rope

from .attention import DFlashAttention
from .cache import DraftKVCache
from .config import DraftConfig

Embed = Callable[[mx.array], mx.array]  # ids [B, L] -> [B, L, H]
Head = Callable[[mx.array], mx.array]  # hidden [B, L, H] -> logits [B, L, V]

# Tokens [L], whether they rest on finite numbers, and the scores [L, V] whose softmax they were drawn from.
Picked = tuple[mx.array, mx.array, mx.array | None]


@dataclass(frozen=True)
class Draw:
    """How the tokens of a block are drawn; without it they are the best ones.

    Attributes:
        scores: logits `[L, V]` to filtered log-probabilities over the temperature.
        temp: the temperature, for what a draft adds to them.
        gumbel: noise `[L, V]` float32; the token is the best after it is added.
    """

    scores: Callable[[mx.array], mx.array]
    temp: float
    gumbel: mx.array


def build_target_layer_ids(num_target_layers: int, num_draft_layers: int) -> list[int]:
    """Evenly spread tap layers, the rule of the paper for a new draft.

    A checkpoint's own `target_layer_ids` always win: most published drafts were trained on other layers.
    """
    if num_draft_layers == 1:
        return [num_target_layers // 2]
    first, last = 1, num_target_layers - 3
    step = (last - first) / (num_draft_layers - 1)
    return [round(first + i * step) for i in range(num_draft_layers)]


def extract_context_feature(hidden_states: Sequence[mx.array], layer_ids: Sequence[int]) -> mx.array:
    """Concatenate the taps: `[B, S, taps * Ht]` from hidden states laid out as in transformers.

    Args:
        hidden_states: embedding output first, then the output of each layer, each `[B, S, Ht]`.
        layer_ids: tap `i` is the output of layer `i`, that is `hidden_states[i + 1]`; their order is kept.
    """
    return mx.concatenate([hidden_states[i + 1] for i in layer_ids], axis=-1)


class DFlashDecoderLayer(nn.Module):
    """Pre-norm attention and SwiGLU MLP with residuals (z-lab's `Qwen3DFlashDecoderLayer`)."""

    def __init__(self, config: DraftConfig, layer: int, attn_implementation: str = "sdpa"):
        super().__init__()
        self.self_attn = DFlashAttention(config, layer, attn_implementation)
        self.mlp = MLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def __call__(self, x: mx.array, context: mx.array, rope: nn.Module, cache: DraftKVCache) -> mx.array:
        h = x + self.self_attn(self.input_layernorm(x), context, rope, cache)
        return h + self.mlp(self.post_attention_layernorm(h))


class DFlashDraftModel(nn.Module):
    """A DFlash (v1) draft.

    Args:
        config: its facts.
        attn_implementation: "sdpa" (default) or "eager".

    Shapes: B batch, L block, S context rows, H hidden, Ht target hidden, V vocabulary.
    """

    layer_class: ClassVar[type[DFlashDecoderLayer]] = DFlashDecoderLayer

    def __init__(self, config: DraftConfig, attn_implementation: str = "sdpa"):
        super().__init__()
        self.config = config
        self.fc = nn.Linear(config.context_width, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = [self.layer_class(config, i, attn_implementation) for i in range(config.num_hidden_layers)]
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rope = initialize_rope(
            config.head_dim,
            base=config.rope_theta,
            traditional=False,
            scaling_config=config.rope_scaling,
            max_position_embeddings=config.max_position_embeddings,
        )

    def make_cache(self, offset: int = 0) -> list[DraftKVCache]:
        """One empty cache a layer; `offset` is the absolute position of the first context row."""
        return [DraftKVCache(self.config.window(i), offset) for i in range(len(self.layers))]

    def context_feature(self, taps: mx.array) -> mx.array:
        """`hidden_norm(fc(taps))`: concatenated taps `[B, S, taps * Ht]` to context feature `[B, S, H]`."""
        return self.hidden_norm(self.fc(taps.astype(self.norm.weight.dtype)))

    def __call__(self, block: mx.array, context: mx.array, cache: list[DraftKVCache]) -> mx.array:
        """Run one block.

        Args:
            block: embeddings `[B, L, H]` of the anchor and L-1 mask tokens.
            context: context feature `[B, S, H]` of the tokens before the anchor that the cache lacks.
            cache: one entry a layer; afterwards it holds the context rows, not the block.

        Returns:
            Normed hidden states `[B, L, H]`; row i predicts the token at slot i.
        """
        h = block.astype(context.dtype)
        for layer, layer_cache in zip(self.layers, cache, strict=True):
            h = layer(h, context, self.rope, layer_cache)
        return self.norm(h)

    def extend(self, context: mx.array, cache: list[DraftKVCache]) -> None:
        """Take context feature rows `[B, S, H]` into the cache without drafting."""
        for layer, layer_cache in zip(self.layers, cache, strict=True):
            layer.self_attn.extend(context, self.rope, layer_cache)

    def hidden(self, ids: mx.array, context: mx.array, cache: list[DraftKVCache], embed: Embed) -> mx.array:
        """Hidden states of the draft tokens: ids `[B, L]` (anchor, then mask tokens) to `[B, L-1, H]`.

        `embed` is the target's own; slot 0 is the anchor and predicts nothing.
        """
        block = embed(ids)
        if self.config.input_embedding_scale != 1.0:
            block = block * self.config.input_embedding_scale
        return self(block, context, cache)[:, 1:]

    def logits(
        self, ids: mx.array, context: mx.array, cache: list[DraftKVCache], *, embed: Embed, head: Head
    ) -> mx.array:
        """Logits of the draft tokens: ids `[B, L]` to `[B, L-1, V]`; `embed` and `head` are the target's own."""
        return self.compute_logits(self.hidden(ids, context, cache, embed), head)

    def compute_logits(self, hidden: mx.array, head: Head) -> mx.array:
        """`hidden` `[B, L, H]` through the target's head, with the draft's own multiplier and soft-cap."""
        logits = head(hidden)
        if self.config.output_multiplier != 1.0:
            logits = logits * self.config.output_multiplier
        if cap := self.config.final_logit_softcapping:
            logits = mx.tanh(logits / cap) * cap
        return logits

    def pick(self, hidden: mx.array, anchor: mx.array, head: Head, draw: Draw | None = None) -> Picked:
        """Tokens of a block: `hidden` `[1, L, H]` of the draft tokens, `anchor` `[1]`; lazy, nothing waits."""
        logits, finite = self.compute_logits(hidden, head)[0], mx.isfinite(hidden).all()
        if draw is None:
            return mx.argmax(logits, axis=-1), finite, None
        scores = draw.scores(logits)
        return mx.argmax(scores + draw.gumbel, axis=-1), finite, scores
