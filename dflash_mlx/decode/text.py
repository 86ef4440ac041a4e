"""Streamed text: chunks that join to exactly `tokenizer.decode(ids)`.

mlx-lm's detokenizers trim spaces and lose invalid bytes; this one asks the tokenizer itself, over a short
window, and holds back what later tokens could still change. Knows no model.
"""

from __future__ import annotations

import re
from typing import Any

REPLACEMENT = "\ufffd"
WINDOW = 8  # tokens of settled text kept in front of new ones, so that spaces and joins come out right
BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
CLEANUP = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")  # transformers' own list


class TextStream:
    """Turns tokens into text as they come.

    Args:
        tokenizer: transformers' tokenizer or mlx-lm's wrapper of one; special tokens are kept, as
            `decode(ids)` does by default.
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self._ids: list[int] = []  # the window: settled tokens, then new ones
        self._sent = 0  # characters of the window's text that were handed out
        self._bytes: dict[int, bool] = {}  # whether a token is a byte
        self._cleans = bool(getattr(tokenizer, "clean_up_tokenization_spaces", False))

    def add(self, token: int) -> str:
        """The text that is settled by this token, often a word, sometimes nothing."""
        self._ids.append(token)
        if self._byte_token(token):
            return ""  # a run of byte tokens decodes as a whole, and later bytes can change all of it
        text = self.tokenizer.decode(self._ids)
        chunk = text[self._sent : self._settled(text)]
        self._sent += len(chunk)
        self._slide(text)
        return chunk

    def finish(self) -> str:
        """The rest; no token may follow."""
        text = self.tokenizer.decode(self._ids) if self._ids else ""
        chunk = text[self._sent :]
        self._sent += len(chunk)
        return chunk

    def _byte_token(self, token: int) -> bool:
        if token not in self._bytes:
            name = self.tokenizer.convert_ids_to_tokens(token)
            self._bytes[token] = isinstance(name, str) and BYTE_TOKEN.fullmatch(name) is not None
        return self._bytes[token]

    def _settled(self, text: str) -> int:
        """How much of the text no later token can change."""
        end = len(text.rstrip(REPLACEMENT)) if text.endswith(REPLACEMENT) else len(text)
        if self._cleans:
            for size in range(min(4, end), 0, -1):
                if any(mark.startswith(text[end - size : end]) for mark in CLEANUP):
                    return max(end - size, self._sent)
        return max(end, self._sent)

    def _slide(self, text: str) -> None:
        """Forget old tokens once the rest of the window decodes to the same tail without them."""
        if len(self._ids) < 2 * WINDOW or self._sent < len(text):
            return
        rest = self._ids[-WINDOW:]
        tail = self.tokenizer.decode(rest)
        if tail and text.endswith(tail) and not tail.startswith(REPLACEMENT) and not self._byte_token(rest[0]):
            self._ids, self._sent = rest, len(tail)
