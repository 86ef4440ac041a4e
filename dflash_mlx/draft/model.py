"""The DFlash draft: a few decoder layers that fill a block of mask tokens in one pass.

Pure: block embeddings and context feature in, hidden states out. Embedding and head are the target's unless the
checkpoint brings its own; they come as callables, never as submodules, so that saving or quantising the draft touches
the draft only. Parameter names equal z-lab's PyTorch checkpoint's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx
from mlx import nn
from mlx_lm.models.qwen3 import MLP

from .attention import DFlashAttention
from .cache import DraftKVCache
from .config import SLIDING, DraftConfig

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
        self.norms_context = config.context_layernorm

    def __call__(self, x: mx.array, context: mx.array, rope: nn.Module, cache: DraftKVCache) -> mx.array:
        h = x + self.self_attn(self.input_layernorm(x), self.context_rows(context), rope, cache)
        return h + self.mlp(self.post_attention_layernorm(h))

    def context_rows(self, context: mx.array) -> mx.array:
        """The context feature as this layer's attention takes it."""
        return self.input_layernorm(context) if self.norms_context else context


class DFlashDraftModel(nn.Module):
    """A DFlash (v1) draft.

    Args:
        config: its facts.
        attn_implementation: "sdpa" (default) or "eager".

    Attributes:
        context_window: context rows that any layer sees at most, for caches made from then on; None (default) as the
            checkpoint says. Bounds time and memory of a draft at long context.

    Shapes: B batch, L block, S context rows, H hidden, Ht target hidden, V vocabulary.
    """

    layer_class: ClassVar[type[DFlashDecoderLayer]] = DFlashDecoderLayer

    def __init__(self, config: DraftConfig, attn_implementation: str = "sdpa"):
        super().__init__()
        self.config = config
        self.context_window: int | None = None
        self.fc = nn.Linear(config.context_width, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = [self.layer_class(config, i, attn_implementation) for i in range(config.num_hidden_layers)]
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        if config.aux_hidden_norms:
            taps = range(len(config.target_layer_ids))
            self.aux_hidden_norms = [nn.RMSNorm(config.tap_size, eps=config.rms_norm_eps) for _ in taps]
        if config.has_embed_tokens:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        if config.mask_embedding:
            self.mask_embedding = mx.zeros((config.hidden_size,))
        if config.has_lm_head:
            self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size or config.vocab_size, bias=False)
        if config.draft_vocab_size is not None:
            self.d2t = mx.zeros((config.draft_vocab_size,), mx.int64)  # target id = draft id + d2t[draft id]
        shape = (config.head_dim, config.max_position_embeddings, config.is_neox_style)
        self.rope = config.rope.build(*shape)
        self.sliding_rope = self.rope if config.sliding_rope is None else config.sliding_rope.build(*shape)

    def make_cache(self, offset: int = 0) -> list[DraftKVCache]:
        """One empty cache a layer; `offset` is the absolute position of the first context row."""
        return [DraftKVCache(self._window(i), offset) for i in range(len(self.layers))]

    def _window(self, layer: int) -> int | None:
        """The narrower of a layer's own window and `context_window`; the former counts a token of the block too."""
        own = self.config.window(layer)
        if self.context_window is None:
            return own
        return self.context_window + 1 if own is None else min(own, self.context_window + 1)

    def context_feature(self, taps: mx.array) -> mx.array:
        """`hidden_norm(fc(taps))`: concatenated taps `[B, S, taps * Ht]` to context feature `[B, S, H]`."""
        taps = taps.astype(self.norm.weight.dtype)
        if "aux_hidden_norms" in self:
            parts = mx.split(taps, len(self.aux_hidden_norms), axis=-1)
            taps = mx.concatenate(
                [norm(part) for norm, part in zip(self.aux_hidden_norms, parts, strict=True)], axis=-1
            )
        return self.hidden_norm(self.fc(taps))

    def __call__(self, block: mx.array, context: mx.array, cache: list[DraftKVCache]) -> mx.array:
        """Run one block.

        Args:
            block: embeddings `[B, L, H]` of the anchor and L-1 mask tokens.
            context: context feature `[B, S, H]` of the tokens before the anchor that the cache lacks.
            cache: one entry a layer; afterwards it holds the context rows, not the block.

        Returns:
            Normed hidden states `[B, L, H]`; row i predicts the token at slot i (`sample_from_anchor`: after it).
        """
        h = block.astype(context.dtype)
        for layer, rope, layer_cache in zip(self.layers, self._ropes(), cache, strict=True):
            h = layer(h, context, rope, layer_cache)
        return self.norm(h)

    def extend(self, context: mx.array, cache: list[DraftKVCache]) -> None:
        """Take context feature rows `[B, S, H]` into the cache without drafting."""
        for layer, rope, layer_cache in zip(self.layers, self._ropes(), cache, strict=True):
            layer.self_attn.extend(layer.context_rows(context), rope, layer_cache)

    def block(self, anchor: mx.array, proposals: int) -> mx.array:
        """Ids `[B, L]` of a block: `anchor` `[B, 1]` and the mask tokens that predict so many tokens with it."""
        masks = (anchor.shape[0], proposals - self.config.sample_from_anchor)
        return mx.concatenate([anchor, mx.full(masks, self.config.mask_token_id, anchor.dtype)], axis=1)

    def _ropes(self) -> list[nn.Module]:
        """The rope of each layer."""
        return [self.sliding_rope if kind == SLIDING else self.rope for kind in self.config.layer_types]

    def hidden(self, ids: mx.array, context: mx.array, cache: list[DraftKVCache], embed: Embed) -> mx.array:
        """Hidden states of the draft tokens: ids `[B, L]` (anchor, then mask tokens) to `[B, L-1, H]`.

        `embed` is the target's own; slot 0 is the anchor and predicts nothing, unless `sample_from_anchor`: then all
        slots do and the result is `[B, L, H]`.
        """
        block = self.embed_tokens(ids) if "embed_tokens" in self else embed(ids)
        if self.config.input_embedding_scale != 1.0:
            block = block * self.config.input_embedding_scale
        if "mask_embedding" in self:
            masked = (ids == self.config.mask_token_id)[..., None]
            block = mx.where(masked, self.mask_embedding.astype(block.dtype), block)
        return self(block, context, cache)[:, 0 if self.config.sample_from_anchor else 1 :]

    def logits(
        self, ids: mx.array, context: mx.array, cache: list[DraftKVCache], *, embed: Embed, head: Head
    ) -> mx.array:
        """Logits of the draft tokens: ids `[B, L]` to `[B, L-1, V]` (`hidden` says when to `[B, L, V]`); `embed` and
        `head` are the target's own."""
        return self.compute_logits(self.hidden(ids, context, cache, embed), head)

    def compute_logits(self, hidden: mx.array, head: Head) -> mx.array:
        """`hidden` `[B, L, H]` through its head, the target's or its own, with the draft's multiplier and soft-cap.

        Always `[B, L, V]` over the target's vocabulary; tokens that the draft does not know have -inf.
        """
        logits = self.lm_head(hidden) if "lm_head" in self else head(hidden)
        if self.config.output_multiplier != 1.0:
            logits = logits * self.config.output_multiplier
        if cap := self.config.final_logit_softcapping:
            logits = mx.tanh(logits / cap) * cap
        if "d2t" in self:
            known = mx.arange(self.d2t.size) + self.d2t
            everything = mx.full((*logits.shape[:-1], self.config.vocab_size), -mx.inf, logits.dtype)
            everything[..., known] = logits
            return everything
        return logits

    def pick(self, hidden: mx.array, anchor: mx.array, head: Head, draw: Draw | None = None) -> Picked:
        """Tokens of a block: `hidden` `[1, L, H]` of the draft tokens, `anchor` `[1]`; lazy, nothing waits."""
        logits, finite = self.compute_logits(hidden, head)[0], mx.isfinite(hidden).all()
        if draw is None:
            return mx.argmax(logits, axis=-1), finite, None
        scores = draw.scores(logits)
        return mx.argmax(scores + draw.gumbel, axis=-1), finite, scores
