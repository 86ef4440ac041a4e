"""One tensor of a checkpoint, as the header of its file tells it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from ..errors import DraftError
from .fields import brief

MAX_TENSORS = 65_536
MAX_DIMENSIONS = 8
MAX_NAME = 256

FLOATS = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}
ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip


@dataclass(frozen=True)
class TensorInfo:
    """One tensor by its header: dtype as safetensors spells it, shape, file, and the byte it begins at there."""

    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int = 0

    @property
    def nbytes(self) -> int:
        return nbytes(self.dtype, self.shape)


def nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor, 0 for a dtype that safetensors does not name."""
    return math.prod(shape) * ITEM_BYTES.get(dtype, 0)


def refuse_name(file: Path, name: str) -> None:
    """Raise `DraftError` for a tensor name that would garble an error's line."""
    if not 0 < len(name) <= MAX_NAME or not name.isprintable():
        raise DraftError(f"{file}: {brief(name)} is no tensor name; the file is damaged")
