"""Target: what a draft needs from an mlx-lm model, found by structure and checked by running it.

The model's own calls do all the work: embedding and head (tied or not, soft-capped or not) are reached by
letting the model call its parts, taps by watching its layers. Nothing is copied, wrapped or left behind on
the model. Knows no draft.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

from ..device import limits_told
from ..errors import DFlashError, TargetError
from .absorbed import absorbing
from .args import argument
from .check import check_blocks, check_replay, check_taps, find_row_axes, hidden
from .intercept import Handler, intercept
from .pinned import pin, unpin
from .replay import RowAxes
from .rewind import Rewinder, recurrent, unsupported
from .structure import find_embedding, find_final_norm, find_inner


@dataclass
class _Proof:
    """What was proven of a model by running it, while its parts are still the same objects; it keeps none alive.

    Attributes:
        blocks: whether several rows are computed as single ones; axes: see `row_axes`.
        taps: layers whose outputs were checked, with embedding and head; embed_scale: found with them.
    """

    model: weakref.ref
    layers: list[weakref.ref]
    blocks: bool = False
    axes: RowAxes | None = None
    taps: set[int] = field(default_factory=set)
    embed_scale: float = 1.0

    def holds(self, target: Target) -> bool:
        """Whether it is about this model as it is now (whatever is wrapped inside a layer leaves the layer itself)."""
        return (
            self.model() is target.model
            and len(self.layers) == len(target.layers)
            and all(ours() is theirs for ours, theirs in zip(self.layers, target.layers, strict=True))
        )


_proofs: dict[int, _Proof] = {}  # id(model) -> the proof costs a few small forwards, so it is made once a model


class Target:
    """An mlx-lm model as the target of a draft.

    Args:
        model: any mlx-lm model whose caches can be rewound; it is not changed.

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

    def require_rewindable(self, caches: Sequence[Any]) -> None:
        """Raise `TargetError` naming the family unless every cache can be rewound.

        Recurrent state is rewound by running its layer again, so some layer must be given it.
        """
        if kind := unsupported(caches):
            raise self.refusal(f"its {kind} can't be rewound")
        if any(map(recurrent, caches)):
            self.row_axes()

    def row_axes(self) -> RowAxes:
        """Which axes of what its layers are given are rows; looked for once a model.

        Raises:
            TargetError: some recurrent state is given to no layer.
        """
        proof = self._proof()
        if proof.axes is None:
            proof.axes = find_row_axes(self)
        return proof.axes

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

    def rewinder(self, caches: list[Any]) -> Rewinder:
        """What takes these caches back when part of a round is not kept."""
        return Rewinder(caches, self.layers, self.row_axes)

    def check(self, taps: Sequence[int] = ()) -> None:
        """Prove that blocks are computed as single steps are and can be cut, that tap i is the output of layer i, and
        with taps that `embed` and `head` are right; once a model and tap.

        Raises:
            TargetError: a tap is out of range, or something is not what it should be.
        """
        if bad := [i for i in taps if not 0 <= i < len(self.layers)]:
            raise TargetError(f"target {self.name} has {len(self.layers)} layers, tap {bad[0]} does not exist")
        proof = self._proof()
        if not proof.blocks:
            with limits_told():
                check_blocks(self)
                if any(map(recurrent, self.make_cache())):
                    check_replay(self, self.row_axes())
            proof.blocks = True
        if not set(taps) <= proof.taps:
            with limits_told():
                proof.embed_scale = check_taps(self, taps)
            proof.taps |= set(taps)
        self.embed_scale = proof.embed_scale
        for i in taps:
            self._tapped(i)

    def _proof(self) -> _Proof:
        """What is proven of this model so far."""
        key = id(self.model)
        if key not in _proofs or not _proofs[key].holds(self):
            forget = weakref.ref(self.model, lambda _: _proofs.pop(key, None))
            _proofs[key] = _Proof(forget, [weakref.ref(layer) for layer in self.layers])
        return _proofs[key]

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
