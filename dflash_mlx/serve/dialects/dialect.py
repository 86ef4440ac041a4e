"""What the dialects of coding agents share: refusing a field by name, and an answer built from chat chunks.

A dialect is two things: `to_chat(request) -> chat request`, which raises `FieldError`, and an `Answer` that turns the
chat route's chunks into the dialect's events and, by the same way, a whole chat response into the dialect's. Knows no
HTTP and no model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from ..errors import ApiError, named, shown

Json = dict[str, Any]
Kind = TypeVar("Kind")
Event = tuple[str, Json]  # name and data of a server-sent event

# Fields of the chat route that neither dialect has; carried over as they are.
EXTRA = (
    "min_p", "seed", "logit_bias", "repetition_penalty", "repetition_context_size", "presence_penalty",
    "presence_context_size", "frequency_penalty", "frequency_context_size", "xtc_probability", "xtc_threshold",
    "chat_template_kwargs", "block_size", "num_draft_tokens",
)  # fmt: skip


class FieldError(ApiError):
    """A request that can't be done, by the field that asks for it, e.g. `messages[2].content[0].type`."""

    def __init__(self, field: str, why: str):
        super().__init__(400, f"{field}: {why}", field)


class Answer(Protocol):
    """One answer in a dialect: events in order, and `body`, the answer that has no stream."""

    body: Json

    def start(self, usage: Json) -> Iterator[Event]:
        """Events that begin it; `usage` is the chat route's so far, which knows the prompt."""

    def chunk(self, chunk: Json) -> Iterator[Event]:
        """Events for one chunk of the chat stream. A `delta` may hold reasoning, text and whole tool calls."""

    def end(self) -> Iterator[Event]: ...

    def fail(self, message: str) -> Iterator[Event]:
        """Events that end an answer the engine could not finish."""


@dataclass(frozen=True)
class Dialect:
    """The parts of a dialect.

    Attributes:
        known: the fields that it has. fields: what it calls one of the chat route, where that differs.
        error_body: an error in its shape.
    """

    to_chat: Callable[[Json], Json]
    answer: Callable[[Json], Answer]
    known: Collection[str]
    fields: Mapping[str, str]
    error_body: Callable[[ApiError], Json] = ApiError.body


def whole(answer: Answer, response: Json) -> Json:
    """A chat response that was not streamed, in the answer's dialect: it is a stream of one chunk."""
    choices = [{**choice, "delta": choice.get("message", {})} for choice in response["choices"]]
    for events in (
        answer.start(response.get("usage", {})),
        answer.chunk({**response, "choices": choices}),
        answer.end(),
    ):
        for _ in events:
            pass
    return answer.body


def given(request: Mapping[str, Any]) -> Json:
    """The fields that say something; null is as good as absent in both dialects."""
    return {name: value for name, value in request.items() if value is not None}


def check_fields(request: Json, known: Collection[str], refused: Mapping[str, str]) -> None:
    """Refuse what can't be done and what is not known: a field is never dropped without a word."""
    for name in request:
        if name in refused:
            raise FieldError(name, refused[name])
        if name not in known and name not in EXTRA:
            raise FieldError(name, "is not a field this server knows")


def typed(value: Any, kinds: type | tuple[type, ...], field: str) -> Any:
    """`value` if it is one of `kinds`."""
    if not isinstance(value, kinds):
        raise FieldError(field, f"must be {named(*kinds) if isinstance(kinds, tuple) else named(kinds)}")
    return value


def pick(table: Mapping[str, Kind], name: Any, field: str) -> Kind:
    """The entry of this name, which comes from the request."""
    if not isinstance(name, str) or name not in table:
        raise FieldError(field, f"{shown(name)} is not one of {', '.join(table)}")
    return table[name]


def items(value: Any, field: str) -> Iterator[tuple[str, Json]]:
    """The objects of a list, each with its field name."""
    for index, item in enumerate(typed(value, list, field)):
        yield f"{field}[{index}]", typed(item, dict, f"{field}[{index}]")


def join_text(content: Any, field: str, kinds: Collection[str] = ("text",), between: str = "") -> str:
    """The text of a string or of a list of text parts of these `kinds`."""
    if isinstance(content, str):
        return content
    return between.join(part_text(part, place, kinds) for place, part in items(content, field))


