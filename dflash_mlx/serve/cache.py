"""Prompt caches over requests: what of a new prompt earlier ones already fed. Bounded by bytes and by number.

An entry is never changed: a request gets copies, which share their arrays until one of them is written to.
Only the engine's thread may use it. Knows tokens and caches, no request.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ..decode.caches import align
from ..prompt_cache import can_be_cut, cut
from .disk import DiskTier

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Entry:
    """Caches that hold exactly `tokens`; on disk only where `target` is None.

    Attributes:
        target, draft: cache entries of both models; a batch leaves none of the draft.
        file: its copy on disk, if it has one.
    """

    tokens: np.ndarray  # [n] int32
    target: list[Any] | None = None
    draft: list[Any] | None = None
    file: Path | None = None

    @property
    def nbytes(self) -> int:
        return sum(cache.nbytes for cache in (*(self.target or ()), *(self.draft or ())))


@dataclass
class Hit:
    """What a prompt starts from: caches of its own that hold its first `held` tokens."""

    target: list[Any] | None
    draft: list[Any] | None
    held: int


class CacheStore:
    """The entries, oldest use first.

    Args:
        max_bytes, max_entries: of the entries in memory; `disk` has a bound of its own.
    """

    def __init__(self, max_bytes: int, max_entries: int, disk: DiskTier | None = None):
        self.max_bytes, self.max_entries, self.disk = max_bytes, max_entries, disk
        self.entries: list[Entry] = []
        if disk is not None:
            self.entries = [Entry(tokens, file=file) for file, tokens in disk.index()]

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries)

    def __len__(self) -> int:
        return sum(entry.target is not None for entry in self.entries)

    def fetch(self, tokens: Sequence[int]) -> Hit:
        """Caches for the longest beginning of `tokens` that is held; at least one token is left to feed."""
        wanted = np.asarray(tokens, np.int32)
        candidates = [(_shared(entry.tokens, wanted), entry) for entry in self.entries]
        for shared, entry in sorted(candidates, key=lambda pair: -pair[0]):
            held = min(shared, len(wanted) - 1)
            if held == 0:
                break
            hit = self._hit(entry, held)
            if hit is not None:
                return hit
        return Hit(None, None, 0)

    def insert(self, tokens: Sequence[int], target: list[Any], draft: list[Any] | None) -> None:
        """Take caches over; the caller must not use them any more. Entries that these make useless go."""
        entry = Entry(np.asarray(tokens, np.int32), target, draft or None)
        if entry.nbytes > self.max_bytes or not len(entry.tokens):
            return
        for other in self._covered_by(entry):
            if len(other.tokens) == len(entry.tokens):
                entry.file = other.file
            elif other.file is not None:  # it goes when this one has been written
                other.target = other.draft = None
                continue
            self.entries.remove(other)
        self.entries.append(entry)
        self._shrink()

    def clear(self) -> None:
        """Drop what is in memory; files stay."""
        self.entries = []

    def write_one(self) -> bool:
        """Write one entry to disk that is not there yet; False when there is none. For idle moments."""
        if self.disk is None:
            return False
        most = self.disk.max_bytes
        unwritten = (e for e in reversed(self.entries) if e.file is None and e.target is not None and e.nbytes <= most)
        entry = next(unwritten, None)
        return entry is not None and self._write(entry)

    def _hit(self, entry: Entry, held: int) -> Hit | None:
        """Copies of an entry's caches, cut to `held` tokens; None where they can't be had or can't be cut."""
        if not self._in_memory(entry):
            return None
        assert entry.target is not None
        surplus = len(entry.tokens) - held
        if surplus and not all(map(can_be_cut, entry.target)):
            self._shrink()
            return None
        # Before it is touched: an entry from disk can be larger than what may stay in memory, and goes at once.
        target, draft = copy.deepcopy(entry.target), copy.deepcopy(entry.draft)
        self._touch(entry)
        if surplus:
            cut(target, surplus)
            align(draft or (), held)
        return Hit(target, draft, held)

    def _covered_by(self, entry: Entry) -> list[Entry]:
        """Other entries that hold the same tokens, or a beginning of them where the caches can be cut to it."""
        assert entry.target is not None
        shortest = 0 if all(map(can_be_cut, entry.target)) else len(entry.tokens)
        return [
            other
            for other in self.entries
            if other is not entry and shortest <= len(other.tokens) == _shared(other.tokens, entry.tokens)
        ]

    def _write(self, entry: Entry) -> bool:
        assert self.disk is not None
        assert entry.target is not None
        entry.file, dropped = self.disk.write(entry.tokens, entry.target, entry.draft)
        for other in [*self.entries]:
            if other.file in dropped:
                other.file = None
                if other.target is None:
                    self.entries.remove(other)
        for other in self._covered_by(entry) if entry.file else ():
            self._forget(other)
        return entry.file is not None

    def _in_memory(self, entry: Entry) -> bool:
        """Whether its caches can be used now, read from disk if need be; a file that can't be is forgotten."""
        if entry.target is None:
            assert self.disk is not None
            assert entry.file is not None
            loaded = self.disk.read(entry.file)
            if loaded is None:
                self.entries.remove(entry)
                return False
            entry.target, entry.draft = loaded
        return True

    def _touch(self, entry: Entry) -> None:
        self.entries.remove(entry)
        self.entries.append(entry)
        if entry.file is not None and self.disk is not None:
            self.disk.touch(entry.file)
        self._shrink()

    def _forget(self, entry: Entry) -> None:
        self.entries.remove(entry)
        if entry.file is not None and self.disk is not None:
            self.disk.remove(entry.file)

    def _shrink(self) -> None:
        """Out of memory, to disk where there is a tier, else for good: what can't stay alone, then oldest first."""
        while len(self) > self.max_entries or self.nbytes > self.max_bytes:
            held = [entry for entry in self.entries if entry.target is not None]
            going = next((entry for entry in held if entry.nbytes > self.max_bytes), held[0])
            if self.disk is not None and going.file is None:
                self._write(going)
            if going.file is None:
                self.entries.remove(going)
            going.target = going.draft = None
            mx.clear_cache()


def _shared(ours: np.ndarray, theirs: np.ndarray) -> int:
    """Length of the common beginning."""
    n = min(len(ours), len(theirs))
    different = np.flatnonzero(ours[:n] != theirs[:n])
    return int(different[0]) if len(different) else n
