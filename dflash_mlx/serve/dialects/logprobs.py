"""Log-probabilities as clients read them: the chat route's list of tokens, the text route's columns."""

from __future__ import annotations

from itertools import chain
from typing import Any, Protocol

from ...decode.text import TextStream
from ..job import Piece, Scores
from ..token_text import TokenText

Best = tuple[tuple[int, float], ...]


class Logprobs(Protocol):
    """Collects them until they are taken."""

    def add(self, piece: Piece) -> None: ...

    def take(self) -> dict[str, Any] | None:
        """What came since the last time, None where nothing did."""


class NoLogprobs:
    """Of a request that does not ask for them."""

    def add(self, piece: Piece) -> None:
        pass

    def take(self) -> None:
        return None


class ChatLogprobs:
    """OpenAI's entries of a chat completion, with mlx-lm's id."""

    def __init__(self, spell: TokenText):
        self.spell = spell
        self._entries: list[dict[str, Any]] = []

    def add(self, piece: Piece) -> None:
        if piece.token is None or piece.logprob is None:
            return
        top = [self._entry(token, value) for token, value in piece.top]
        self._entries.append({**self._entry(piece.token, piece.logprob), "top_logprobs": top})

    def take(self) -> dict[str, Any] | None:
        entries, self._entries = self._entries, []
        return {"content": entries} if entries else None

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text, raw = self.spell.text(token), self.spell.bytes(token)
        return {"id": token, "token": text, "logprob": logprob, "bytes": list(raw)}


class TextLogprobs:
    """The columns of a text completion: tokens, their log-probabilities, the best at each place, where they begin.

    Beside OpenAI's four there are the tokens' ids, and mlx-lm's server's `content`: what was written, without an echo,
    as a chat completion's entries. The best hold the token itself too, though it be none of them, as at
    OpenAI; texts that are spelled alike keep the likelier one.
    """

    def __init__(self, spell: TokenText):
        self.spell = spell
        self._content = ChatLogprobs(spell)
        self._stream = TextStream(spell.tokenizer)
        self._offset = 0  # characters of the text in front of the next token
        self._columns = self._empty()

    def add(self, piece: Piece) -> None:
        self._content.add(piece)
        if piece.token is not None and piece.logprob is not None:
            self._add(piece.token, piece.logprob, piece.top)

    def add_prompt(self, prompt: list[int], scores: list[Scores], text: str) -> None:
        """An echoed prompt; its first token follows nothing, so it has no log-probability.

        Args:
            text: as it is shown; a mark that the tokenizer put in front of it (BOS) is not.
        """
        self._add(prompt[0], None, ())
        known = chain.from_iterable(zip(some.logprobs, some.best, strict=True) for some in scores)
        for token, (logprob, top) in zip(prompt[1:], known, strict=True):
            self._add(token, logprob, top)
        surplus = self._offset + len(self._stream.finish()) - len(text)
        self._stream, self._offset = TextStream(self.spell.tokenizer), len(text)
        self._columns["text_offset"] = [max(0, at - surplus) for at in self._columns["text_offset"]]

    def take(self) -> dict[str, Any] | None:
        columns, self._columns = self._columns, self._empty()
        return {**columns, **(self._content.take() or {"content": []})} if columns["tokens"] else None

    def _add(self, token: int, logprob: float | None, best: Best) -> None:
        text = self.spell.legacy(token)
        column = self._columns
        column["tokens"].append(text)
        column["token_ids"].append(token)
        column["token_logprobs"].append(logprob)
        column["text_offset"].append(self._offset)
        self._offset += len(self._stream.add(token))
        if logprob is None:
            column["top_logprobs"].append(None)
            return
        top: dict[str, float] = {}
        for other, value in best:
            top.setdefault(self.spell.legacy(other), value)
        top.setdefault(text, logprob)
        column["top_logprobs"].append(top)

    def _empty(self) -> dict[str, list[Any]]:
        return {"tokens": [], "token_ids": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
