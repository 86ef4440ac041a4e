"""OpenAI's Responses dialect, to and from the chat route. Knows no HTTP and no model.

Items become chat messages: `function_call` a tool call, `function_call_output` a tool message, `reasoning` that of the
assistant's turn around it. Nothing is stored, so what needs a stored response or a grammar is refused by field.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Iterator
from typing import Any

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
    given,
    items,
    join_text,
    pick,
    thinking_options,
    typed,
)
from .fields import HARMLESS
from .response_tools import Tools, full_name

log = logging.getLogger(__name__)

SAME = ("model", "temperature", "top_p", "stream", "parallel_tool_calls", "top_k", "stop", *EXTRA)
KNOWN = frozenset({
    *SAME, *HARMLESS, "input", "instructions", "max_output_tokens", "tools", "tool_choice", "reasoning", "text",
    "include", "background", "top_logprobs", "max_tool_calls", "stream_options",
})  # fmt: skip
NOT_STORED = "responses are not stored here; send the whole conversation as input"
REFUSED = {
    "previous_response_id": NOT_STORED,
    "conversation": NOT_STORED,
    "prompt": "prompt templates are not stored here; send the text as input",
    "context_management": "a conversation is not compacted here",
    "moderation": "this server does not moderate",
    "n": "one answer a request",
}
# field -> the values that ask for nothing we lack, and why others are refused
ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "background": ((False,), "a response is made while the client waits"),
    "top_logprobs": ((0,), "log-probabilities are given by /v1/chat/completions"),
    "tool_choice": (TOOL_CHOICES, NOT_FORCED),
}
TEXT = ("input_text", "output_text", "text")
ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}


def to_chat(request: Json) -> Json:
    """The chat request that does the same; raises FieldError."""
    request = given(request)
    check_fields(request, KNOWN, REFUSED)
    for name, (allowed, why) in ONLY.items():
        if name in request and request[name] not in allowed:
            raise FieldError(name, why)
    for name in typed(request.get("include", []), list, "include"):
        if name != "reasoning.encrypted_content":  # reasoning is given in the open instead
            raise FieldError("include", f"{name!r} can't be given")
    chat = {name: request[name] for name in SAME if name in request}
    if "max_output_tokens" in request:
        chat["max_tokens"] = request["max_output_tokens"]
    chat["messages"] = _messages(request)
    tools = Tools(request.get("tools", []))
    if tools.left_out:
        log.info("the model is not told of tools that this server can't run: %s", ", ".join(tools.left_out))
    if tools.functions and request.get("tool_choice") != "none":
        chat["tools"] = tools.functions
    form = typed(request.get("text", {}), dict, "text").get("format") or {"type": "text"}
    if typed(form, dict, "text.format").get("type") != "text":
        raise FieldError("text.format", f"{form.get('type')!r} can't be enforced; ask for it in the prompt")
    effort = typed(request.get("reasoning", {}), dict, "reasoning").get("effort")
    typed(effort, (str, type(None)), "reasoning.effort")
    thinking_options(chat, None if effort is None else effort != "none", effort if effort != "none" else None)
    if chat.get("stream"):
        chat["stream_options"] = {"include_usage": True}
    return chat


def _messages(request: Json) -> list[Json]:
    asked = request.get("input")
    if isinstance(asked, str):
        asked = [{"role": "user", "content": asked}]
    if not asked:
        raise FieldError("input", "is required: a text or a list of items")
    messages = [
        pick(READERS, item.get("type", "message"), f"{field}.type")(item, field)
        for field, item in items(asked, "input")
    ]
    return as_turns([typed(request.get("instructions", ""), str, "instructions")], messages)


def _message(item: Json, field: str) -> Json:
    role = pick(ROLES, item.get("role"), f"{field}.role")
    return {"role": role, "content": join_text(item.get("content"), f"{field}.content", TEXT)}


def _call(item: Json, field: str) -> Json:
    arguments = typed(item.get("arguments"), str, f"{field}.arguments")
    name = typed(item.get("name"), str, f"{field}.name")
    space = typed(item.get("namespace") or "", str, f"{field}.namespace")
    call = function_call(item.get("call_id"), full_name(space, name), arguments, f"{field}.arguments")
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _custom_call(item: Json, field: str) -> Json:
    written = typed(item.get("input"), str, f"{field}.input")
    return _call({**item, "arguments": json.dumps({"input": written}, ensure_ascii=False)}, field)


def _result(item: Json, field: str) -> Json:
    call_id = typed(item.get("call_id"), str, f"{field}.call_id")
    return {"role": "tool", "tool_call_id": call_id, "content": join_text(item.get("output"), f"{field}.output", TEXT)}


def _reasoning(item: Json, field: str) -> Json:
    """Reasoning in the open, a part of the assistant's turn; encrypted reasoning of others has nothing to read."""
    parts = item.get("content") or item.get("summary") or []
    text = join_text(parts, f"{field}.content", ("reasoning_text", "summary_text", "text"))
    return {"role": "assistant", "content": "", **({"reasoning_content": text} if text else {})}


READERS = {
    "message": _message, "reasoning": _reasoning, "function_call": _call, "function_call_output": _result,
    "custom_tool_call": _custom_call, "custom_tool_call_output": _result,
}  # fmt: skip


