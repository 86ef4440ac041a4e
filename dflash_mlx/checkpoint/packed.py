"""Matrices quantised by other tools (fp8, nvfp4, packed and plain integers) as arrays in the checkpoint's dtype.

Which form a matrix has follows from its own tensors; the config only settles what shapes leave open (bits, groups,
blocks). Sizes are checked by headers, data are computed one matrix at a time. Knows no draft and opens no file.

Sources: compressed-tensors 0.20.1 (`compressors/`, `quantization/lifecycle/forward_helpers.py`), nvidia-modelopt
0.47.0 (`export/quant_utils.py`, `qtensor/nvfp4_tensor.py`). The two differ where nvfp4's second scale goes:
modelopt multiplies by `weight_scale_2`, compressed-tensors divides by `weight_global_scale`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import mlx.core as mx

from ..errors import DraftError
from .recipe import Recipe
from .schemes import UNREAD, Group, block, groups, refuse_scheme
from .tensor_info import FLOATS, TensorInfo

Arrays = Mapping[str, mx.array]

NVFP4_GROUP = 16
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP8 = ("F8_E4M3", "F8_E5M2")


@dataclass(frozen=True)
class Matrix:
    """The tensors of one matrix by kind (`weight`, `weight_scale`, ...), and what the config leaves to choose from."""

    path: str
    parts: Mapping[str, TensorInfo]
    dtype: str
    groups: tuple[Group, ...]
    block: tuple[int, int]
    used: list[str] = field(default_factory=list)

    def take(self, *kinds: str) -> TensorInfo | None:
        """The first of these tensors that is there; it becomes a source."""
        kind = next((kind for kind in kinds if kind in self.parts), None)
        if kind is None:
            return None
        self.used.append(kind)
        return self.parts[kind]

    def name(self, kind: str) -> str:
        return f"{self.path}.{kind}"

    def error(self, problem: str) -> DraftError:
        return DraftError(f"{next(iter(self.parts.values())).file}: {self.path}: {problem}")

    def need(self, *kinds: str) -> TensorInfo:
        found = self.take(*kinds)
        if found is None:
            raise self.error(f"{' or '.join(kinds)} is missing; the download may be incomplete")
        return found

    def unpacked(self, shape: tuple[int, ...], make: Callable[[Arrays], mx.array]) -> Recipe:
        """The recipe, with the result cast to the checkpoint's dtype."""
        names = {kind: self.name(kind) for kind in self.used}

        def cast(arrays: Sequence[mx.array]) -> mx.array:
            return make(dict(zip(names, arrays, strict=True))).astype(FLOATS[self.dtype])

        return Recipe(self.dtype, shape, tuple(names.values()), cast, next(iter(self.parts.values())).file)


def recipes(tensors: Mapping[str, TensorInfo], quantization_config: Mapping[str, Any] | None) -> dict[str, Recipe]:
    """For each matrix quantised by another tool, how its `<path>.weight` comes about.

    Args:
        tensors: by header, under the names they have in the files.
        quantization_config: of `config.json`, or `quantization` of modelopt's `hf_quant_config.json`.

    Raises:
        DraftError: an unknown scheme, by name; sizes that don't fit together.
    """
    modules: dict[str, dict[str, TensorInfo]] = {}
    for name, info in tensors.items():
        path, _, kind = name.rpartition(".")
        if kind in UNREAD:
            raise DraftError(f"{info.file}: quantised by {UNREAD[kind]} ({name}), which is not read")
        modules.setdefault(path, {})[kind] = info
    found = {path: parts for path, parts in modules.items() if any(k.startswith("weight_") for k in parts)}
    if not found:
        return {}
    config = quantization_config or {}
    source = next(iter(tensors.values())).file.parent / "config.json"
    refuse_scheme(config, source)
    stated = _dtype(tensors), groups(config, source), block(config, source)
    return {f"{path}.weight": _recipe(Matrix(path, parts, *stated)) for path, parts in found.items()}


def _recipe(matrix: Matrix) -> Recipe:
    weight = matrix.need("weight_packed", "weight")
    if len(weight.shape) != 2:
        raise matrix.error(f"{matrix.used[0]} of shape {list(weight.shape)} is no matrix")
    form = FORMS.get((matrix.used[0], weight.dtype))
    if form is None:
        kinds = ", ".join(sorted(matrix.parts))
        raise matrix.error(f"{matrix.used[0]} of dtype {weight.dtype} with {kinds} is a scheme that is not read")
    made = form(matrix, weight)
    if left := sorted(kind for kind in matrix.parts if kind.startswith("weight_") and kind not in matrix.used):
        raise matrix.error(f"{left[0]} belongs to a scheme that is not read")
    return made


