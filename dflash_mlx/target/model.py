"""The parts of an mlx-lm model and its forward with taps: what is found by structure, before anything is proven.

The model's own calls do all the work: embedding and head (tied or not, soft-capped or not) are reached by
letting the model call its parts, taps by watching its layers. Nothing is copied, wrapped or left behind on
the model. Knows no draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, cast

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

from ..errors import DFlashError, TargetError
from .absorbed import absorbing
from .args import argument
from .intercept import Handler, intercept
from .pinned import pin, unpin
from .structure import find_embedding, find_final_norm, find_inner


def hidden(output: Any) -> mx.array:
    """The hidden state of a layer that may return more."""
    return output[0] if isinstance(output, tuple) else output


class TargetModel:
    """An mlx-lm model, which is not changed.

    Parts that only a draft needs are looked for when they are asked for, so any model can be decoded plainly.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self.name = getattr(model, "model_type", type(model).__module__.rpartition(".")[2])
        self.layers: list[nn.Module] = list(getattr(model, "layers", []))
        self.embed_scale = 1.0
        self.taps_before_norm = False  # whether a tap of the last layer is its own output, not the normed one

    @property
    def hidden_size(self) -> int:
        """Width of the hidden state; a quantised embedding keeps it in its dequantised shape."""
        weight = self.embed_tokens.weight
        bits = getattr(self.embed_tokens, "bits", None)
        return weight.shape[1] * 32 // bits if bits else weight.shape[1]

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return self.embed_tokens.weight.shape[0]

    def check_ids(self, ids: mx.array, what: str = "the prompt") -> None:
        """Raise `DFlashError` for a token id that the model has no row for: MLX would read outside the table."""
        vocab = argument(self.model, "vocab_size")
        if (lowest := cast(int, ids.min().item())) < 0:
            raise DFlashError(f"{what} holds token id {lowest}")
        if isinstance(vocab, int) and (highest := cast(int, ids.max().item())) >= vocab:
            raise DFlashError(f"{what} holds token id {highest}, the target's vocabulary ends at {vocab - 1}")

    def make_cache(self, max_kv_size: int | None = None) -> list[Any]:
        """mlx-lm's own cache for this model."""
        return make_prompt_cache(self.model, max_kv_size)

    def check_quantizable(self, caches: Sequence[Any], group_size: int) -> None:
        """Raise `DFlashError` where mlx-lm would fail once it starts to quantise these caches (`kv_bits`)."""
        if any(type(cache) is RotatingKVCache for cache in caches):
            raise DFlashError(f"kv_bits: target {self.name} has sliding-window caches, which mlx-lm can't quantise")
        dims = {argument(self.model, name) for name in ("head_dim", "v_head_dim")}
        if wrong := [dim for dim in dims if isinstance(dim, int) and dim % group_size]:
            raise DFlashError(
                f"kv_group_size {group_size} does not divide the head dimension {wrong[0]} of {self.name}"
            )

    def forward(
        self,
        ids: mx.array,
        cache: list[Any],
        taps: Sequence[int] = (),
        watch: Sequence[tuple[nn.Module, Handler]] | None = None,
    ) -> tuple[mx.array, mx.array | None]:
        """One forward.

        Args:
            ids: `[B, L]`; cache: updated in place; taps: layers whose outputs to return, order kept, the last layer's
                after the final norm as in transformers' hidden states, unless `taps_before_norm`;
                watch: handlers of a `Rewinder`, given when a block is verified.

        Returns:
            Logits `[B, L, V]` and the concatenated taps `[B, L, len(taps) * Ht]` (None without taps).
        """
        tapped: dict[int, mx.array] = {}

        def tap(i: int) -> Handler:
            def handler(own: Any, *args: Any, **kwargs: Any) -> Any:
                out = own(*args, **kwargs)
                tapped[i] = hidden(out)
                return out

            return handler

        verifying = watch is not None and ids.shape[1] > 1
        handlers = [*(watch or ()), *((self._tapped(i), tap(i)) for i in dict.fromkeys(taps))]
        try:
            if verifying:
                pin(cache)
            with intercept([*handlers, *(self.latent_attention if verifying else ())]):
                logits = self.model(ids, cache=cache)
        finally:
            unpin(cache)
        return logits, mx.concatenate([tapped[i] for i in taps], axis=-1) if taps else None

    def _tapped(self, layer: int) -> nn.Module:
        """The module whose output is a tap."""
        last = layer == len(self.layers) - 1
        return self.final_norm if last and not self.taps_before_norm else self.layers[layer]

    @cached_property
    def latent_attention(self) -> list[tuple[nn.Module, Handler]]:
        """Handlers that let a block take the cheaper form of latent attention, empty for other models."""
        return absorbing(self.layers)

    def embed(self, ids: mx.array) -> mx.array:
        """Embeddings as they enter layer 0, scale included: `[B, L]` to `[B, L, H]`."""
        h = self.embed_tokens(ids)
        return h if self.embed_scale == 1.0 else h * self.embed_scale

    def head(self, hidden: mx.array) -> mx.array:
        """Normed hidden states `[B, L, H]` through the model's own head: `[B, L, V]`."""
        with intercept([(self.inner, lambda own, *args, **kwargs: hidden)]):
            return self.model(mx.zeros(hidden.shape[:2], mx.int32), cache=None)

    @cached_property
    def inner(self) -> nn.Module:
        """The module that owns layers, embedding and final norm, below any wrapper."""
        if (inner := find_inner(self.model, self.layers)) is None:
            raise self.refusal("no layer list with an embedding beside it was found")
        return inner

    @cached_property
    def final_norm(self) -> nn.Module:
        """The module whose output is the last layer's, normed: mostly `inner` itself."""
        if (norm := find_final_norm(self.model, self.inner, self.layers)) is None:
            raise self.refusal("the norm behind its last layer was not found")
        return norm

    @cached_property
    def embed_tokens(self) -> nn.Module:
        """The token embedding."""
        if (embedding := find_embedding(self.model, self.inner, self.layers)) is None:
            raise self.refusal("no token embedding was found")
        return embedding

    def refusal(self, why: str) -> TargetError:
        """The error for a family that no draft can drive."""
        return TargetError(
            f"target {self.name}: {why}, so no draft can drive it; run it without one (--draft-model none)"
        )
