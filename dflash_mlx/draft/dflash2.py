"""DFlash 2: a DFlash draft with convolutions over the block and a selector that walks a path of candidates.

The convolutions let a block token see its left neighbours' features; the selector lets it see which token was
chosen before it. Every pair of neighbouring candidates is scored at once, so a walk costs no wait and no step a
position. Source of the method: z-lab's `dflash` 0.1.0. Knows no target.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import mlx.core as mx
from mlx import nn

from .cache import DraftKVCache
from .config import DraftConfig
from .model import DFlashDecoderLayer, DFlashDraftModel, Draw, Head, Picked


class GroupedDynamicCausalConv(nn.Module):
    """Two short causal convolutions around a sublayer, before and after it, whose kernels depend on the input.

    The kernel of a channel is its own base plus a term that the input of the sublayer gives its whole group. Rows
    are those of one block, zero to its left. Shapes: K kernel size, G groups.
    """

    def __init__(self, hidden: int, kernel: int, group: int):
        super().__init__()
        self.group = group
        self.base_kernel = mx.zeros((2, kernel, hidden))
        self.kernel_projection = nn.Linear(hidden, 2 * kernel * (hidden // group), bias=False)

    def __call__(self, x: mx.array, sublayer: Callable[[mx.array], mx.array]) -> mx.array:
        """`x` `[B, L, H]` through the first convolution, the sublayer and the second one."""
        dynamic = self.kernel_projection(x).reshape(*x.shape[:2], 2, self.base_kernel.shape[1], -1)
        kernels = self.base_kernel.astype(x.dtype) + mx.repeat(dynamic, self.group, axis=-1)  # [B, L, 2, K, H]
        return convolve(sublayer(convolve(x, kernels[:, :, 0])), kernels[:, :, 1])


def convolve(x: mx.array, kernel: mx.array) -> mx.array:
    """Causal convolution of `x` `[B, L, H]` with a kernel of its own at every row: `[B, L, K, H]`, offset 0 first."""
    length, size = kernel.shape[1:3]
    padded = mx.pad(x, [(0, 0), (size - 1, 0), (0, 0)])
    out = kernel[:, :, 0] * x
    for offset in range(1, size):
        first = size - 1 - offset
        out = out + kernel[:, :, offset] * padded[:, first : first + length]
    return out


class DFlash2DecoderLayer(DFlashDecoderLayer):
    """A DFlash layer with convolutions around attention and MLP; context rows pass no convolution."""

    def __init__(self, config: DraftConfig, layer: int, attn_implementation: str = "sdpa"):
        super().__init__(config, layer, attn_implementation)
        sizes = config.hidden_size, config.conv_kernel_size, config.conv_group_size
        self.attention_conv = GroupedDynamicCausalConv(*sizes)
        self.mlp_conv = GroupedDynamicCausalConv(*sizes)

    def __call__(self, x: mx.array, context: mx.array, rope: nn.Module, cache: DraftKVCache) -> mx.array:
        attention = lambda rows: self.self_attn(rows, context, rope, cache)  # noqa: E731
        h = x + self.attention_conv(self.input_layernorm(x), attention)
        return h + self.mlp_conv(self.post_attention_layernorm(h), self.mlp)


class CandidateSelector(nn.Module):
    """Scores how well a candidate follows the token before it: `<A[predecessor] * W h, B[successor]>`.

    Shapes: V vocabulary, r rank. The codebooks are plain arrays under the checkpoint's names.
    """

    def __init__(self, config: DraftConfig):
        super().__init__()
        codebook = config.vocab_size, config.selector_rank
        self.predecessor_codebook = mx.zeros(codebook)
        self.successor_codebook = mx.zeros(codebook)
        self.hidden_projection = nn.Linear(config.hidden_size, config.selector_rank, bias=False)

    def edges(self, hidden: mx.array, predecessors: mx.array, successors: mx.array) -> mx.array:
        """Scores `[L, K, K]` float32 of each pair: hidden `[L, H]`, ids of predecessors and successors `[L, K]`."""
        h = self.hidden_projection(hidden).astype(mx.float32)[:, None]
        after = self.successor_codebook[successors].astype(mx.float32)
        return (h * self.predecessor_codebook[predecessors]) @ after.swapaxes(-1, -2)


class DFlash2DraftModel(DFlashDraftModel):
    """A DFlash 2 draft."""

    layer_class = DFlash2DecoderLayer

    def __init__(self, config: DraftConfig, attn_implementation: str = "sdpa"):
        super().__init__(config, attn_implementation)
        self.candidate_selector = CandidateSelector(config)

    def compute_logits(self, hidden: mx.array, head: Head) -> mx.array:
        """As in a DFlash draft, but float32 and without the rows by which a target's head is padded."""
        logits = super().compute_logits(hidden, lambda rows: head(rows).astype(mx.float32))
        return logits[..., : self.config.vocab_size]

    def pick(self, hidden: mx.array, anchor: mx.array, head: Head, draw: Draw | None = None) -> Picked:
        """The best path through the best `selector_top_k` candidates of each position, see `DFlashDraftModel.pick`."""
        logits = self.compute_logits(hidden, head)[0]
        scores = logits if draw is None else draw.scores(logits)
        candidates = best(scores, self.config.selector_top_k)  # [L, K]
        before = mx.concatenate([mx.broadcast_to(anchor, candidates[:1].shape), candidates[:-1]])
        edges = self.candidate_selector.edges(hidden[0], before, candidates)
        finite = mx.isfinite(hidden).all() & mx.isfinite(edges).all()
        unary = mx.take_along_axis(scores, candidates, axis=-1)[:, None]
        pairs = unary + (edges if draw is None else edges / draw.temp)  # [L, K before, K]
        noise = 0.0 if draw is None else mx.take_along_axis(draw.gumbel, candidates, axis=-1)[:, None]
        path = follow(mx.argmax(pairs + noise, axis=-1))
        tokens = mx.take_along_axis(candidates, path[:, None], axis=-1)[:, 0]
        if draw is None:
            return tokens, finite, None
        walked = mx.concatenate([path[:1], path[:-1]])[:, None, None]  # row 0 has the anchor before it in any case
        rows = mx.take_along_axis(pairs, walked, axis=1)[:, 0]
        return tokens, finite, mx.put_along_axis(mx.full(draw.gumbel.shape, -math.inf), candidates, rows, axis=-1)


