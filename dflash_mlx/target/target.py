"""Target: what a draft needs from an mlx-lm model, found by structure and checked by running it. Knows no draft."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..device import limits_told
from ..errors import TargetError
from .check import check_blocks, check_replay, check_taps, find_row_axes
from .model import TargetModel
from .replay import RowAxes
from .rewind import Rewinder, recurrent, unsupported


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


class Target(TargetModel):
    """An mlx-lm model as the target of a draft.

    Args:
        model: any mlx-lm model whose caches can be rewound; it is not changed.
    """

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
