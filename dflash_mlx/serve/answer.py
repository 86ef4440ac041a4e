"""The text of a reply, taken apart: reasoning, answer and tool calls, piece by piece. Knows no HTTP and no engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mlx_lm.generate import TextStateMachine, make_text_state_machine
from mlx_lm.server import ToolCallFormatter


@dataclass(frozen=True)
class Part:
    """A stretch of one kind ("normal", "reasoning") or finished tool calls."""

    kind: str
    text: str = ""
    calls: tuple[dict[str, Any], ...] = ()


class Raw:
    """The text of a raw completion: all of it is answer, marks included."""

    called = 0

    def add(self, text: str, last: bool = False) -> Iterator[Part]:
        if text:
            yield Part("normal", text)


class Answer:
    """Splits text as it comes, with mlx-lm's own state machine and tool parsers.

    Args:
        tokenizer: says how reasoning and tool calls are marked. state: that the text begins in.
        tools: of the request, None leaves calls as text. streaming: number the calls. single: keep the first call only.
    """

    def __init__(self, tokenizer: Any, state: str, tools: list[Any] | None, streaming: bool, single: bool = False):
        self.tokenizer, self.single = tokenizer, single
        self.machine = make_text_state_machine(tokenizer).make_state(state)
        self.format = ToolCallFormatter(tokenizer.tool_parser, tools, streaming)
        self.kind = state
        self.called = 0
        self._tool = ""

    def add(self, text: str, last: bool = False) -> Iterator[Part]:
        """The parts that are settled by this text."""
        self.machine, segments = TextStateMachine.split(self.machine, text)
        if last:
            self.machine, held, state = TextStateMachine.flush(self.machine)
            if state != "tool":  # there it is the beginning of the closing mark
                segments.append((state, held))
        for kind, piece in segments:
            if self.kind == "tool" and kind != "tool":
                yield from self._finish_call(closed=True)
            self.kind = kind
            if kind == "tool":
                self._tool += piece
            elif piece:
                yield Part(kind, piece)
        if last and self.kind == "tool":
            yield from self._finish_call(closed=False)

    def _finish_call(self, closed: bool) -> Iterator[Part]:
        text, self._tool = self._tool, ""
        if self.single and self.called:
            return
        calls = tuple(self.format([text])) if text else ()
        if calls:
            calls = calls[:1] if self.single else calls
            self.called += len(calls)
            yield Part("tool", calls=calls)
        elif text:  # it can't be parsed: the client sees what was written
            end = self.tokenizer.tool_call_end if closed else ""
            yield Part("normal", f"{self.tokenizer.tool_call_start}{text}{end}")