class Answer:
    """A response, item by item; reasoning and text stay open until another kind begins."""

    def __init__(self, request: Json):
        request = given(request)
        self.body: Json = {
            "id": f"resp_{uuid.uuid4().hex}", "object": "response", "created_at": int(time.time()),
            "status": "in_progress", "error": None, "incomplete_details": None,
            "model": request.get("model", "default_model"), "output": [], "usage": None,
            "instructions": request.get("instructions"), "max_output_tokens": request.get("max_output_tokens"),
            "metadata": request.get("metadata", {}), "parallel_tool_calls": request.get("parallel_tool_calls", True),
            "previous_response_id": None, "reasoning": request.get("reasoning", {}), "store": False,
            "temperature": request.get("temperature"), "text": request.get("text", {"format": {"type": "text"}}),
            "tool_choice": request.get("tool_choice", "auto"), "tools": request.get("tools", []),
            "top_p": request.get("top_p"), "truncation": "disabled",
        }  # fmt: skip
        self._tools = Tools(self.body["tools"])
        self._number = 0
        self._open = False
        self._finish: str | None = None

    def start(self, usage: Json) -> Iterator[Event]:
        yield self._whole("response.created")
        yield self._whole("response.in_progress")

    def chunk(self, chunk: Json) -> Iterator[Event]:
        if chunk.get("usage"):
            self.body["usage"] = _usage(chunk["usage"])
        if chunk.get("dflash"):
            self.body["dflash"] = chunk["dflash"]
        for choice in chunk.get("choices", []):
            delta = choice.get("delta", {})
            yield from self._text("reasoning", delta.get("reasoning"))
            yield from self._text("message", delta.get("content"))
            for call in delta.get("tool_calls") or []:
                yield from self._call(call)
            self._finish = choice.get("finish_reason") or self._finish

    def end(self) -> Iterator[Event]:
        if self._finish is None:
            yield from self.fail("the engine ended the answer before it was complete")
            return
        cut = self._finish == "length"
        yield from self._close("incomplete" if cut else "completed")
        self.body["status"] = "incomplete" if cut else "completed"
        if cut:
            self.body["incomplete_details"] = {"reason": "max_output_tokens"}
        yield self._whole("response.incomplete" if cut else "response.completed")

    def fail(self, message: str) -> Iterator[Event]:
        self.body["status"] = "failed"
        self.body["error"] = {"code": "server_error", "message": message}
        yield self._whole("response.failed")

    def _text(self, kind: str, text: str | None) -> Iterator[Event]:
        if not text:
            return
        if not self._open or self.body["output"][-1]["type"] != kind:
            yield from self._begin(kind)
        self.body["output"][-1]["content"][0]["text"] += text
        logprobs: Json = {"logprobs": []} if kind == "message" else {}
        yield self._part(f"response.{PARTS[kind]}.delta", delta=text, **logprobs)

    def _begin(self, kind: str) -> Iterator[Event]:
        yield from self._close("completed")
        message: Json = {"annotations": [], "logprobs": []} if kind == "message" else {}
        item: Json = {"role": "assistant"} if kind == "message" else {"summary": []}
        item = {"id": f"{ITEM_IDS[kind]}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress", **item}
        self.body["output"].append({**item, "content": []})
        yield self._item("response.output_item.added")
        part = {"type": PARTS[kind], "text": "", **message}
        self.body["output"][-1]["content"] = [part]
        self._open = True
        yield self._part("response.content_part.added", part=dict(part))

    def _close(self, status: str) -> Iterator[Event]:
        if not self._open:
            return
        self._open = False
        item = self.body["output"][-1]
        part = item["content"][0]
        logprobs: Json = {"logprobs": []} if item["type"] == "message" else {}
        yield self._part(f"response.{part['type']}.done", text=part["text"], **logprobs)
        yield self._part("response.content_part.done", part=part)
        item["status"] = status
        yield self._item("response.output_item.done")

    def _call(self, call: Json) -> Iterator[Event]:
        yield from self._close("completed")
        kind, names, written = self._tools.item(call["function"]["name"], call["function"]["arguments"])
        item: Json = {"id": f"{kind.prefix}_{uuid.uuid4().hex}", "type": kind.item, "status": "in_progress"}
        item |= {"call_id": call["id"], **names, kind.field: ""}
        self.body["output"].append(item)
        yield self._item("response.output_item.added")
        place = {"item_id": item["id"], "output_index": len(self.body["output"]) - 1}
        yield self._event(f"{kind.event}.delta", **place, delta=written)
        yield self._event(f"{kind.event}.done", **place, name=item["name"], **{kind.field: written})
        item |= {kind.field: written, "status": "completed"}
        yield self._item("response.output_item.done")

    def _event(self, kind: str, **data: Any) -> Event:
        self._number += 1
        return kind, {"type": kind, "sequence_number": self._number - 1, **data}

    def _whole(self, name: str) -> Event:
        return self._event(name, response={**self.body, "output": list(self.body["output"])})

    def _item(self, name: str) -> Event:
        index = len(self.body["output"]) - 1
        return self._event(name, output_index=index, item=dict(self.body["output"][index]))

    def _part(self, name: str, **data: Any) -> Event:
        index = len(self.body["output"]) - 1
        return self._event(name, item_id=self.body["output"][index]["id"], output_index=index, content_index=0, **data)


PARTS = {"reasoning": "reasoning_text", "message": "output_text"}
ITEM_IDS = {"reasoning": "rs", "message": "msg"}


def _usage(usage: Json) -> Json:
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    thought = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens", 0)
    return {
        "input_tokens": usage.get("prompt_tokens", 0),
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage.get("completion_tokens", 0),
        "output_tokens_details": {"reasoning_tokens": thought},
        "total_tokens": usage.get("total_tokens", 0),
    }


DIALECT = Dialect(to_chat, Answer, KNOWN | REFUSED.keys(), {"messages": "input", "max_tokens": "max_output_tokens"})
