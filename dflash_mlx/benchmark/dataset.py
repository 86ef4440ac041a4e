"""Prompts of the public sets that speculative decoding is measured on, through the `datasets` library.

Knows where they are and which column holds the question, no model.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import DFlashError
from .prompts import Prompt, evenly

STEPS = "\nReason step by step and give the final answer in the last line."


@dataclass(frozen=True)
class Dataset:
    """Where a set is on the hub, and how a row becomes a request."""

    repo: str
    config: str | None
    split: str
    column: str
    text: Callable[[Any], str] = str


DATASETS = {
    "gsm8k": Dataset("openai/gsm8k", "main", "test", "question", lambda question: question + STEPS),
    "math500": Dataset("HuggingFaceH4/MATH-500", None, "test", "problem", lambda problem: problem + STEPS),
    "humaneval": Dataset(
        "openai/openai_humaneval", None, "test", "prompt",
        lambda prompt: f"Complete this Python function:\n\n{prompt}",
    ),
    "mbpp": Dataset(
        "google-research-datasets/mbpp", "sanitized", "test", "prompt",
        lambda prompt: f"{prompt}\nGive the whole function.",
    ),
    "mt-bench": Dataset("HuggingFaceH4/mt_bench_prompts", None, "train", "prompt", lambda turns: turns[0]),
}  # fmt: skip
READERS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".csv": "csv"}


def require(name: str, file: Path | None) -> None:
    """Raise `DFlashError`, before anything loads, when the set can't be read."""
    if name not in DATASETS:
        raise DFlashError(f"--dataset {name}: unknown, there are {', '.join(DATASETS)}")
    if importlib.util.find_spec("datasets") is None:
        raise DFlashError("--dataset needs the datasets library: pip install 'dflash-mlx[bench]'")
    if file is not None and file.suffix not in READERS:
        raise DFlashError(f"--dataset-file {file}: expected one of {', '.join(READERS)}")
    if file is not None and not file.is_file():
        raise DFlashError(f"--dataset-file {file}: no such file")


def load(name: str, samples: int | None = None, file: Path | None = None) -> list[Prompt]:
    """Prompts of a set, evenly spread over it; `kind` is the set's name.

    Args:
        samples: at most so many. file: a local copy (parquet, JSON lines, CSV) with the set's own columns.

    Raises `DFlashError` when it can't be loaded or has no such column.
    """
    require(name, file)
    from datasets import load_dataset

    entry = DATASETS[name]
    where = f"--dataset {name} ({file or entry.repo})"
    try:
        if file is not None:
            rows = load_dataset(READERS[file.suffix], data_files=str(file), split="train")
        else:
            rows = load_dataset(entry.repo, entry.config, split=entry.split)
    except Exception as error:  # the library raises a dozen kinds, from a dead network to a damaged file
        raise DFlashError(
            f"{where}: can't be loaded: {type(error).__name__}: {error}; --dataset-file takes a local copy"
        ) from error
    if entry.column not in rows.column_names:
        raise DFlashError(f"{where}: has no column {entry.column!r}, only {', '.join(rows.column_names)}")
    if not len(rows):
        raise DFlashError(f"{where}: is empty")
    return [Prompt(name, _text(entry, row, where)) for row in evenly(rows, samples)]


def _text(entry: Dataset, row: Mapping[str, Any], where: str) -> str:
    try:
        return entry.text(row[entry.column])
    except (TypeError, IndexError, KeyError):
        raise DFlashError(f"{where}: {entry.column!r} holds {row[entry.column]!r:.60}, not a question") from None
