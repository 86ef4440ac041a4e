"""What types alone do not tell of a request's fields: messages, prompts, tools, biases. Knows no engine."""

from __future__ import annotations

import inspect
import math
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..errors import ApiError, shown
from ..unknown_fields import UnknownFields
from .dialect import as_object, items, not_strict, typed

TOOL_CHOICES = ("auto", "none")
NOT_FORCED = "a call can't be forced; send auto or none"
TEXT_PARTS = ("text", "input_text")
ROLES = ("assistant", "developer", "function", "system", "tool", "user")
STREAM_OPTIONS = ("include_usage", "include_dflash", "include_obfuscation")
MOST_PROMPTS = 2048  # of one request, as at OpenAI
MOST_BIAS = 10_000  # this forces or forbids a token as well as any more does, and float16 ends at 65504
# A template's variables are the client's; what renders and encodes the template (one of its own, a length) is not.
RENDERING = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)


def check_content(fields: dict[str, Any], kind: str, unknown: UnknownFields) -> None:
    """Check what `fields` hold and bring it into one form, in place.

    Raises:
        ApiError: 400, naming the field or the part of it.
    """
    main = "messages" if kind == "chat" else "prompt"
    if main not in fields:
        raise ApiError(400, f"{main} is missing", main, "missing_field")
    if kind == "chat":
        check_messages(fields["messages"])
    else:
        fields["prompt"] = prompts(fields["prompt"])
    for name in ("max_tokens", "max_completion_tokens") if kind == "chat" else ():
        if fields.get(name) == 0:
            raise ApiError(400, f"{name} is 0, expected 1 or more", name, "invalid_value")
    stops = fields.get("stop", [])
    stops = [stops] if isinstance(stops, str) else stops
    if not all(isinstance(stop, str) for stop in stops):
        raise ApiError(400, "stop must be text or a list of texts", "stop", "invalid_type")
    fields["stop"] = [stop for stop in stops if stop]
    _check_tools(fields)
    fields["logit_bias"] = _biases(fields.get("logit_bias", {})) or None
    if fields.get("top_logprobs", 0) > 0 and fields.get("logprobs", False) is False:
        raise ApiError(400, "top_logprobs needs logprobs: true", "top_logprobs", "invalid_value")
    for name in RENDERING.intersection(fields.get("chat_template_kwargs", {})):
        where = f"chat_template_kwargs.{name}"
        raise ApiError(400, f"{where} is the server's own, not the template's", where, "unsupported_field")
    for name, value in fields.get("stream_options", {}).items():
        if name not in STREAM_OPTIONS:
            unknown.meet(f"stream_options.{name}")
        else:
            typed(value, (bool, type(None)), f"stream_options.{name}")
    for role, prefix in fields.get("role_mapping", {}).items():
        typed(prefix, str, f"role_mapping.{role}"[:100])


def _check_tools(fields: dict[str, Any]) -> None:
    choice = fields.get("tool_choice", "auto")
    if choice not in TOOL_CHOICES:
        raise ApiError(400, f"tool_choice {shown(choice)}: {NOT_FORCED}", "tool_choice")
    for i, tool in enumerate(fields.get("tools", [])):
        known = isinstance(tool, dict) and tool.get("type", "function") == "function"
        if not known or not isinstance(tool.get("function"), dict):
            raise ApiError(400, f"tools[{i}] is no function", f"tools[{i}]", "unsupported_value")
        typed(tool["function"].get("name"), str, f"tools[{i}].function.name")
        typed(tool["function"].get("description"), (str, type(None)), f"tools[{i}].function.description")
        typed(tool["function"].get("parameters"), (dict, bool, type(None)), f"tools[{i}].function.parameters")
        if tool["function"].get("strict"):
            raise not_strict(f"tools[{i}].function")


def _biases(given: dict[str, Any]) -> dict[int, float]:
    """Token id -> what is added to its logit."""
    biases = {}
    for token, value in given.items():
        where = f"logit_bias.{token}"[:100]
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise ApiError(400, f"{where}: {shown(token)} is no token id", "logit_bias", "invalid_value")
        if type(value) not in (int, float) or not math.isfinite(value):
            raise ApiError(400, f"{where} is {shown(value)}, expected a number", "logit_bias", "invalid_value")
        biases[int(token)] = float(max(-MOST_BIAS, min(MOST_BIAS, value)))
    return biases


def check_messages(messages: list[Any]) -> None:
    """Raise `ApiError` for messages that hold anything but text, naming the part."""
    if not messages:
        raise ApiError(400, "messages is empty", "messages", "invalid_value")
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise ApiError(400, f"{where} needs a role: {', '.join(ROLES)}", f"{where}.role")
        _check_calls(message, where)
        content = message.get("content")
        if content is None or isinstance(content, str):
            continue
        if not isinstance(content, list):
            raise ApiError(400, f"{where}.content must be text or a list of parts", f"{where}.content")
        for j, part in enumerate(content):
            at = f"{where}.content[{j}]"
            kind = part.get("type") if isinstance(part, dict) else None
            if kind not in TEXT_PARTS:
                raise ApiError(400, f"{at} is {shown(kind or part)}; this server reads parts of type text only", at)
            if not isinstance(part.get("text"), str):
                raise ApiError(400, f"{at}.text must be text", f"{at}.text")


def _check_calls(message: dict[str, Any], where: str) -> None:
    """Calls of an earlier turn, and the id of a result."""
    typed(message.get("tool_call_id", ""), (str, type(None)), f"{where}.tool_call_id")
    for field, call in items(message.get("tool_calls") or [], f"{where}.tool_calls"):
        function = typed(call.get("function"), dict, f"{field}.function")
        typed(function.get("name"), str, f"{field}.function.name")
        as_object(function.get("arguments", ""), f"{field}.function.arguments")


def prompts(prompt: Any) -> list[str | list[int]]:
    """The prompts of a text completion: one text, one list of token ids, or a list of either."""
    if isinstance(prompt, str):
        return [prompt]
    if len(prompt) > MOST_PROMPTS and isinstance(prompt[0], (str, list)):
        raise ApiError(400, f"prompt holds {len(prompt)} prompts, {MOST_PROMPTS} are the most", "prompt")
    if prompt and all(isinstance(one, str) for one in prompt):
        return prompt
    if prompt and all(isinstance(one, list) for one in prompt):
        return [_ids(one) for one in prompt]
    return [_ids(prompt)]


def _ids(tokens: list[Any]) -> list[int]:
    ids = [int(token) if isinstance(token, float) and token.is_integer() else token for token in tokens]
    if not ids or not all(type(token) is int for token in ids):
        message = (
            "prompt must be one text, one list of token ids, or a list of texts or of such lists; none may be empty"
        )
        raise ApiError(400, message, "prompt", "unsupported_value")
    return ids
