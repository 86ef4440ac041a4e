"""What a client is told when a request can't be answered: an HTTP status and OpenAI's error object."""

from __future__ import annotations

import json
from typing import Any

WORDS: dict[type, str] = {
    int: "a whole number", float: "a number", str: "text", bool: "true or false", list: "a list", dict: "an object",
    type(None): "null",
}  # fmt: skip
TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """A request that is refused or failed.

    Args:
        status: HTTP status. message: for the client; names no path of this machine and no key.
        param: the field that is at fault. code: OpenAI's short name for the case.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


class ClientGone(Exception):
    """Nobody waits for the reply any more."""


def internal_error() -> ApiError:
    """For a fault of ours; what happened stands in the server's log only."""
    return ApiError(500, "the server failed on this request; its log says why", code="internal_error")


def named(*kinds: type) -> str:
    """JSON's types in words, for a message: "text or a list"."""
    return " or ".join(WORDS[kind] for kind in kinds if not (kind is int and float in kinds))


def shown(value: Any) -> str:
    """A value as JSON, cut, for a message."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
