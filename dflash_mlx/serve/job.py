"""One request on its way through the engine: its tokens, its text so far, and the queue that its reply is read from.

Made by the thread of the connection, then owned by the engine; only `cancel` and `replies` belong to both.
"""

from __future__ import annotations

import queue
from dataclasses import dataclass, field
from typing import cast

import mlx.core as mx
from mlx_lm.server import CompletionRequest, GenerationArguments

from ..decode.stop import StopStrings
from ..decode.text import TextStream
from .report import Report


@dataclass(frozen=True)
class Piece:
    """One token of the reply: its text (maybe none yet), and where asked for its log-probability and the best ones.

    The only piece of a reply of no tokens has none.
    """

    text: str
    token: int | None
    finish_reason: str | None = None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Progress:
    """Prompt tokens that were fed, of how many."""

    done: int
    total: int


@dataclass(frozen=True)
class Scores:
    """Log-probabilities of some of the prompt's tokens, in order, and the best ones at their places."""

    logprobs: tuple[float, ...]
    best: tuple[tuple[tuple[int, float], ...], ...]


Reply = Progress | Scores | Piece | Exception


@dataclass(eq=False)
class Job:
    """See the module.

    Attributes:
        prompt: token ids. boundaries: lengths of the prompt at which a later prompt may part from it.
        initial_state: of the text ("normal", "reasoning"), from the rendered prompt.
        block_size: asked for by the request, or None. end_tokens: ids that end the text.
        tokens: prompt and what was emitted. stored: how many of them the store's caches held when it began.
        scored: whether the log-probabilities of its prompt are still to be told.
        replies: this job with `Progress` and `Scores`, then with `Piece`s to one with a finish reason, or with an
            exception that ends it; several jobs may share the queue.
    """

    request: CompletionRequest
    args: GenerationArguments
    prompt: list[int]
    boundaries: list[int]
    initial_state: str
    block_size: int | None
    end_tokens: frozenset[int]
    text: TextStream
    stopping: StopStrings
    report: Report = field(default_factory=Report)
    tokens: list[int] = field(default_factory=list)
    stored: int = 0
    replies: queue.SimpleQueue[tuple[Job, Reply]] = field(default_factory=queue.SimpleQueue)
    scored: bool = False
    cancelled: bool = False
    done: bool = False  # its last piece is out

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        self.report.prompt_tokens = len(self.prompt)

    @property
    def emitted(self) -> int:
        return len(self.tokens) - len(self.prompt)

    @property
    def left(self) -> int:
        """Tokens that it may still emit."""
        return self.args.max_tokens - self.emitted

    def cancel(self) -> None:
        """Nobody waits any more; the engine drops it within a round."""
        self.cancelled = True

    def advance(self, token: int, logprobs: mx.array) -> Piece:
        """Take the next token; the piece is not sent yet, since the last one waits for the figures.

        Args:
            logprobs: `[V]` of the target.
        """
        self.tokens.append(token)
        self.report.count_token()
        ended = token in self.end_tokens
        last = ended or self.left == 0
        shown = self.stopping.add(("" if ended else self.text.add(token)) + (self.text.finish() if last else ""))
        stopped = self.stopping.found is not None
        if last or stopped:
            shown += self.stopping.finish()
        self.done = last or stopped
        reason = ("stop" if ended or stopped else "length") if self.done else None
        if not self.args.logprobs and self.args.top_logprobs <= 0:
            return Piece(shown, token, reason)
        best = mx.argsort(-logprobs)[: max(self.args.top_logprobs, 0)]
        values = cast(list[float], logprobs[best].astype(mx.float32).tolist())
        top = tuple(zip(cast(list[int], best.tolist()), values, strict=True))
        return Piece(shown, token, reason, cast(float, logprobs[token].item()), top)

    def finish_empty(self) -> None:
        """End a reply that may have no tokens."""
        self.done = True
        self.send(Piece("", None, "length"))

    def send(self, reply: Reply) -> None:
        self.replies.put((self, reply))
