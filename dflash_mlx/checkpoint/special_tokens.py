"""Special tokens of a tokenizer and their ids, from the files beside a model. Knows files and no tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import DraftError
from .fields import Fields, brief, read_json

# Where a tokenizer states them: file -> (field, what it should be, its value to token -> id).
FILES: dict[str, tuple[str | None, str, Callable[[Any], dict[str, int]]]] = {
    "added_tokens.json": (
        None, "an object of tokens with ids", lambda ids: {token: int(number) for token, number in ids.items()}),
    "tokenizer_config.json": (
        "added_tokens_decoder", "an object of ids with tokens",
        lambda tokens: {token["content"]: int(number) for number, token in tokens.items()}),
    "tokenizer.json": (
        "added_tokens", "a list of tokens with ids",
        lambda tokens: {token["content"]: int(token["id"]) for token in tokens}),
}  # fmt: skip


def special_tokens(folder: Path) -> dict[str, int]:
    """Token -> id, from each file that may state them. Raises `DraftError` for one that can't be read."""
    found: dict[str, int] = {}
    for name, (field, what, read) in FILES.items():
        if not (file := folder / name).is_file():
            continue
        stated = read_json(file)
        added = (stated.get(field) if field else stated) or {}
        try:
            found |= read(added)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            raise DraftError(f"{file}: {f'{field}: ' if field else ''}{brief(added)} is not {what}") from None
    return found


def named_mask(read: Fields, *folders: Path) -> int | None:
    """The id of a mask token that a config states as text (`mask_token`, SGLang); None where it states an id, or none.

    Args:
        folders: whose tokenizers are asked, in this order.

    Raises `DraftError` when none of them has the token.
    """
    token = read.get("mask_token", default=None)
    if token is None or read.get("mask_token_id", default=None) is not None:
        return None
    for folder in folders:
        if isinstance(token, str) and (found := special_tokens(folder).get(token)) is not None:
            return found
    where = " and ".join(map(str, folders))
    raise read.error("mask_token", f"{brief(token)} is no special token of a tokenizer in {where}; state mask_token_id")
