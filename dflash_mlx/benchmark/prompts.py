"""What is decoded in a measurement: the built-in prompts, a file's, and prompts padded to a context length.

Knows text and token ids, no model.
"""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import DFlashError
from .texts import TEXTS

FIELDS = ("prompt", "text", "question", "problem")  # of a line of JSON, the first that is there
SEPARATOR = "\n---\n"


@dataclass(frozen=True)
class Prompt:
    """One prompt; `kind` groups the figures."""

    kind: str
    text: str


@dataclass(frozen=True)
class Task:
    """A prompt as it is decoded.

    Attributes:
        name: "kind 3"; ids: `[n]`; context: the length it was padded to, None as it is.
    """

    name: str
    kind: str
    ids: mx.array
    context: int | None = None


def built_in(chat: bool) -> list[Prompt]:
    """The built-in prompts: requests, or beginnings for a model without a chat template."""
    return [Prompt(kind, request if chat else beginning) for kind, request, beginning in TEXTS]


def read_file(file: Path) -> list[Prompt]:
    """Prompts of a file: `.jsonl` holds one a line (a string or an object), others hold them between lines of ---.

    Raises `DFlashError` for a file without prompts and for a line that holds none.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise DFlashError(f"--prompts {file}: is not UTF-8 text") from None
    if file.suffix == ".jsonl":
        lines = enumerate(text.splitlines(), 1)
        prompts = [_of_line(f"--prompts {file}, line {number}", line) for number, line in lines if line.strip()]
    else:
        parts = (part.strip("\n") for part in text.replace("\r\n", "\n").split(SEPARATOR))
        prompts = [Prompt("file", part) for part in parts if part.strip()]
    if not prompts:
        raise DFlashError(f"--prompts {file}: holds no prompt")
    return prompts


def evenly(prompts: Sequence[Any], samples: int | None) -> list[Any]:
    """At most `samples` of them, evenly spread, so that the choice is the same every time."""
    count = min(samples or len(prompts), len(prompts))
    return [prompts[i * len(prompts) // count] for i in range(count)]


def tasks(
    prompts: Sequence[Prompt],
    contexts: Sequence[int],
    render: Callable[[str], mx.array],
    tokenizer: Any,
    filler: Path | None = None,
) -> list[Task]:
    """The prompts as they are, or, where `contexts` names lengths, padded to each of them.

    Args:
        render: from the text of a prompt to ids, chat template included.
        filler: text to pad with; the sources of Python's standard library without one.

    Raises `DFlashError` when a prompt is longer than a context length or the filler is too short.
    """
    names = [f"{prompt.kind} {i}" for i, prompt in enumerate(prompts, 1)]
    if not contexts:
        return [Task(name, p.kind, render(p.text)) for name, p in zip(names, prompts, strict=True)]
    padding = _filler_ids(tokenizer, max(contexts), filler)
    return [
        Task(name, prompt.kind, _padded(name, prompt.text, length, padding, render, tokenizer), length)
        for length in contexts
        for name, prompt in zip(names, prompts, strict=True)
    ]


def _padded(
    name: str, text: str, length: int, padding: list[int], render: Callable[[str], mx.array], tokenizer: Any
) -> mx.array:
    """Ids of at most `length` tokens, a few fewer at most: filler, an empty line, the prompt."""
    own = render(text).shape[0]
    if own > length:
        raise DFlashError(f"--context-lengths {length}: prompt {name!r} alone has {own} tokens")
    ids, room = render(text), length - own
    while room > 0:  # joined text may take a token more or less than its parts
        ids = render(f"{tokenizer.decode(padding[:room])}\n\n{text}")
        if ids.shape[0] <= length:
            return ids
        room -= ids.shape[0] - length
    return render(text)


def _filler_ids(tokenizer: Any, length: int, file: Path | None) -> list[int]:
    ids: list[int] = []
    for text in _filler_texts(file):
        ids += tokenizer.encode(text, add_special_tokens=False)
        if len(ids) >= length:
            return ids[:length]
    source = f"--context-file {file}" if file else "the standard library's source"
    raise DFlashError(f"--context-lengths {length}: {source} has only {len(ids)} tokens; give more with --context-file")


def _filler_texts(file: Path | None) -> Iterator[str]:
    if file is not None:
        yield file.read_text(encoding="utf-8", errors="replace")
        return
    for source in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        yield source.read_text(encoding="utf-8", errors="replace")


def _of_line(where: str, line: str) -> Prompt:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise DFlashError(f"{where}: not valid JSON: {error}") from None
    kind = "file"
    if isinstance(entry, dict):
        kind = str(entry.get("kind", kind))
        entry = next((entry[name] for name in FIELDS if name in entry), None)
    if not isinstance(entry, str) or not entry:
        raise DFlashError(f"{where}: expected a string or an object with one of {', '.join(FIELDS)}")
    return Prompt(kind, entry)
