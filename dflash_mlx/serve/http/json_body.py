"""The JSON of a request's body, with its faults told in words. Knows no fields."""

from __future__ import annotations

import json
import re
from typing import Any

from ..errors import ApiError

DEEPEST = 100  # levels; whatever walks a body later (templates, copies) takes several of Python's frames a level
HALVES = re.compile("[\ud800-\udfff]")


def read_json(raw: bytes) -> Any:
    """Decode a body.

    Raises:
        ApiError: 400 for what is not JSON in UTF-8, or holds text that is none (half a surrogate pair), by its place.
    """
    try:
        body = json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise _refusal(f"byte {error.start} is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise _refusal(str(error)) from None
    except ValueError:  # Python's bound on the digits of a whole number
        raise _refusal("a number in it has too many digits") from None
    except RecursionError:
        raise _too_deep() from None
    if b"\\u" in raw or raw.count(b"[") + raw.count(b"{") > DEEPEST:
        _check(body, "", 1)
    return body


def _check(value: Any, place: str, depth: int) -> None:
    """Raise `ApiError` at the first place, as messages[0].content, that is too deep or no text."""
    if depth > DEEPEST and isinstance(value, (dict, list)):
        raise _too_deep()
    if isinstance(value, str):
        _check_text(value, place)
    elif isinstance(value, dict):
        for name, part in value.items():
            _check_text(name, place)
            _check(part, f"{place}.{name}" if place else name, depth + 1)
    elif isinstance(value, list):
        for i, part in enumerate(value):
            if isinstance(part, (str, dict, list)):  # not the numbers of a long list of tokens
                _check(part, f"{place}[{i}]", depth + 1)


def _check_text(text: str, place: str) -> None:
    if HALVES.search(text):
        what = "half a surrogate pair (\\ud800 to \\udfff alone), which is no character"
        raise ApiError(400, f"{place or 'the body'} holds {what}", place or None, "invalid_json")


def _too_deep() -> ApiError:
    return _refusal(f"it is nested more than {DEEPEST} levels deep")


def _refusal(why: str) -> ApiError:
    return ApiError(400, f"the body is not valid JSON: {why}", code="invalid_json")
