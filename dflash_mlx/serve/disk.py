"""Prompt caches in files, so that they survive a restart: one safetensors file an entry, in mlx-lm's format.

Files appear whole or not at all, carry the fingerprint of the models that made them and are only read by the
same. The folder is bounded; the file that was used longest ago goes first. Several servers may share a folder: any
file can vanish at any moment. Knows no request.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import stat
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np

from ..errors import DFlashError
from ..prompt_cache import load_prompt_cache, save_prompt_cache

log = logging.getLogger(__name__)

SUFFIX = ".prompt.safetensors"
PART = f".part{SUFFIX}"
FORMAT = 1  # of what is written beside mlx-lm's own
STALE_SECONDS = 3600  # without a write: nobody works on that part any more
PAUSE_SECONDS = 300  # after a write that failed


class DiskTier:
    """See the module.

    Args:
        folder: made if it is missing. max_bytes: of all files together. fingerprint: of the models and cache flags.
        entries: cache entries of the target in a file; what follows is the draft's.
    """

    def __init__(self, folder: Path, max_bytes: int, fingerprint: str, entries: int):
        self.folder, self.max_bytes, self.fingerprint, self.entries = folder, max_bytes, fingerprint, entries
        self._pause_ends = 0.0
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)  # prompts are nobody else's business
        except OSError as error:
            raise DFlashError(f"--prompt-cache-dir {folder}: {error.strerror}; give a folder to write to") from None
        for part, state in self._files(PART):
            if time.time() - state.st_mtime > STALE_SECONDS:
                self.remove(part)

    @property
    def paused(self) -> bool:
        """Whether a write failed a short time ago."""
        return time.monotonic() < self._pause_ends

    def index(self) -> Iterator[tuple[Path, np.ndarray]]:
        """Files made by the same models, and the tokens each holds; those of other models are left alone."""
        for file, _ in self._files():
            written = self._metadata(file)
            if written is None:
                self.remove(file)
            elif written[0] == self.fingerprint:
                yield file, written[1]

    def write(self, tokens: np.ndarray, target: list[Any], draft: list[Any] | None) -> tuple[Path | None, set[Path]]:
        """Returns the file, None when it can't be written now, and the files that had to go for it."""
        caches = [*target, *(draft or ())]
        size = sum(cache.nbytes for cache in caches)
        if self.paused or size > self.max_bytes:
            return None, set()
        name = hashlib.sha256(self.fingerprint.encode() + tokens.tobytes()).hexdigest()[:32]
        file, part = self.folder / f"{name}{SUFFIX}", self.folder / f"{name}.{uuid.uuid4().hex}{PART}"
        metadata = {"models": self.fingerprint, "tokens": " ".join(map(str, tokens.tolist()))}
        gone: set[Path] = set()
        try:
            gone |= self._drop_oldest(size - shutil.disk_usage(self.folder).free)
            part.touch(mode=0o600)  # before there is anything in it to read
            save_prompt_cache(str(part), caches, metadata)
            os.replace(part, file)
        except (OSError, RuntimeError) as error:
            self.remove(part)
            self._pause_ends = time.monotonic() + PAUSE_SECONDS
            log.error("no prompt caches are written to disk for %d s: %s", PAUSE_SECONDS, error)
            return None, gone
        held = sum(state.st_size for _, state in self._files())
        return file, gone | self._drop_oldest(held - self.max_bytes, keep=file)

    def read(self, file: Path) -> tuple[list[Any], list[Any] | None] | None:
        """The target's caches and the draft's, if it has any; None when the file is gone or damaged."""
        try:
            caches, metadata = load_prompt_cache(str(file), return_metadata=True)
            if metadata.get("models") != self.fingerprint or len(caches) < self.entries:
                raise DFlashError("made by other models")
            mx.eval([cache.state for cache in caches])
        except (DFlashError, OSError, RuntimeError, ValueError) as error:
            log.warning("%s is not used: %s", file.name, error)
            self.remove(file)
            return None
        return caches[: self.entries], caches[self.entries :] or None

    def touch(self, file: Path) -> None:
        """Note that it was used, if it is still there."""
        try:
            os.utime(file)
        except OSError as error:
            log.debug("%s: %s", file.name, error)

    def remove(self, file: Path) -> None:
        try:
            file.unlink(missing_ok=True)
        except OSError as error:
            log.warning("%s can't be removed: %s", file.name, error)

    def _files(self, suffix: str = SUFFIX) -> list[tuple[Path, os.stat_result]]:
        """Oldest use first. What else has such a name (a folder, a link to nowhere) is nobody's cache."""
        files = []
        for file in self.folder.glob(f"*{suffix}"):
            try:
                state = file.stat()
            except OSError:  # another server has removed it
                continue
            if stat.S_ISREG(state.st_mode) and file.name.endswith(PART) == (suffix == PART):
                files.append((file, state))
        return sorted(files, key=lambda pair: pair[1].st_mtime_ns)

    def _drop_oldest(self, excess: int, keep: Path | None = None) -> set[Path]:
        """Remove files of that many bytes together, or none where all would not do."""
        gone: set[Path] = set()
        files = [(file, state.st_size) for file, state in self._files() if file != keep]
        if excess > sum(size for _, size in files):
            return gone
        for file, size in files:
            if excess <= 0:
                break
            self.remove(file)
            gone.add(file)
            excess -= size
        return gone

    def _metadata(self, file: Path) -> tuple[str | None, np.ndarray] | None:
        """The fingerprint and the tokens written beside the caches; None for a file that is damaged."""
        try:
            # mx.load reads tensors only when they are used.
            flat = cast(tuple[Any, dict[str, str]], mx.load(str(file), return_metadata=True))[1]
            return flat.get("0.models"), np.array(flat["0.tokens"].split(), np.int32)
        except (RuntimeError, ValueError, KeyError, OverflowError) as error:
            log.warning("%s is damaged and goes: %s", file.name, error)
            return None
