"""Prompt caches in files, so that they survive a restart: one safetensors file an entry, in mlx-lm's format.

Files appear whole or not at all, carry the fingerprint of the models that made them and are only read by the
same. The folder is bounded; the file that was used longest ago goes first. Knows no request.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np

from ..errors import DFlashError
from ..prompt_cache import load_prompt_cache, save_prompt_cache

log = logging.getLogger(__name__)

SUFFIX = ".prompt.safetensors"


class DiskTier:
    """See the module.

    Args:
        folder: made if it is missing. max_bytes: of all files together. fingerprint: of the models and cache flags.
        entries: cache entries of the target in a file; what follows is the draft's.
    """

    def __init__(self, folder: Path, max_bytes: int, fingerprint: str, entries: int):
        self.folder, self.max_bytes, self.fingerprint, self.entries = folder, max_bytes, fingerprint, entries
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)  # prompts are nobody else's business
            for left_over in folder.glob(f"*.part{SUFFIX}"):
                left_over.unlink()
        except OSError as error:
            raise DFlashError(f"--prompt-cache-dir {folder}: {error.strerror}; give a folder to write to") from None

    def index(self) -> Iterator[tuple[Path, np.ndarray]]:
        """Files made by the same models, and the tokens each holds; those of other models are left alone."""
        for file in self._files():
            metadata = self._metadata(file)
            if metadata is None:
                self.remove(file)
            elif metadata.get("models") == self.fingerprint:
                yield file, np.array(metadata["tokens"].split(), np.int32)

    def write(
        self, tokens: np.ndarray, target: list[Any], draft: list[Any] | None
    ) -> tuple[Path | None, set[Path | None]]:
        """Returns the file, None when it can't be written, and the files that had to go for it."""
        name = hashlib.sha256(self.fingerprint.encode() + tokens.tobytes()).hexdigest()[:32]
        file, part = self.folder / f"{name}{SUFFIX}", self.folder / f"{name}.part{SUFFIX}"
        metadata = {"models": self.fingerprint, "tokens": " ".join(map(str, tokens.tolist()))}
        try:
            part.touch(mode=0o600)  # before there is anything in it to read
            save_prompt_cache(str(part), [*target, *(draft or ())], metadata)
            os.replace(part, file)
            return file, self._shrink(file)
        except (OSError, RuntimeError) as error:
            part.unlink(missing_ok=True)
            log.error("prompt caches are not kept on disk any more: %s", error)
            return None, set()

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
        """Note that it was used."""
        if file.exists():
            os.utime(file)

    def remove(self, file: Path) -> None:
        file.unlink(missing_ok=True)

    def _files(self) -> list[Path]:
        """Oldest use first."""
        files = [f for f in self.folder.glob(f"*{SUFFIX}") if not f.name.endswith(f".part{SUFFIX}")]
        return sorted(files, key=lambda file: file.stat().st_mtime_ns)

    def _shrink(self, newest: Path) -> set[Path | None]:
        gone: set[Path | None] = set()
        files = self._files()
        size = sum(file.stat().st_size for file in files)
        for file in files:
            if size <= self.max_bytes:
                break
            if file != newest:
                size -= file.stat().st_size
                self.remove(file)
                gone.add(file)
        return gone

    def _metadata(self, file: Path) -> dict[str, str] | None:
        """What was written beside the caches; None for a file that is damaged."""
        try:
            # mx.load reads tensors only when they are used.
            flat = cast(tuple[Any, dict[str, str]], mx.load(str(file), return_metadata=True))[1]
        except (RuntimeError, ValueError) as error:
            log.warning("%s is damaged and goes: %s", file.name, error)
            return None
        metadata = {key.removeprefix("0."): value for key, value in flat.items() if key.startswith("0.")}
        return metadata if "tokens" in metadata else None
