"""Anthropic's Messages dialect, to and from the chat route. Knows no HTTP and no model.

Blocks become chat messages: `tool_use` a tool call, `tool_result` a tool message, `thinking` the message's reasoning.
What has no counterpart (images, documents, server tools, forced tools, a prefilled answer) is refused by field.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any

from ..errors import ApiError, shown
from .content import NOT_FORCED, TOOL_CHOICES
from .dialect import (
    EXTRA,
    Dialect,
    Event,
    FieldError,
    Json,
    as_turns,
    check_fields,
    function_call,
    function_tool,
    given,
    items,
    join_text,
    not_strict,
    part_text,
    pick,
    thinking_options,
    typed,
)
from .fields import HARMLESS

SAME = ("model", "max_tokens", "temperature", "top_p", "top_k", "stream", *EXTRA)
# Hints about cost, caching and bookkeeping, which change no answer of a local model.
HINTS = (
    *HARMLESS, "speed", "cache_control", "context_management", "diagnostics", "inference_geo",
    "user_profile_id", "workspace_id",
)  # fmt: skip
KNOWN = frozenset({
    *SAME, *HINTS, "messages", "system", "stop_sequences", "tools", "tool_choice", "thinking", "output_config",
})  # fmt: skip
REFUSED = {
    "container": "this server has no containers",
    "mcp_servers": "this server calls no MCP server; let the client call it as a tool",
}
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
ERROR_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip
THINKING = {"enabled": True, "adaptive": True, "disabled": False}
SIGNATURE = "unsigned"  # clients expect one on a thinking block and give it back; nobody checks it here


def to_chat(request: Json) -> Json:
    """The chat request that does the same; raises FieldError."""
    request = given(request)
    check_fields(request, KNOWN, REFUSED)
    for name in ("max_tokens", "messages"):
        if name not in request:
            raise FieldError(name, "is required")
    chat = {name: request[name] for name in SAME if name in request}
    chat["messages"] = _messages(request)
    if "stop_sequences" in request:
        chat["stop"] = typed(request["stop_sequences"], list, "stop_sequences")
    if tools := _tools(request):
        chat["tools"] = tools
    single = request.get("tool_choice", {}).get("disable_parallel_tool_use")
    if typed(single, (bool, type(None)), "tool_choice.disable_parallel_tool_use"):
        chat["parallel_tool_calls"] = False
    _thinking(request, chat)
    if chat.get("stream"):
        chat["stream_options"] = {"include_usage": True}
    return chat


def error_body(error: ApiError) -> Json:
    """An error in the dialect's shape; the field is named in the message."""
    return {"type": "error", "error": {"type": ERROR_TYPES.get(error.status, "api_error"), "message": str(error)}}


