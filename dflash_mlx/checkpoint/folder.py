"""What may be opened in a draft's folder: regular files of its own, none larger than any draft needs.

The files are a stranger's: nothing outside the folder is opened. Knows files; knows no config and no draft.
"""

from __future__ import annotations

from pathlib import Path

from ..errors import DraftError
from .fields import brief, read_json

MAX_HEADER = 16 * 2**20  # a draft's is some kB; parsed JSON takes up to 25 times its bytes
INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = {  # by which a draft tells of what tokenizer it is, and the most bytes that each may have
    "tokenizer.json": 128 * 2**20, "tokenizer_config.json": 2**24, "added_tokens.json": 2**24,
    "special_tokens_map.json": 2**20,
}  # fmt: skip
JSON_FILES = {
    "config.json": 2**20, "generation_config.json": 2**20, "hf_quant_config.json": 2**20,
    INDEX: MAX_HEADER, **TOKENIZER_FILES,
}  # fmt: skip


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
