"""What a request may ask for: one table for all routes. A field that is in none of its parts is refused by name.

    USED        has an effect, and which values it takes
    OTHER_NAMES, OTHER_FORMS  what other servers call these
    ONLY        accepted with the values at which it asks for nothing that can't be done
    HARMLESS    accepted and ignored: it does not ask for another text
A null is the same as a field that is absent, 4.0 the same as 4.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import ApiError, named, shown
from ..unknown_fields import UnknownFields
from .content import check_content

MOST = 2**31 - 1  # what any number may be that has no limit of its own
UNLIMITED = MOST  # max_tokens of a request that goes on to the end token, or the end of the context


@dataclass(frozen=True)
class Field:
    """Type and range of a field; `chat` or `text` alone where it belongs to one kind of completion.

    Attributes:
        no_limit: what -1, other servers' word for "no limit" or "none", is read as; None leaves the field out.
    """

    kinds: tuple[type, ...]
    low: int | float = -MOST
    high: int | float = MOST
    only: str | None = None
    no_limit: int | None = -1


NUMBER, WHOLE, TEXT, FLAG = (int, float), (int,), (str,), (bool,)

USED: dict[str, Field] = {
    "model": Field(TEXT),
    "messages": Field((list,), only="chat"),
    "prompt": Field((str, list), only="text"),
    "stream": Field(FLAG),
    "stream_options": Field((dict,)),
    "max_tokens": Field(WHOLE, 0, no_limit=UNLIMITED),  # 0 scores a prompt, of the text kind only
    "max_completion_tokens": Field(WHOLE, 0, no_limit=UNLIMITED),
    "temperature": Field(NUMBER, 0),
    "top_p": Field(NUMBER, 0, 1),
    "top_k": Field(WHOLE, 0, no_limit=0),
    "min_p": Field(NUMBER, 0, 1),
    "xtc_probability": Field(NUMBER, 0, 1),
    "xtc_threshold": Field(NUMBER, 0, 0.5),
    "repetition_penalty": Field(NUMBER, 0),
    "repetition_context_size": Field(WHOLE, 0, no_limit=0),  # mlx-lm's 0 is the whole text
    "presence_penalty": Field(NUMBER, -100, 100),
    "presence_context_size": Field(WHOLE, 0, no_limit=0),
    "frequency_penalty": Field(NUMBER, -100, 100),
    "frequency_context_size": Field(WHOLE, 0, no_limit=0),
    "logit_bias": Field((dict,)),
    "logprobs": Field((bool, int), 0, 20),
    "top_logprobs": Field(WHOLE, 0, 20, no_limit=None),  # mlx-lm's clients say -1 for none
    "seed": Field(WHOLE, -(2**63), 2**64 - 1, no_limit=None),  # llama.cpp's -1 is another one each time
    "stop": Field((str, list)),
    "echo": Field(FLAG, only="text"),
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
    "suffix": (("",), "text is only continued, not filled in"),
    "response_format": (({"type": "text"},), "no grammar restricts the text"),
    "modalities": ((["text"],), "text only"),
    "audio": ((), "text only"),
    "functions": (([],), "use tools"),
    "function_call": (("auto", "none"), "use tool_choice"),
    "min_tokens": ((0,), "a text ends where the model ends it"),
    "ignore_eos": ((False,), "a text ends where the model ends it; see logit_bias"),
    "skip_special_tokens": ((True,), "marks of the template are not shown"),
    "typical_p": ((0, 1), "not among this server's samplers"),
    "top_a": ((0,), "not among this server's samplers"),
    "tfs_z": ((0, 1), "not among this server's samplers"),
    "mirostat": ((0,), "not among this server's samplers"),
    "dynatemp_range": ((0,), "not among this server's samplers"),
    "dry_multiplier": ((0,), "not among this server's samplers"),
    "adapters": ((), "adapters are chosen when the server starts: --adapter-path"),
}

# Storing (nothing is, and an absent store means true as well), cutting what is too long (it is refused as by default),
# bookkeeping, routing, and hints of how much a vendor's own models should say.
HARMLESS = {
    "user", "metadata", "store", "truncation", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "prompt_cache_options", "prediction", "verbosity", "keep_alive", "cache_prompt",
    "id_slot", "timings_per_token", "return_progress", "provider", "client_metadata",
}  # fmt: skip


def effort_options(effort: str | None) -> dict[str, Any]:
    """What templates are told of a reasoning effort; its absence tells them nothing."""
    if effort is None:
        return {}
    return {"enable_thinking": False} if effort == "none" else {"enable_thinking": True, "reasoning_effort": effort}


def _reasoning(value: Any, unknown: UnknownFields) -> dict[str, Any]:
    """OpenRouter's and the Responses dialect's object."""
    options = parts(value, "reasoning", {"effort": str, "enabled": bool, "summary": str}, unknown)
    enabled = {"enable_thinking": options["enabled"]} if "enabled" in options else {}
    return effort_options(options.get("effort")) | enabled


def _thinking(value: Any, unknown: UnknownFields) -> dict[str, Any]:
    """Anthropic's object; a budget is a hint."""
    options = parts(value, "thinking", {"type": str, "budget_tokens": int}, unknown)
    if options.get("type") not in ("enabled", "adaptive", "disabled"):
        raise ApiError(400, "thinking.type must be enabled, adaptive or disabled", "thinking.type", "invalid_value")
    return {"enable_thinking": options["type"] != "disabled"}


