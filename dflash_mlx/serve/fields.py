"""What a request may ask for: one table. A field that is in none of its parts is refused by name.

    USED       has an effect, and which values it takes
    ONLY       accepted with the values at which it asks for nothing that can't be done
    HARMLESS   accepted and ignored: it does not ask for another text
A null is the same as a field that is absent.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from .dialect import as_object, items, not_strict, typed
from .errors import ApiError

MOST = 2**31 - 1  # what any number may be that has no limit of its own


@dataclass(frozen=True)
class Field:
    """Type and range of a field; `chat` or `text` alone where it belongs to one kind of completion."""

    kinds: tuple[type, ...]
    low: float = -MOST
    high: float = MOST
    only: str | None = None


NUMBER, WHOLE, TEXT, FLAG = (int, float), (int,), (str,), (bool,)

USED: dict[str, Field] = {
    "model": Field(TEXT),
    "messages": Field((list,), only="chat"),
    "prompt": Field((str, list), only="text"),
    "stream": Field(FLAG),
    "stream_options": Field((dict,)),
    "max_tokens": Field(WHOLE, 1),
    "max_completion_tokens": Field(WHOLE, 1),
    "temperature": Field(NUMBER, 0),
    "top_p": Field(NUMBER, 0, 1),
    "top_k": Field(WHOLE, 0),
    "min_p": Field(NUMBER, 0, 1),
    "xtc_probability": Field(NUMBER, 0, 1),
    "xtc_threshold": Field(NUMBER, 0, 0.5),
    "repetition_penalty": Field(NUMBER, 0),
    "repetition_context_size": Field(WHOLE, 0),
    "presence_penalty": Field(NUMBER, -100, 100),
    "presence_context_size": Field(WHOLE, 0),
    "frequency_penalty": Field(NUMBER, -100, 100),
    "frequency_context_size": Field(WHOLE, 0),
    "logit_bias": Field((dict,)),
    "logprobs": Field((bool, int), 0, 20),
    "top_logprobs": Field(WHOLE, -1, 20),  # -1: mlx-lm's word for none
    "seed": Field(WHOLE, -(2**63), 2**64 - 1),
    "stop": Field((str, list)),
    "tools": Field((list,), only="chat"),
    "tool_choice": Field((str, dict), only="chat"),
    "parallel_tool_calls": Field(FLAG, only="chat"),
    "role_mapping": Field((dict,), only="chat"),
    "chat_template_kwargs": Field((dict,), only="chat"),
    "reasoning_effort": Field(TEXT, only="chat"),  # goes to the template, as enable_thinking does
    "enable_thinking": Field(FLAG, only="chat"),
    "num_draft_tokens": Field(WHOLE, 0),
    "block_size": Field(WHOLE, 1),
    "draft_model": Field(TEXT),
}

ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "n": ((1,), "one choice a request; send the request again for another"),
    "best_of": ((1,), "one choice a request"),
    "echo": ((False,), "the prompt is not repeated"),
    "suffix": (("",), "text is only continued, not filled in"),
    "response_format": (({"type": "text"},), "no grammar restricts the text"),
    "modalities": ((["text"],), "text only"),
    "audio": ((), "text only"),
    "functions": (([],), "use tools"),
    "function_call": (("auto", "none"), "use tool_choice"),
    "verbosity": (("medium",), "say it in the prompt"),
    "adapters": ((), "adapters are chosen when the server starts: --adapter-path"),
}

HARMLESS = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "prediction",
}  # fmt: skip

TOOL_CHOICES = ("auto", "none")
TEXT_PARTS = ("text", "input_text")
ROLES = ("assistant", "developer", "function", "system", "tool", "user")
# A template's variables are the client's; what renders and encodes the template (one of its own, a length) is not.
RENDERING = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)


def checked(body: Any, kind: str) -> dict[str, Any]:
    """The fields that have an effect, nulls left out.

    Args:
        kind: "chat" or "text".

    Raises:
        ApiError: 400, naming the first field that is unknown, out of range or asks for what can't be done.
    """
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    fields = {}
    for name, value in body.items():
        if value is None or name in HARMLESS:
            continue
        if name in ONLY:
            _check_only(name, value)
        elif name in USED and USED[name].only in (None, kind):
            _check_type(name, value, USED[name])
            fields[name] = value
        else:
            raise ApiError(400, f"{name} is not supported by this server", name, "unsupported_field")
    _check_content(fields, kind)
    return fields


def _check_only(name: str, value: Any) -> None:
    values, why = ONLY[name]
    if not any(type(value) is type(known) and value == known for known in values):
        raise ApiError(400, f"{name} {_short(value)} is not supported: {why}", name, "unsupported_value")


def _check_type(name: str, value: Any, field: Field) -> None:
    known = isinstance(value, field.kinds) and (not isinstance(value, bool) or bool in field.kinds)
    if not known:
        wanted = " or ".join(kind.__name__ for kind in field.kinds)
        raise ApiError(400, f"{name} must be of type {wanted}", name, "invalid_type")
    if isinstance(value, (int, float)) and not field.low <= value <= field.high:
        low, high = f"{field.low:g}", f"{field.high:g}"
        raise ApiError(400, f"{name} is {_short(value)}, expected {low} to {high}", name, "invalid_value")


def _check_content(fields: dict[str, Any], kind: str) -> None:
    """What types alone do not tell."""
    main = "messages" if kind == "chat" else "prompt"
    if main not in fields:
        raise ApiError(400, f"{main} is missing", main, "missing_field")
    if kind == "chat":
        check_messages(fields["messages"])
    else:
        fields["prompt"] = _prompt(fields["prompt"])
    stops = fields.get("stop", [])
    stops = [stops] if isinstance(stops, str) else stops
    if not all(isinstance(stop, str) for stop in stops):
        raise ApiError(400, "stop must be a string or a list of strings", "stop", "invalid_type")
    fields["stop"] = [stop for stop in stops if stop]
    choice = fields.get("tool_choice", "auto")
    if choice not in TOOL_CHOICES:
        raise ApiError(400, f"tool_choice {_short(choice)} can't be forced: auto or none", "tool_choice")
    for i, tool in enumerate(fields.get("tools", [])):
        known = isinstance(tool, dict) and tool.get("type", "function") == "function"
        if not known or not isinstance(tool.get("function"), dict):
            raise ApiError(400, f"tools[{i}] is no function", f"tools[{i}]", "unsupported_value")
        typed(tool["function"].get("name"), str, f"tools[{i}].function.name")
        if tool["function"].get("strict"):
            raise not_strict(f"tools[{i}].function")
    try:
        biases = {int(k): float(v) for k, v in fields.get("logit_bias", {}).items()}
        if not all(map(math.isfinite, biases.values())):
            raise ValueError
        fields["logit_bias"] = biases or None
    except (TypeError, ValueError, OverflowError):
        raise ApiError(400, "logit_bias must map token ids to numbers", "logit_bias") from None
    if fields.get("top_logprobs", 0) > 0 and fields.get("logprobs", False) is False:
        raise ApiError(400, "top_logprobs needs logprobs: true", "top_logprobs", "invalid_value")
    for name in RENDERING.intersection(fields.get("chat_template_kwargs", {})):
        where = f"chat_template_kwargs.{name}"
        raise ApiError(400, f"{where} is the server's own, not the template's", where, "unsupported_field")
    for name in fields.get("stream_options", {}):
        if name not in ("include_usage", "include_dflash", "include_obfuscation"):
            raise ApiError(400, f"stream_options.{name} is not supported", f"stream_options.{name}")


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
            if not isinstance(part, dict) or part.get("type") not in TEXT_PARTS:
                kind = part.get("type") if isinstance(part, dict) else type(part).__name__
                raise ApiError(400, f"{at} is of type {_short(kind)}; this server reads text only", at)
            if not isinstance(part.get("text"), str):
                raise ApiError(400, f"{at}.text must be a string", f"{at}.text")


def _check_calls(message: dict[str, Any], where: str) -> None:
    """Calls of an earlier turn, and the id of a result."""
    typed(message.get("tool_call_id", ""), (str, type(None)), f"{where}.tool_call_id")
    for field, call in items(message.get("tool_calls") or [], f"{where}.tool_calls"):
        function = typed(call.get("function"), dict, f"{field}.function")
        typed(function.get("name"), str, f"{field}.function.name")
        as_object(function.get("arguments", ""), f"{field}.function.arguments")


def _prompt(prompt: Any) -> Any:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, str) or (prompt and all(type(token) is int for token in prompt)):
        return prompt
    raise ApiError(400, "prompt must be one text or one list of token ids", "prompt", "unsupported_value")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