def best(scores: mx.array, k: int) -> mx.array:
    """Indices `[L, k]` of the k largest of each row `[L, V]`, in any order.

    A row is cut into chunks: the k largest lie in the k chunks with the largest maxima (and in the rest behind the
    last chunk), so that two short sorts do what would be one of the whole vocabulary.
    """
    vocab = scores.shape[-1]
    size = math.isqrt(vocab // k)
    count = vocab // size
    maxima = scores[:, : count * size].reshape(-1, count, size).max(axis=-1)
    chunks = mx.argpartition(maxima, count - k, axis=-1)[:, count - k :]
    inside = (chunks[..., None] * size + mx.arange(size)).reshape(scores.shape[0], -1)
    rest = mx.broadcast_to(mx.arange(count * size, vocab), (scores.shape[0], vocab - count * size))
    indices = mx.concatenate([inside, rest.astype(inside.dtype)], axis=-1)
    kept = mx.argpartition(mx.take_along_axis(scores, indices, axis=-1), indices.shape[-1] - k, axis=-1)
    return mx.take_along_axis(indices, kept[:, -k:], axis=-1)


def follow(steps: mx.array) -> mx.array:
    """The walk `[L]` through maps `[L, K]`: `steps[i, a]` is where i goes if i - 1 went to a; row 0 is constant.

    Maps compose in any grouping, so the prefixes of a chain of L take log2(L) gathers, not L.
    """
    shift = 1
    while shift < steps.shape[0]:
        steps = mx.concatenate([steps[:shift], mx.take_along_axis(steps[shift:], steps[:-shift], axis=-1)])
        shift *= 2
    return steps[:, 0]