def _think(value: Any, unknown: UnknownFields) -> dict[str, Any]:
    """Ollama's: whether, or how much."""
    if not isinstance(value, (bool, str)):
        raise ApiError(400, "think must be true, false or an effort", "think", "invalid_type")
    return effort_options(value) if isinstance(value, str) else {"enable_thinking": value}


# Other servers' names of fields; saying one thing by both names is fine, two things are not.
OTHER_NAMES = {
    "n_predict": "max_tokens",  # llama.cpp
    "num_predict": "max_tokens",  # Ollama
    "max_new_tokens": "max_tokens",  # transformers
    "max_output_tokens": "max_tokens",  # Responses
    "repeat_penalty": "repetition_penalty",  # llama.cpp, LM Studio, Ollama
    "stop_sequences": "stop",  # Messages
}
# Other servers' forms, each to the fields that it stands for where the request does not have these.
OTHER_FORMS: dict[str, Callable[[Any, UnknownFields], dict[str, Any]]] = {
    "reasoning": _reasoning,
    "thinking": _thinking,
    "think": _think,
}
# What becomes variables of the chat template, by all names that clients of any route may send it under.
FOR_TEMPLATE = ("chat_template_kwargs", "reasoning_effort", "enable_thinking", *OTHER_FORMS, "output_config")


def checked(body: Any, kind: str, unknown: UnknownFields) -> dict[str, Any]:
    """The fields that have an effect, nulls left out.

    Args:
        kind: "chat" or "text".

    Raises:
        ApiError: 400, naming the first field that is unknown, out of range or asks for what can't be done.
    """
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    fields: dict[str, Any] = {}
    for name, value in body.items():
        if value is None or name in HARMLESS:
            continue
        own = OTHER_NAMES.get(name, name)
        if name in ONLY:
            check_only(name, value)
        elif own in USED and USED[own].only in (None, kind):
            value = _value(name, value, USED[own])
            if fields.setdefault(own, value) != value:
                raise ApiError(400, f"{name} is {shown(value)} here, and {shown(fields[own])} by another name", name)
        elif name not in OTHER_FORMS or kind != "chat":
            unknown.meet(name)
    for name in OTHER_FORMS if kind == "chat" else ():
        if body.get(name) is not None:
            fields = OTHER_FORMS[name](body[name], unknown) | fields
    fields = {name: value for name, value in fields.items() if value is not None}
    check_content(fields, kind, unknown)
    return fields


def check_only(name: str, value: Any) -> None:
    """Raise `ApiError` for a value that asks for what can't be done."""
    values, why = ONLY[name]
    if not any(isinstance(value, bool) == isinstance(known, bool) and value == known for known in values):
        raise ApiError(400, f"{name} {shown(value)} is not supported: {why}", name, "unsupported_value")


def parts(value: Any, name: str, kinds: dict[str, type], unknown: UnknownFields) -> dict[str, Any]:
    """The known parts of a field that is an object, nulls left out."""
    if not isinstance(value, dict):
        raise ApiError(400, f"{name} must be {named(dict)}", name, "invalid_type")
    known = {}
    for part, content in value.items():
        if part not in kinds:
            unknown.meet(f"{name}.{part}")
        elif content is not None:
            known[part] = _value(f"{name}.{part}", content, Field((kinds[part],)))
    return known


def _value(name: str, value: Any, field: Field) -> Any:
    """The value in the field's own type."""
    whole = int in field.kinds and float not in field.kinds
    if whole and isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, field.kinds) or (isinstance(value, bool) and bool not in field.kinds):
        raise ApiError(400, f"{name} must be {named(*field.kinds)}", name, "invalid_type")
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if value == -1 and field.no_limit != -1:
            return field.no_limit
        if not field.low <= value <= field.high:
            message = f"{name} is {shown(value)}, expected {field.low} to {field.high}"
            raise ApiError(400, message, name, "invalid_value")
    return value
