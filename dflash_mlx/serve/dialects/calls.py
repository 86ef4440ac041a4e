"""What a tool call is: a name and an object of arguments that can be sent and will be accepted when it comes back.

mlx-lm's parsers take a call apart; each has its own idea of what else may pass. Here it is decided, for all routes.
Knows nothing of the text around a call.
"""

from __future__ import annotations

import json
import logging
import re
import uuid
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)

NAME = re.compile(r"[\w.:/-]+")  # of a tool that the request does not offer: no words, no marks of the model's format


class CallReader:
    """The calls of one reply.

    Args:
        parser: mlx-lm's for the model, from text to one call or a list. tools: of the request. streaming: number them.
    """

    def __init__(self, parser: Callable[..., Any] | None, tools: list[Any] | None, streaming: bool):
        self.parser, self.streaming = parser, streaming
        self.tools = [_with_schema(tool["function"]) for tool in tools or ()]
        self.offered = {tool["function"].get("name") for tool in self.tools}
        self.ids: set[str] = set()

    def read(self, text: str) -> tuple[dict[str, Any], ...]:
        """The calls in what stood between the marks, in the chat route's shape; none when any can't be read."""
        if self.parser is None:
            return ()
        try:
            parsed = self.parser(text, self.tools or None)
            read = [self._call(call) for call in (parsed if isinstance(parsed, list) else [parsed])]
        except Exception as error:  # a parser is fed what a model wrote, and raises what it likes
            log.warning("a tool call can't be read and is shown as text (%s)", type(error).__name__)
            return ()
        return tuple(self._sent(*call) for call in read)

    def _call(self, parsed: dict[str, Any]) -> tuple[Any, str, str]:
        """Id, name and arguments as JSON; raises for anything that is no call."""
        name = parsed["name"]
        if name not in self.offered and not NAME.fullmatch(name):
            raise ValueError("no name of a tool")
        spelled = [key for key in ("arguments", "parameters") if key in parsed]
        if not spelled and parsed.keys() - {"name", "id", "type"}:
            raise ValueError("arguments by another name")
        arguments = parsed[spelled[0]] if spelled else None
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        if not isinstance(arguments, dict | None):
            raise TypeError("the arguments are no object")
        sent = json.dumps(arguments or {}, ensure_ascii=False, allow_nan=False)
        f"{name}{sent}".encode()  # half a surrogate pair could not be rendered in the next turn
        return parsed.get("id"), name, sent

    def _sent(self, call_id: Any, name: str, arguments: str) -> dict[str, Any]:
        if not isinstance(call_id, str) or not call_id or call_id in self.ids:  # results come back by id
            call_id = str(uuid.uuid4())
        number = {"index": len(self.ids)} if self.streaming else {}
        self.ids.add(call_id)
        return {"function": {"name": name, "arguments": arguments}, "type": "function", "id": call_id, **number}


def _with_schema(function: dict[str, Any]) -> dict[str, Any]:
    """A tool with the schema that parsers take for granted: OpenAI's is optional, and JSON's may be `true`."""
    schema = function.get("parameters")
    schema = schema if isinstance(schema, dict) else {}
    properties = schema.get("properties")
    known = {k: v if isinstance(v, dict) else {} for k, v in properties.items()} if isinstance(properties, dict) else {}
    return {"type": "function", "function": {**function, "parameters": {**schema, "properties": known}}}