def _fp8(matrix: Matrix, weight: TensorInfo) -> Recipe:
    """Numbers of 8 bits times a scale: one for all, one a row, or one a block."""
    decode = from_e4m3 if weight.dtype == "F8_E4M3" else from_e5m2
    scale = matrix.need("weight_scale", "weight_scale_inv")  # both multiply, whatever the second's name says
    kind = matrix.used[-1]
    spread = _spread(matrix, scale, weight.shape)
    return matrix.unpacked(weight.shape, lambda a: decode(a["weight"]) * spread(a[kind]))


def _int8(matrix: Matrix, weight: TensorInfo) -> Recipe:
    scale, zero = matrix.need("weight_scale"), matrix.take("weight_zero_point")
    spread = _spread(matrix, scale, weight.shape)
    if zero is not None and zero.shape != scale.shape:
        raise matrix.error(f"weight_zero_point {list(zero.shape)} does not fit weight_scale {list(scale.shape)}")

    def make(a: Arrays) -> mx.array:
        numbers = a["weight"].astype(mx.float32)
        if zero is not None:
            numbers = numbers - spread(a["weight_zero_point"])
        return numbers * spread(a["weight_scale"])

    return matrix.unpacked(weight.shape, make)


def _nvfp4(matrix: Matrix, weight: TensorInfo) -> Recipe:
    """Two numbers a byte, the low half first; a scale in fp8 for each 16, and one more for the matrix."""
    rows, columns = weight.shape[0], weight.shape[1] * 2
    scale = matrix.need("weight_scale")
    if scale.dtype != "F8_E4M3" or scale.shape != (rows, columns // NVFP4_GROUP) or columns % NVFP4_GROUP:
        raise matrix.error(
            f"nvfp4 of {rows} x {columns} numbers does not fit weight_scale {scale.dtype} {list(scale.shape)}"
        )
    packed, divides = matrix.used[0], matrix.used[0] == "weight_packed"
    second = matrix.need("weight_global_scale" if divides else "weight_scale_2")
    if second.shape not in ((), (1,)) or second.dtype != "F32":
        raise matrix.error(f"{matrix.used[-1]} is {second.dtype} {list(second.shape)}, expected one F32 number")
    kind = matrix.used[-1]

    def make(a: Arrays) -> mx.array:
        whole = a[kind].reshape(())
        scales = from_e4m3(a["weight_scale"]) * (1 / whole if divides else whole)
        numbers = from_e2m1(a[packed]).reshape(rows, -1, NVFP4_GROUP)
        return (numbers * scales[..., None]).reshape(rows, columns)

    return matrix.unpacked((rows, columns), make)


def _words(matrix: Matrix, weight: TensorInfo) -> Recipe:
    """Integers in words of 32 bits, lowest bits first and offset by half their range."""
    rows = weight.shape[0]
    scale, zero = matrix.need("weight_scale"), matrix.take("weight_zero_point")
    fits = {group for group in matrix.groups if _columns(group, weight, scale) and group.symmetric == (zero is None)}
    if len(fits) != 1:
        what = "fits none" if not fits else "fits several"
        raise matrix.error(
            f"weight_packed {list(weight.shape)} with weight_scale {list(scale.shape)} {what} of the config_groups "
            "in quantization_config"
        )
    (group,) = fits
    shape = (rows, _columns(group, weight, scale))
    if zero is not None and (zero.dtype, zero.shape) != ("I32", (-(-rows * group.bits // 32), scale.shape[1])):
        raise matrix.error(f"weight_zero_point {zero.dtype} {list(zero.shape)} does not fit {rows} rows")
    stated, order = matrix.take("weight_shape"), matrix.take("weight_g_idx")
    if stated is not None and stated.shape != (2,):
        raise matrix.error(f"weight_shape has {list(stated.shape)} numbers, expected 2")
    spread = _spread(matrix, scale, shape)

    def make(a: Arrays) -> mx.array:
        if stated is not None and a["weight_shape"].tolist() != list(shape):
            raise matrix.error(f"weight_shape says {a['weight_shape'].tolist()}, its tensors are of {list(shape)}")
        if order is not None and not _in_order(a["weight_g_idx"], shape[1], group.size or shape[1]):
            raise matrix.error("weight_g_idx reorders the columns (activation ordering), which is not read")
        numbers = from_words(a["weight_packed"], group.bits)[:, : shape[1]]
        if zero is not None:
            numbers = numbers - spread(from_words(a["weight_zero_point"].T, group.bits)[:, :rows].T)
        return numbers * spread(a["weight_scale"])

    return matrix.unpacked(shape, make)


# by the tensor that holds the numbers and its dtype
FORMS: dict[tuple[str, str], Callable[[Matrix, TensorInfo], Recipe]] = {
    **{("weight", dtype): _fp8 for dtype in FP8},
    ("weight", "U8"): _nvfp4,
    ("weight_packed", "U8"): _nvfp4,
    ("weight", "I8"): _int8,
    ("weight_packed", "I32"): _words,
}


def _columns(group: Group, weight: TensorInfo, scale: TensorInfo) -> int:
    """Columns of a matrix in words if it is of this group, else 0."""
    rows, words = weight.shape
    most = words * 32 // group.bits
    if len(scale.shape) != 2 or scale.shape[0] != rows:
        return 0
    columns = most if group.size is None else scale.shape[1] * group.size
    right_scales = scale.shape[1] == 1 if group.size is None else True
    return columns if right_scales and words == -(-columns * group.bits // 32) else 0


def _spread(matrix: Matrix, scale: TensorInfo, shape: tuple[int, ...]) -> Callable[[mx.array], mx.array]:
    """What makes scales of this shape fit numbers of `shape` `[rows, columns]`."""
    if scale.dtype not in FLOATS:
        raise matrix.error(f"scales of dtype {scale.dtype} are not read")
    rows, columns = shape
    high, wide = matrix.block
    sizes = tuple(n for n in scale.shape if n != 1)
    blocks = (-(-rows // high), -(-columns // wide))
    if not sizes:
        return lambda a: a.astype(mx.float32).reshape(())
    if scale.shape in ((rows,), (rows, 1)):
        return lambda a: a.astype(mx.float32).reshape(rows, 1)
    if sizes == tuple(n for n in blocks if n != 1):
        return partial(_by_block, blocks=blocks, high=high, wide=wide, shape=(rows, columns))
    if len(scale.shape) == 2 and scale.shape[0] == rows and columns % scale.shape[1] == 0:
        group = columns // scale.shape[1]
        return lambda a: mx.repeat(a.astype(mx.float32), group, axis=1)
    raise matrix.error(f"scales {list(scale.shape)} don't fit {rows} x {columns} numbers (block {high} x {wide})")


def _by_block(a: mx.array, blocks: tuple[int, int], high: int, wide: int, shape: tuple[int, int]) -> mx.array:
    tall = mx.repeat(a.astype(mx.float32).reshape(blocks), high, axis=0)[: shape[0]]
    return mx.repeat(tall, wide, axis=1)[:, : shape[1]]


def _in_order(order: mx.array, columns: int, size: int) -> bool:
    return order.shape == (columns,) and bool(mx.array_equal(order, mx.arange(columns) // size).item())


def from_e4m3(raw: mx.array) -> mx.array:
    """Bytes as the fp8 numbers they are, in float32."""
    return mx.from_fp8(raw, dtype=mx.float32)


def from_e5m2(raw: mx.array) -> mx.array:
    """Bytes as the fp8 numbers they are, in float32: the upper half of a float16."""
    return mx.left_shift(raw.astype(mx.uint16), mx.array(8, mx.uint16)).view(mx.float16).astype(mx.float32)


def from_e2m1(raw: mx.array) -> mx.array:
    """Bytes `[.., n]` as two fp4 numbers each, the low half first: `[.., 2n]` in float32."""
    table = mx.array([*E2M1, *(-value for value in E2M1)], mx.float32)
    halves = mx.stack([raw & 15, raw >> 4], axis=-1)
    return table[halves].reshape(*raw.shape[:-1], -1)


def from_words(words: mx.array, bits: int) -> mx.array:
    """Words of 32 bits `[rows, n]` as the signed integers in them: `[rows, n * 32 / bits]` in float32."""
    shifts = mx.arange(0, 32, bits, dtype=mx.uint32)
    numbers = (words.view(mx.uint32)[..., None] >> shifts) & ((1 << bits) - 1)
    return numbers.reshape(words.shape[0], -1).astype(mx.float32) - (1 << (bits - 1))


def _dtype(tensors: Mapping[str, TensorInfo]) -> str:
    """The dtype of the checkpoint: that of its norms, which no tool quantises."""
    norms = [info.dtype for name, info in tensors.items() if name.endswith("norm.weight") and info.dtype in FLOATS]
    return norms[0] if norms else "BF16"
