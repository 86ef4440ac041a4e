"""How one tensor of a draft is made of the tensors of its files.

A recipe runs when the tensor is wanted, so whatever loads also converts, a file at a time. Knows no names of a draft.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx

from .tensor_info import TensorInfo, nbytes

Make = Callable[[Sequence[mx.array]], mx.array]


@dataclass(frozen=True)
class Recipe:
    """How one tensor is made.

    Attributes:
        dtype: of the result, as safetensors spells it. shape: of the result.
        sources: names of the tensors in the files that it is made of. make: their arrays, in that order, to the result.
        file: where the first source lies, for errors.
    """

    dtype: str
    shape: tuple[int, ...]
    sources: tuple[str, ...]
    make: Make
    file: Path = Path()

    @classmethod
    def stored(cls, name: str, info: TensorInfo) -> Recipe:
        """The tensor as it lies in its file."""
        return cls(info.dtype, info.shape, (name,), lambda arrays: arrays[0], info.file)

    def then(self, change: Callable[[mx.array], mx.array], shape: tuple[int, ...] | None = None) -> Recipe:
        """The same with one more step; `shape` if that changes it."""
        make = self.make
        return replace(self, shape=shape or self.shape, make=lambda arrays: change(make(arrays)))

    def rows(self, start: int, stop: int) -> Recipe:
        """Rows `start` to `stop` of the result."""
        return self.then(lambda array: array[start:stop], (stop - start, *self.shape[1:]))

    @property
    def nbytes(self) -> int:
        return nbytes(self.dtype, self.shape)


Recipes = dict[str, Recipe]
