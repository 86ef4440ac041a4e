"""One choice of a completion: the job that writes it, and its text, calls and log-probabilities in OpenAI's shapes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..job import Job, Piece, Scores
from .answer import Answer, Part, Raw
from .logprobs import Logprobs, TextLogprobs


class Choice:
    """A choice of a chat completion, or of a text completion where `answer` is `Raw`, from first to last token.

    Args:
        echo: text that a text completion begins with, its own prompt; "" for none.
    """

    def __init__(self, index: int, job: Job, answer: Answer | Raw, logprobs: Logprobs, echo: str = ""):
        self.index, self.job, self.answer, self.logprobs, self.echo = index, job, answer, logprobs, echo
        self.chat = isinstance(answer, Answer)
        self.reason: str | None = None
        self._scores: list[Scores] = []
        self._texts = {"normal": "", "reasoning": ""}
        self._calls: list[dict[str, Any]] = []

    def add_scores(self, scores: Scores) -> None:
        """Take the log-probabilities of the next of the prompt's tokens."""
        self._scores.append(scores)

    def add(self, piece: Piece) -> Iterator[Part]:
        """The parts of the text that are settled by this token; the first brings the echo."""
        if self.echo:
            if isinstance(self.logprobs, TextLogprobs):
                self.logprobs.add_prompt(self.job.prompt, self._scores, self.echo)
            yield self._keep(Part("normal", self.echo))
            self.echo = ""
        self.logprobs.add(piece)
        last, by_itself = piece.finish_reason is not None, piece.finish_reason == "stop" and not self.job.stopping.found
        for part in self.answer.add(piece.text, last, by_itself):
            yield self._keep(part)
        if piece.finish_reason is not None:
            self.reason = "tool_calls" if piece.finish_reason == "stop" and self.answer.called else piece.finish_reason

    def whole(self) -> dict[str, Any]:
        """All of it."""
        if not self.chat:
            return self._shape({"text": self._texts["normal"]})
        message: dict[str, Any] = {"role": "assistant", "content": self._texts["normal"] or None}
        message.update({"reasoning": self._texts["reasoning"]} if self._texts["reasoning"] else {})
        message.update({"tool_calls": self._calls} if self._calls else {})
        return self._shape({"message": message})

    def delta(self, part: Part | None) -> dict[str, Any]:
        """A part of it, for a stream; None for the packet that ends it."""
        if not self.chat:
            return self._shape({"text": part.text if part else ""}, ends=part is None)
        delta: dict[str, Any] = {"role": "assistant"}
        if part is not None and part.calls:
            delta["tool_calls"] = list(part.calls)
        elif part is not None:
            delta["content" if part.kind == "normal" else "reasoning"] = part.text
        return self._shape({"delta": delta}, ends=part is None)

    def _keep(self, part: Part) -> Part:
        self._calls += part.calls
        if not part.calls:
            self._texts[part.kind] += part.text
        return part

    def _shape(self, content: dict[str, Any], ends: bool = True) -> dict[str, Any]:
        choice = {"index": self.index, "finish_reason": self.reason if ends else None}
        if ends and self.reason == "stop" and self.job.stopping.found:  # the stop string, which OpenAI does not name
            choice["stop_reason"] = self.job.stopping.found
        logprobs = self.logprobs.take()
        return {**choice, **content, **({"logprobs": logprobs} if logprobs else {})}
