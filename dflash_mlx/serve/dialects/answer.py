"""The text of a reply, taken apart: reasoning, answer and tool calls, piece by piece. Knows no HTTP and no engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mlx_lm.generate import TextStateMachine, make_text_state_machine

from .calls import CallReader


@dataclass(frozen=True)
class Part:
    """A stretch of one kind ("normal", "reasoning") or finished tool calls."""

    kind: str
    text: str = ""
    calls: tuple[dict[str, Any], ...] = ()


class Raw:
    """The text of a raw completion: all of it is answer, marks included."""

    called = 0

    def add(self, text: str, last: bool = False, by_itself: bool = False) -> Iterator[Part]:
        if text:
            yield Part("normal", text)


class _WithoutCalls:
    """A tokenizer as it is for a reply that holds no calls: their marks are text, in the reasoning too."""

    has_tool_calling = False

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer

    @property
    def response_transitions(self) -> dict[str, list[tuple[str, str]]]:
        """Of a format that leads to calls by itself, the way out of them too, which otherwise has_tool_calling adds."""
        edges, end = self._tokenizer.response_transitions, self._tokenizer.tool_call_end
        return {**edges, "tool": [(end, "normal")] if end else []} if edges else {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


class Answer:
    """Splits text as it comes, with mlx-lm's own state machine and tool parsers.

    A call that was not written to its end, or that can't be read, is text: the client sees what was written. So is
    every call of a reply that was offered no tools, which no client would run.

    Args:
        tokenizer: says how reasoning and tool calls are marked. state: that the text begins in.
        tools: that the model may call; none at all where nothing may be a call.
        streaming: number the calls. single: keep the first only.
    """

    def __init__(self, tokenizer: Any, state: str, tools: list[Any] | None, streaming: bool, single: bool = False):
        self.tokenizer, self.single = tokenizer, single
        self.machine = make_text_state_machine(tokenizer if tools else _WithoutCalls(tokenizer)).make_state(state)
        self.reader = CallReader(tokenizer.tool_parser, tools, streaming)
        self.offered = bool(tools)
        self.kind = state
        self.called = 0
        self._tool = ""
        self._inside = False  # of a call that is text

    def add(self, text: str, last: bool = False, by_itself: bool = False) -> Iterator[Part]:
        """The parts that are settled by this text.

        Args:
            last: nothing follows. by_itself: because the model ended its turn, not a limit or a stop string.
        """
        self.machine, segments = TextStateMachine.split(self.machine, text)
        if last:
            self.machine, held, state = TextStateMachine.flush(self.machine)
            segments.append((state, held))
        for kind, piece in segments if self.offered else self._as_text(segments):
            if self.kind == "tool" and kind != "tool":
                yield from self._finish_call(self.tokenizer.tool_call_end or "", complete=True)
            self.kind = kind
            if kind == "tool":
                self._tool += piece
            elif piece:
                yield Part(kind, piece)
        if last and self.kind == "tool":
            yield from self._finish_call("", complete=by_itself and self._ends_unmarked)

    def _as_text(self, segments: list[tuple[str, str]]) -> Iterator[tuple[str, str]]:
        """Calls as they were written, marks included, without waiting for their ends.

        Only formats whose own transitions lead to calls get here; others have no such state where no tools are offered.
        """
        for kind, piece in segments:
            inside, self._inside = self._inside, kind == "tool"
            if inside and not self._inside:
                yield "normal", self.tokenizer.tool_call_end or ""
            if self._inside:
                yield "normal", piece if inside else f"{self.tokenizer.tool_call_start or ''}{piece}"
            else:
                yield kind, piece

    @property
    def _ends_unmarked(self) -> bool:
        """Whether no mark closes a call, or one whose token ends the text and so never shows in it."""
        tokens = self.tokenizer.tool_call_end_tokens
        return not tokens or not set(tokens).isdisjoint(self.tokenizer.eos_token_ids)

    def _finish_call(self, end: str, complete: bool) -> Iterator[Part]:
        text, self._tool = self._tool, ""
        if self.single and self.called:
            return
        calls = self.reader.read(text) if complete else ()
        if calls:
            calls = calls[:1] if self.single else calls
            self.called += len(calls)
            yield Part("tool", calls=calls)
        else:
            yield Part("normal", f"{self.tokenizer.tool_call_start or ''}{text}{end}")
