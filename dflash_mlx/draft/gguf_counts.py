"""Whether a GGUF file's counts are those of a draft, before a parser that keeps an object per element reads it."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

from ..errors import DraftError
from .headers import MAX_TENSORS

# Sizes of metadata values by type; 8 is text, 9 a list.
VALUE_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
TEXT, LIST = 8, 9
MAX_KEYS = 4096
MAX_ELEMENTS = 4_000_000  # of all lists; a vocabulary of 250,000 with its merges has a million


def check_counts(file: Path) -> None:
    """Raise `DraftError` for counts of keys, list elements or tensors that no draft has."""
    with file.open("rb") as stream:
        magic, version, tensors, keys = struct.unpack("<4sIQQ", stream.read(24).ljust(24, b"\0"))
        if magic != b"GGUF" or version not in (2, 3):
            raise DraftError(f"{file}: not a GGUF file of version 2 or 3")
        if keys > MAX_KEYS or tensors > MAX_TENSORS:
            raise DraftError(f"{file}: {keys} keys and {tensors} tensors; no draft has so many")
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                _count(data, keys)
            except (struct.error, KeyError, _TooMany):
                raise DraftError(
                    f"{file}: its metadata are damaged, or lists of more than {MAX_ELEMENTS} in all"
                ) from None


class _TooMany(Exception):
    """Lists with more elements than any draft has."""


def _count(data: mmap.mmap, keys: int) -> None:
    """Walk the metadata without keeping anything."""
    at, elements = 24, 0

    def number(form: str) -> int:
        nonlocal at
        (value,) = struct.unpack_from(form, data, at)
        at += struct.calcsize(form)
        return value

    for _ in range(keys):
        at += number("<Q")
        kind = number("<I")
        item, count = (number("<I"), number("<Q")) if kind == LIST else (kind, 1)
        elements += count
        if elements > MAX_ELEMENTS or item == LIST:  # lists in lists have no use in a draft
            raise _TooMany
        if item == TEXT:
            for _ in range(count):
                at += number("<Q")
        else:
            at += count * VALUE_BYTES[item]