def _messages(request: Json) -> list[Json]:
    messages: list[Json] = []
    for field, message in items(request["messages"], "messages"):
        read = pick(READERS, message.get("role"), f"{field}.role")
        content = message.get("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        read(messages, blocks, f"{field}.content")
    if not messages:
        raise FieldError("messages", "is empty")
    if messages[-1]["role"] == "assistant":
        raise FieldError("messages", "ends with the assistant's turn; an answer can't be begun for it (prefill)")
    return as_turns([join_text(request.get("system", ""), "system", between="\n\n")], messages)


def _read_system(messages: list[Json], blocks: Any, field: str) -> None:
    messages.append({"role": "system", "content": join_text(blocks, field)})


def _read_user(messages: list[Json], blocks: Any, field: str) -> None:
    texts: list[str] = []
    for place, block in items(blocks, field):
        if block.get("type") != "tool_result":
            texts.append(part_text(block, place))
            continue
        if texts:
            messages.append({"role": "user", "content": "".join(texts)})
            texts = []
        result = join_text(block.get("content") or "", f"{place}.content")
        result = f"Error: {result}" if block.get("is_error") else result
        call_id = typed(block.get("tool_use_id"), str, f"{place}.tool_use_id")
        messages.append({"role": "tool", "tool_call_id": call_id, "content": result})
    if texts or not blocks:
        messages.append({"role": "user", "content": "".join(texts)})


def _read_assistant(messages: list[Json], blocks: Any, field: str) -> None:
    turn: Json = {"role": "assistant", "content": ""}
    for place, block in items(blocks, field):
        kind = block.get("type")
        if kind == "thinking":
            text = typed(block.get("thinking"), str, f"{place}.thinking")
            turn["reasoning_content"] = turn.get("reasoning_content", "") + text
        elif kind == "tool_use":
            arguments = json.dumps(typed(block.get("input"), dict, f"{place}.input"), ensure_ascii=False)
            call = function_call(block.get("id"), block.get("name"), arguments, f"{place}.input")
            turn.setdefault("tool_calls", []).append(call)
        elif kind != "redacted_thinking":  # sealed for another server: there is nothing to read
            turn["content"] += part_text(block, place)
    messages.append(turn)


READERS = {"user": _read_user, "assistant": _read_assistant, "system": _read_system}


def _tools(request: Json) -> list[Json]:
    choice = typed(request.get("tool_choice", {"type": "auto"}), dict, "tool_choice")
    if choice.get("type") not in TOOL_CHOICES:
        raise FieldError("tool_choice.type", f"{shown(choice.get('type'))}: {NOT_FORCED}")
    tools = []
    for field, tool in items(request.get("tools", []), "tools"):
        if tool.get("type") not in (None, "custom"):
            raise FieldError(f"{field}.type", f"{tool['type']!r} is run by Anthropic's servers; switch that tool off")
        if tool.get("strict"):
            raise not_strict(field)
        schema = typed(tool.get("input_schema") or {}, dict, f"{field}.input_schema")
        tools.append(function_tool(tool.get("name"), tool.get("description"), schema, field))
    return [] if choice["type"] == "none" else tools


def _thinking(request: Json, chat: Json) -> None:
    config = typed(request.get("output_config", {}), dict, "output_config")
    if config.get("format") is not None:
        raise FieldError("output_config.format", "a schema can't be enforced; ask for JSON in the prompt")
    effort = typed(config.get("effort"), (str, type(None)), "output_config.effort")
    kind = typed(request.get("thinking", {}), dict, "thinking").get("type")
    thinking_options(chat, None if kind is None else pick(THINKING, kind, "thinking.type"), effort)


class Answer:
    """A message, block by block; a block stays open until another kind begins."""

    def __init__(self, request: Json):
        self.body: Json = {
            "id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant",
            "model": request.get("model", "default_model"), "content": [], "stop_reason": None, "stop_sequence": None,
            "usage": _usage({}),
        }  # fmt: skip
        self._open = False

    def start(self, usage: Json) -> Iterator[Event]:
        self.body["usage"] = _usage(usage)
        yield _event("message_start", message={**self.body, "content": []})

    def chunk(self, chunk: Json) -> Iterator[Event]:
        if chunk.get("usage"):
            self.body["usage"] = _usage(chunk["usage"])
        if chunk.get("dflash"):
            self.body["dflash"] = chunk["dflash"]
        for choice in chunk.get("choices", []):
            delta = choice.get("delta", {})
            yield from self._text("thinking", delta.get("reasoning"))
            yield from self._text("text", delta.get("content"))
            for call in delta.get("tool_calls") or []:
                yield from self._call(call)
            if finish := choice.get("finish_reason"):
                self.body["stop_sequence"] = choice.get("stop_reason")
                self.body["stop_reason"] = "stop_sequence" if choice.get("stop_reason") else STOP_REASONS[finish]

    def end(self) -> Iterator[Event]:
        if self.body["stop_reason"] is None:
            yield from self.fail("the engine ended the answer before it was complete")
            return
        yield from self._close()
        delta = {"stop_reason": self.body["stop_reason"], "stop_sequence": self.body["stop_sequence"]}
        more = {"dflash": self.body["dflash"]} if "dflash" in self.body else {}
        yield _event("message_delta", delta=delta, usage=self.body["usage"], **more)
        yield _event("message_stop")

    def fail(self, message: str) -> Iterator[Event]:
        yield "error", error_body(ApiError(500, message))

    def _text(self, kind: str, text: str | None) -> Iterator[Event]:
        if not text:
            return
        if not self._open or self.body["content"][-1]["type"] != kind:
            empty = {"signature": ""} if kind == "thinking" else {}
            yield from self._begin({"type": kind, kind: "", **empty})
        self.body["content"][-1][kind] += text
        yield self._delta({"type": f"{kind}_delta", kind: text})

    def _call(self, call: Json) -> Iterator[Event]:
        function = call["function"]
        yield from self._begin({"type": "tool_use", "id": call["id"], "name": function["name"], "input": {}})
        self.body["content"][-1]["input"] = json.loads(function["arguments"])
        yield self._delta({"type": "input_json_delta", "partial_json": function["arguments"]})
        yield from self._close()

    def _begin(self, block: Json) -> Iterator[Event]:
        yield from self._close()
        self.body["content"].append(block)
        self._open = True
        yield _event("content_block_start", index=len(self.body["content"]) - 1, content_block=dict(block))

    def _close(self) -> Iterator[Event]:
        if not self._open:
            return
        self._open = False
        block = self.body["content"][-1]
        if block["type"] == "thinking":
            block["signature"] = SIGNATURE
            yield self._delta({"type": "signature_delta", "signature": SIGNATURE})
        yield _event("content_block_stop", index=len(self.body["content"]) - 1)

    def _delta(self, delta: Json) -> Event:
        return _event("content_block_delta", index=len(self.body["content"]) - 1, delta=delta)


def _event(name: str, **data: Any) -> Event:
    return name, {"type": name, **data}


def _usage(usage: Json) -> Json:
    """Anthropic counts cached tokens apart from the other input tokens."""
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return {
        "input_tokens": usage.get("prompt_tokens", 0) - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.get("completion_tokens", 0),
    }


DIALECT = Dialect(to_chat, Answer, KNOWN | REFUSED.keys(), {"stop": "stop_sequences"}, error_body)
