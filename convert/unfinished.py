"""A folder in the making: it appears whole or not at all, and what a killed process left of one is removed.

The maker holds a lock on its folder, which the system lets go when the process ends, however it ends. Knows folders and
locks; knows no draft.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from dflash_mlx.errors import DFlashError

MARK = "dflash-mlx-"  # in the names of such folders, so that nobody else's is taken for one


@contextlib.contextmanager
def whole(destination: Path, notes: list[str]) -> Iterator[Path]:
    """A temporary folder beside `destination` that takes its place at the end, or goes without a trace.

    `notes` gets a line for each folder of a process that was killed.
    """
    new_parents = [parent for parent in destination.parents if not parent.exists()]
    destination.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{destination.name}.{MARK}"
    _remove_dead(destination.parent, prefix, notes)
    temporary, lock = _locked(destination.parent, prefix)
    try:
        yield temporary
        temporary.chmod(0o755)  # mkdtemp's are private
        try:
            temporary.rename(destination)
        except OSError:
            if not destination.exists():
                raise
            raise DFlashError(f"{destination} was made by somebody else meanwhile; choose another --mlx-path") from None
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        for parent in new_parents:
            with contextlib.suppress(OSError):  # someone else uses it by now
                parent.rmdir()
        raise
    finally:
        os.close(lock)


def _locked(parent: Path, prefix: str) -> tuple[Path, int]:
    """A new folder, and the descriptor that holds its lock where the file system has locks."""
    while True:
        folder = Path(tempfile.mkdtemp(dir=parent, prefix=prefix))
        lock = os.open(folder, os.O_RDONLY)
        with contextlib.suppress(OSError):  # without locks nothing can be told dead either
            fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():
            return folder, lock
        os.close(lock)  # another process took it for dead before it was locked


def _remove_dead(parent: Path, prefix: str, notes: list[str]) -> None:
    """Remove the folders whose makers are gone."""
    for folder in parent.glob(f"{glob.escape(prefix)}*"):
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)
        except OSError:  # no folder, another user's, or gone by now
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # its maker is at work, or nobody can tell
            continue
        else:
            shutil.rmtree(folder, ignore_errors=True)
            notes.append(
                f"{folder} {'could not be' if folder.exists() else 'was'} removed: left by a killed conversion"
            )
        finally:
            os.close(lock)
