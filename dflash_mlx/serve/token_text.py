"""The text and the bytes of single tokens, as log-probabilities name them. Knows a tokenizer, no model."""

from __future__ import annotations

from typing import Any

from ..decode.text import BYTE_TOKEN, REPLACEMENT


def _byte_alphabet() -> dict[str, int]:
    """The characters that byte-level vocabularies (GPT-2's and later) write bytes as."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTES = _byte_alphabet()


class TokenText:
    """Spells single tokens.

    Args:
        tokenizer: transformers' tokenizer or mlx-lm's wrapper of one.
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        # Alone, or first in a text, a token may lose the space that it begins with.
        self._before: list[int] = tokenizer.encode("a", add_special_tokens=False)[-1:]
        self._skipped = len(tokenizer.decode(self._before))

    def text(self, token: int) -> str:
        """As it stands in the middle of a text; a part of a character is U+FFFD."""
        return str(self.tokenizer.decode([*self._before, token])[self._skipped :])

    def bytes(self, token: int) -> bytes:
        """In UTF-8, of a token that is only a part of a character too."""
        text = self.text(token)
        name = self.tokenizer.convert_ids_to_tokens(token)
        if isinstance(name, str) and BYTE_TOKEN.fullmatch(name):
            return bytes([int(name[3:5], 16)])
        if REPLACEMENT in text and isinstance(name, str) and all(c in BYTES for c in name):
            return bytes(BYTES[c] for c in name)
        return text.encode()

    def legacy(self, token: int) -> str:
        """OpenAI's completions API: the text, or `bytes:` and escapes for a part of a character."""
        raw = self.bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