def part_text(part: Json, field: str, kinds: Collection[str] = ("text",)) -> str:
    """The text of one part."""
    if part.get("type") not in kinds:
        raise FieldError(f"{field}.type", f"{shown(part.get('type'))} can't be read; this server takes text only")
    return typed(part.get("text"), str, f"{field}.text")


def function_tool(name: Any, description: Any, parameters: Any, field: str) -> Json:
    """A tool as the chat route takes it."""
    function = {"name": typed(name, str, f"{field}.name"), "parameters": parameters or {"type": "object"}}
    if description is not None:
        function["description"] = typed(description, str, f"{field}.description")
    return {"type": "function", "function": function}


def not_strict(field: str) -> FieldError:
    """For a tool that asks for arguments that obey its schema."""
    return FieldError(f"{field}.strict", "a schema can't be enforced; send false")


def function_call(call_id: Any, name: Any, arguments: Any, field: str) -> Json:
    """A tool call in an assistant's message of the chat route."""
    as_object(arguments, field)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments or "{}"}}


def as_object(arguments: Any, field: str) -> Json:
    """The arguments of a call, as JSON (none at all: "") or as the object itself."""
    try:
        value = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
    except (json.JSONDecodeError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise FieldError(field, "must be a JSON object")
    return value


def as_turns(system: list[str], messages: list[Json]) -> list[Json]:
    """Messages as any chat template takes them: one system message in front, nobody twice in a row, results in order.

    A system message further on, which many templates refuse, becomes a marked part of the user's turn. A turn of
    nothing but reasoning, which an interrupted answer leaves, says nothing that a template could show.
    """
    rest: list[Json] = []
    for message in messages:
        if message["role"] == "system":
            if not rest:
                system = [*system, message["content"]]
                continue
            message = {"role": "user", "content": f"<system>\n{message['content']}\n</system>"}
        rest.append(message)
    spoken = [turn for turn in _joined(rest) if turn["role"] != "assistant" or turn["content"] or "tool_calls" in turn]
    turns = _joined(results_in_order(spoken))
    text = _paragraphs(*system)
    return [{"role": "system", "content": text}, *turns] if text else turns


def results_in_order(messages: list[Json]) -> list[Json]:
    """Each tool result right behind the call that it answers, in the order of the calls: most templates show no id.

    What stands between a call and its result follows the result. A result of no known call stays where it is.
    """
    waiting: list[tuple[int, int, str]] = []  # calls without a result: turn, place in it, id
    results: dict[int, dict[int, Json]] = {}  # by turn and place
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            waiting += [(i, place, call.get("id")) for place, call in enumerate(message.get("tool_calls") or ())]
        elif message["role"] == "tool":
            named = [call for call in waiting if call[2] == message.get("tool_call_id") is not None]
            if named:  # models that number their calls anew in each turn repeat ids: the latest turn's is meant
                call = max(named, key=lambda call: (call[0], -call[1]))
                waiting.remove(call)
                results.setdefault(call[0], {})[call[1]] = message
    moved = [id(result) for found in results.values() for result in found.values()]
    turns: list[Json] = []
    for i, message in enumerate(messages):
        if id(message) not in moved:
            turns.append(message)
        turns += [result for _, result in sorted(results.get(i, {}).items())]
    return turns


def _joined(messages: list[Json]) -> list[Json]:
    turns: list[Json] = []
    for message in messages:
        if turns and message["role"] == turns[-1]["role"] != "tool":
            _join(turns[-1], message)
        else:
            turns.append(message)
    return turns


def _join(turn: Json, message: Json) -> None:
    """Add a message to the turn of the same speaker."""
    turn["content"] = _paragraphs(turn["content"], message["content"])
    if "reasoning_content" in message:
        turn["reasoning_content"] = _paragraphs(turn.get("reasoning_content", ""), message["reasoning_content"])
    if "tool_calls" in message:
        turn["tool_calls"] = [*turn.get("tool_calls", []), *message["tool_calls"]]


def _paragraphs(*texts: str) -> str:
    return "\n\n".join(text for text in texts if text)


def thinking_options(chat: Json, thinks: bool | None, effort: str | None) -> None:
    """What templates call thinking; options that a template does not know change nothing."""
    own = typed(chat.get("chat_template_kwargs", {}), dict, "chat_template_kwargs")
    if options := {**given({"enable_thinking": thinks, "reasoning_effort": effort}), **own}:
        chat["chat_template_kwargs"] = options
