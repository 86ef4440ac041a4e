"""Which tensors a folder holds, whatever wrote it: one table of the formats that are read.

A new format is a module with the members of `Reader` and an entry here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import mlx.core as mx

from ..errors import DraftError
from . import gguf, safetensors, torch_files
from .folder import check_folder
from .tensor_info import MAX_TENSORS, TensorInfo


class Reader(Protocol):
    """One format. All of it raises `DraftError` for a file that is damaged or can't be read here.

    Attributes:
        SUFFIXES: of its files.
    """

    @property
    def SUFFIXES(self) -> tuple[str, ...]: ...

    def weight_files(self, folder: Path) -> list[Path]:
        """The files that make up a checkpoint; none where a folder has no such files."""

    def file_headers(self, file: Path) -> dict[str, TensorInfo]:
        """The tensors of one file by z-lab's names or those of the file; data stay on disk."""

    def load_file(self, file: Path) -> Mapping[str, mx.array]:
        """The tensors of one file; their data is read when it is evaluated, or looked up."""


READERS: tuple[Reader, ...] = (safetensors, torch_files, gguf)  # the first of which a folder has files


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
    for reader in READERS:
        if files := reader.weight_files(folder):
            return files
    raise DraftError(f"{folder}: no safetensors file")


def file_headers(file: Path) -> dict[str, TensorInfo]:
    """The tensors of one file; data stay on disk."""
    return _reader(file).file_headers(file)


def load_file(file: Path) -> Mapping[str, mx.array]:
    """The tensors of one file; their data is read when it is evaluated, or looked up."""
    return _reader(file).load_file(file)


def _reader(file: Path) -> Reader:
    """By the file's name; an index may give a safetensors file any."""
    return next((reader for reader in READERS if file.suffix in reader.SUFFIXES), safetensors)
