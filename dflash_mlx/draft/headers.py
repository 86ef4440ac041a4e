"""Which tensors a folder holds, by the headers of its files: names, dtypes, shapes and where they lie.

The files are a stranger's: every count, size, offset and path is checked before it is used, nothing outside the
folder is opened and no code of a checkpoint runs. Knows files; knows no config and no draft.
"""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np

from ..errors import DraftError
from .fields import MAX_SIZE, brief, read_json

MAX_HEADER = 16 * 2**20  # a draft's is some kB; parsed JSON takes up to 25 times its bytes
MAX_TENSORS = 65_536
MAX_DIMENSIONS = 8
MAX_NAME = 256
INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = {  # by which a draft tells of what tokenizer it is, and the most bytes that each may have
    "tokenizer.json": 128 * 2**20, "tokenizer_config.json": 2**24, "added_tokens.json": 2**24,
    "special_tokens_map.json": 2**20,
}  # fmt: skip
JSON_FILES = {
    "config.json": 2**20, "generation_config.json": 2**20, "hf_quant_config.json": 2**20,
    INDEX: MAX_HEADER, **TOKENIZER_FILES,
}  # fmt: skip

FLOATS = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}
ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip

# A file with one of these is refused by `mx.load` as a whole; its tensors are read one by one instead.
UNREAD_BY_MLX = {"F8_E5M2": np.uint8, "F64": np.float64}
RAW = {
    **UNREAD_BY_MLX, "I64": np.int64, "U64": np.uint64, "F32": np.float32, "I32": np.int32, "U32": np.uint32,
    "F16": np.float16, "BF16": np.uint16, "I16": np.int16, "U16": np.uint16, "I8": np.int8, "U8": np.uint8,
    "BOOL": np.bool_, "F8_E4M3": np.uint8, "F8_E8M0": np.uint8,
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
        size = ITEM_BYTES.get(self.dtype, 0)
        for n in self.shape:
            size *= n
        return size


def read_headers(folder: Path) -> dict[str, TensorInfo]:
    """Every tensor of a folder, from the headers only.

    Raises `DraftError` when a file is missing, truncated, malformed, or the index names files elsewhere.
    """
    tensors: dict[str, TensorInfo] = {}
    for file in weight_files(folder):
        for name, info in file_headers(file).items():
            if name in tensors:
                raise DraftError(f"{file}: tensor {name} is also in {tensors[name].file.name}")
            tensors[name] = info
        if len(tensors) > MAX_TENSORS:
            raise DraftError(f"{folder}: more than {MAX_TENSORS} tensors; no draft has so many")
    return tensors


def weight_files(folder: Path) -> list[Path]:
    """The files that make up a checkpoint: safetensors; where there are none, PyTorch's or one GGUF."""
    check_folder(folder)
    index = folder / INDEX
    if index.is_file():
        return indexed_files(index)
    if files := regular_files(folder, "*.safetensors"):
        return files
    from . import gguf, torch_files

    if files := torch_files.weight_files(folder):
        return files
    if file := gguf.find(folder):
        return [file]
    raise DraftError(f"{folder}: no safetensors file")


def indexed_files(index: Path) -> list[Path]:
    """The files that an index names, each in its own folder."""
    weight_map = read_json(index).get("weight_map")
    names = list(weight_map.values()) if isinstance(weight_map, dict) else []
    if not names or not all(isinstance(n, str) and n.isprintable() and Path(n).name == n != "" for n in names):
        raise DraftError(f"{index}: weight_map must name files of this folder, found {brief(weight_map)}")
    files = [index.parent / name for name in sorted(set(names))]
    for file in files:
        if not file.is_file():
            raise DraftError(f"{file}: named by {index.name} but missing; download the draft again")
        refuse_outside(file)
    return files


def regular_files(folder: Path, pattern: str) -> list[Path]:
    """The files of a folder that match, or `DraftError` where a match is a pipe, a device or a folder."""
    files = sorted(folder.glob(pattern))
    for file in files:
        refuse_irregular(file)
    return files


def refuse_irregular(file: Path) -> None:
    """Raise `DraftError` for a pipe, a device or a folder, and for a link as `refuse_outside` does."""
    if not file.is_file():  # to open a pipe would wait for ever
        raise DraftError(f"{file}: no regular file; remove it or download the draft again")
    refuse_outside(file)


def check_folder(folder: Path) -> None:
    """Raise `DraftError` where config, index or card of a folder lead out of it or are too large to parse."""
    for name in (*JSON_FILES, "README.md"):
        if (path := folder / name).exists():
            refuse_outside(path)
            most = JSON_FILES.get(name, MAX_HEADER)
            if (size := path.stat().st_size) > most:
                raise DraftError(f"{path}: {size} bytes, {most} is the most; no draft needs so many")


def refuse_outside(file: Path) -> None:
    """Raise `DraftError` for a link that leads out of the file's folder, or out of its repo in the hub's cache."""
    folder, real = file.parent.resolve(), file.resolve()
    repo = next((parent for parent in folder.parents if parent.name.startswith("models--")), None)
    # the hub's cache: models--org--name/snapshots/<commit>/<file> is a link to models--org--name/blobs/<hash>
    if folder not in real.parents and not (repo and repo / "blobs" in real.parents):
        raise DraftError(f"{file}: a link that leads out of the folder, to {real}; put the file itself there")


def file_headers(file: Path) -> dict[str, TensorInfo]:
    """The tensors of one file."""
    if reader := _foreign(file):
        return reader.file_headers(file)
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


def _foreign(file: Path) -> Any:
    """The module that reads a file that is no safetensors, by its name; None for one that is."""
    from . import gguf, torch_files

    return {**dict.fromkeys(torch_files.SUFFIXES, torch_files), ".gguf": gguf}.get(file.suffix)


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


def refuse_name(file: Path, name: str) -> None:
    """Raise `DraftError` for a tensor name that would garble an error's line."""
    if not 0 < len(name) <= MAX_NAME or not name.isprintable():
        raise DraftError(f"{file}: {brief(name)} is no tensor name; the file is damaged")


def load_file(file: Path) -> Mapping[str, mx.array]:
    """The tensors of one file; their data is read when it is evaluated, or looked up.

    Raises `DraftError` for a file that MLX does not take although its header looks right.
    """
    if reader := _foreign(file):
        return reader.load_file(file)
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
