"""Safetensors files: the names, dtypes, shapes and places of their tensors by the header, and the tensors.

The files are a stranger's: every count, size and offset is checked before it is used, and no code of a checkpoint
runs. Knows no config and no draft.
"""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np

from ..errors import DraftError
from .fields import MAX_SIZE, brief
from .folder import INDEX, MAX_HEADER, indexed_files, regular_files
from .tensor_info import ITEM_BYTES, MAX_DIMENSIONS, MAX_TENSORS, TensorInfo, refuse_name

SUFFIXES = (".safetensors",)
# A file with one of these is refused by `mx.load` as a whole; its tensors are read one by one instead.
UNREAD_BY_MLX = {"F8_E5M2": np.uint8, "F64": np.float64}
RAW = {
    **UNREAD_BY_MLX, "I64": np.int64, "U64": np.uint64, "F32": np.float32, "I32": np.int32, "U32": np.uint32,
    "F16": np.float16, "BF16": np.uint16, "I16": np.int16, "U16": np.uint16, "I8": np.int8, "U8": np.uint8,
    "BOOL": np.bool_, "F8_E4M3": np.uint8, "F8_E8M0": np.uint8,
}  # fmt: skip


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that make up a checkpoint; none where a folder has no such files."""
    index = folder / INDEX
    return indexed_files(index) if index.is_file() else regular_files(folder, "*.safetensors")


def file_headers(file: Path) -> dict[str, TensorInfo]:
    """The tensors of one file; data stay on disk."""
    header, start, size = _read_header(file)
    tensors, spans = {}, []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        info, begin, stop = _header_entry(file, name, entry, start)
        if stop - begin != info.nbytes:
            raise DraftError(
                f"{file}: {name} has {stop - begin} bytes, its shape {list(info.shape)} needs {info.nbytes}"
            )
        tensors[name] = info
        spans.append((begin, stop, name))
    end = start + max((stop for _, stop, _ in spans), default=0)
    if end > size:
        raise DraftError(f"{file}: cut short: {size} bytes, {end} expected; download it again")
    spans.sort()
    for (_, stop, one), (begin, _, two) in itertools.pairwise(spans):
        if begin < stop:
            raise DraftError(f"{file}: {one} and {two} overlap; the file is damaged")
    return tensors


def _read_header(file: Path) -> tuple[dict[str, Any], int, int]:
    """The header's JSON object, the byte at which data begin, and the size of the file."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= size - 8:
            raise DraftError(f"{file}: not a safetensors file, or cut short ({size} bytes)")
        if length > MAX_HEADER:
            raise DraftError(f"{file}: a header of {length} bytes, {MAX_HEADER} is the most; no draft needs so many")
        text = stream.read(length)
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    except _Twice as error:
        raise DraftError(f"{file}: its header names {error} twice; the file is damaged") from None
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise DraftError(f"{file}: not a safetensors file (its header is no JSON object)")
    if len(header) > MAX_TENSORS:
        raise DraftError(f"{file}: {len(header)} tensors, {MAX_TENSORS} is the most; no draft has so many")
    return header, 8 + length, size


class _Twice(Exception):
    """A JSON object has a name twice."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise _Twice(brief(name))
        found[name] = value
    return found


def _header_entry(file: Path, name: str, entry: Any, start: int) -> tuple[TensorInfo, int, int]:
    """One tensor of a header, and where its bytes begin and stop after `start`."""
    try:
        dtype, shape, (begin, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        dtype = None
    if (
        not isinstance(dtype, str)
        or len(shape) > MAX_DIMENSIONS
        or not all(type(n) is int and 0 <= n <= MAX_SIZE for n in shape)
        or not all(type(n) is int and 0 <= n < 2**63 for n in (begin, stop))
        or begin > stop
    ):
        raise DraftError(f"{file}: malformed header entry for {brief(name)}: {brief(entry)}")
    refuse_name(file, name)
    if dtype not in ITEM_BYTES:
        raise DraftError(f"{file}: {name} has the dtype {brief(dtype)}, which is not read")
    return TensorInfo(dtype, shape, file, start + begin), begin, stop


def load_file(file: Path) -> Mapping[str, mx.array]:
    """The tensors of one file; their data is read when it is evaluated, or looked up.

    Raises `DraftError` for a file that MLX does not take although its header looks right.
    """
    tensors = file_headers(file)
    if any(info.dtype in UNREAD_BY_MLX for info in tensors.values()):
        return _RawFile(tensors)
    try:
        return cast(dict[str, mx.array], mx.load(str(file)))
    except (RuntimeError, ValueError) as error:
        raise DraftError(f"{file}: MLX can't read it ({error})") from None


class _RawFile(Mapping[str, mx.array]):
    """The tensors of a file that `mx.load` does not take, each read when it is looked up; fp8 as its bytes."""

    def __init__(self, tensors: Mapping[str, TensorInfo]):
        self.tensors = tensors

    def __getitem__(self, name: str) -> mx.array:
        info = self.tensors[name]
        count = info.nbytes // ITEM_BYTES[info.dtype]
        data: np.ndarray = np.fromfile(info.file, RAW[info.dtype], count, offset=info.offset)
        if info.dtype == "F64":
            data = data.astype(np.float32)
        array = mx.array(data).reshape(info.shape)
        return array.view(mx.bfloat16) if info.dtype == "BF16" else array

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)
