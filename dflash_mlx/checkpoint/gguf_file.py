"""The keys and tensors of a GGUF file (versions 2 and 3, little-endian), read without what a draft has no use for.

A draft's file carries its target's whole tokenizer: the `gguf` package's reader keeps objects for each of its
600,000 pieces (1 kB each), so the few facts are read here and the package only dequantises. The files are a
stranger's: every count, size and offset is checked. Knows no draft.

Source of the format: `docs/gguf.md` of ggml.
"""

from __future__ import annotations

import functools
import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DraftError
from .fields import MAX_SIZE, brief
from .tensor_info import MAX_DIMENSIONS, MAX_TENSORS, refuse_name

# Types of metadata values as `struct` spells them; 8 is text, 9 a list.
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TEXT, LIST = 8, 9
MAX_KEYS = 4096
MAX_LIST = 4096  # elements that are kept; a draft's own lists have one for each layer or tap
MAX_ELEMENTS = 4_000_000  # of all lists


@dataclass(frozen=True)
class Tensor:
    """One tensor: type as ggml numbers it, shape rows first, and where its bytes lie."""

    name: str
    kind: int
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GgufFile:
    """Metadata and tensors of a file; a list of more than `MAX_LIST` elements is only counted, in `lengths`."""

    path: Path
    keys: dict[str, Any]
    lengths: dict[str, int]
    tensors: tuple[Tensor, ...]

    def numbers(self, tensor: Tensor) -> np.ndarray:
        """A tensor's values, in float32."""
        import gguf

        data = np.fromfile(self.path, np.uint8, tensor.nbytes, offset=tensor.offset)
        rows = data.reshape(*tensor.shape[:-1], -1)
        return gguf.dequantize(rows, gguf.GGMLQuantizationType(tensor.kind)).reshape(tensor.shape)


def read(file: Path) -> GgufFile:
    """The file's facts. Raises `DraftError` where it is no GGUF file or damaged, or the `gguf` package is missing."""
    stat = file.stat()
    return _read(file, stat.st_mtime_ns, stat.st_size)


@functools.lru_cache(maxsize=2)  # to skip a tokenizer takes a second
def _read(file: Path, _changed: int, size: int) -> GgufFile:
    try:
        import gguf
    except ImportError:
        raise DraftError(f"{file}: GGUF needs the gguf package: pip install 'dflash-mlx[gguf]'") from None
    if size < 24:
        raise DraftError(f"{file}: not a GGUF file, or cut short ({size} bytes)")
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            return _Walk(file, data, gguf.GGML_QUANT_SIZES).file()
        except (struct.error, UnicodeDecodeError, _Damaged) as error:
            what = str(error) if isinstance(error, _Damaged) else "it ends too early or holds no text where it should"
            raise DraftError(f"{file}: not a GGUF file, or damaged: {what}") from None


class _Damaged(Exception):
    """What is wrong with the file."""


class _Walk:
    """One pass over the head of a file."""

    def __init__(self, path: Path, data: mmap.mmap, sizes: dict[Any, tuple[int, int]]):
        self.path, self.data, self.at, self.elements = path, data, 0, 0
        self.sizes = {int(kind): size for kind, size in sizes.items()}
        self.keys: dict[str, Any] = {}
        self.lengths: dict[str, int] = {}

    def file(self) -> GgufFile:
        magic, version = self.data[:4], self.data[4:8]
        if magic != b"GGUF" or version not in (b"\2\0\0\0", b"\3\0\0\0"):
            raise _Damaged("its head names another format or version")
        self.at = 8
        tensors, keys = self.number("Q"), self.number("Q")
        if keys > MAX_KEYS or tensors > MAX_TENSORS:
            raise _Damaged(f"{keys} keys and {tensors} tensors, no draft has so many")
        for _ in range(keys):
            self.key()
        infos = [self.tensor_info() for _ in range(tensors)]
        align = self.keys.get("general.alignment", 32)
        if type(align) is not int or not 0 < align <= 2**20:
            raise _Damaged(f"general.alignment is {brief(align)}")
        start = -(-self.at // align) * align
        found = tuple(self.tensor(start, *info) for info in infos)
        if len({tensor.name for tensor in found}) != len(found):
            raise _Damaged("it names a tensor twice")
        return GgufFile(self.path, self.keys, self.lengths, found)

    def number(self, form: str) -> Any:
        (value,) = struct.unpack_from(f"<{form}", self.data, self.at)
        self.at += struct.calcsize(f"<{form}")
        # the decimal number that was written as float32: 1e-6, not 9.999999974752427e-07
        return float(str(np.float32(value))) if form == "f" else value

    def skip(self, size: int) -> int:
        """The place before `size` bytes, which must be there."""
        begin = self.at
        self.at += size
        if self.at > len(self.data):
            raise _Damaged("it is cut short")
        return begin

    def text(self) -> str:
        begin = self.skip(self.number("Q"))
        return self.data[begin : self.at].decode()

    def key(self) -> None:
        name, kind = self.text(), self.number("I")
        refuse_name(self.path, name)
        if name in self.keys or name in self.lengths:
            raise _Damaged(f"it has the key {name} twice")
        if kind != LIST:
            self.keys[name] = self.reader(kind)()
            return
        item, count = self.number("I"), self.number("Q")
        self.elements += count
        if self.elements > MAX_ELEMENTS:
            raise _Damaged(f"lists of more than {MAX_ELEMENTS} elements")
        self.lengths[name] = count
        read = self.reader(item)
        if count <= MAX_LIST:
            self.keys[name] = [read() for _ in range(count)]
        elif item == TEXT:
            for _ in range(count):
                self.skip(int.from_bytes(self.data[self.skip(8) : self.at], "little"))
        else:
            self.skip(count * struct.calcsize(NUMBERS[item]))

    def reader(self, kind: int) -> Callable[[], Any]:
        if kind == TEXT:
            return self.text
        if kind not in NUMBERS:
            raise _Damaged(f"a value of type {kind}")
        return functools.partial(self.number, NUMBERS[kind])

    def tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name, dimensions = self.text(), self.number("I")
        refuse_name(self.path, name)
        if dimensions > MAX_DIMENSIONS:
            raise _Damaged(f"{name} has {dimensions} dimensions")
        shape = tuple(reversed([self.number("Q") for _ in range(dimensions)]))
        return name, shape, self.number("I"), self.number("Q")

    def tensor(self, start: int, name: str, shape: tuple[int, ...], kind: int, offset: int) -> Tensor:
        if not shape or not all(0 < n <= MAX_SIZE for n in shape):
            raise _Damaged(f"{name} has the shape {brief(list(shape))}")
        if kind not in self.sizes:
            raise _Damaged(f"{name} is of type {kind}, which the gguf package does not know")
        block, nbytes = self.sizes[kind]
        if shape[-1] % block:
            raise _Damaged(f"{name} has {shape[-1]} columns, no multiple of {block}")
        for n in shape:
            nbytes *= n
        self.at = start + offset
        return Tensor(name, kind, shape, self.skip(nbytes // block), nbytes // block)
