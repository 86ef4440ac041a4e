"""The tools of a Responses request: what the model is offered of them, and the item that a call of each becomes.

A function stays one, those of a namespace take its name in front, a custom tool becomes a function of one text. What
only a vendor's servers or programs can run is left out. Knows no HTTP and no model.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from .dialect import FieldError, Json, function_tool, items, not_strict, typed

# Beginnings, since some carry a date. An MCP server's tools are asked for on purpose, so `mcp` is refused instead.
BUILT_IN = (
    "web_search", "file_search", "tool_search", "code_interpreter", "computer", "image_generation", "local_shell",
    "shell", "apply_patch",
)  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """How a call of a tool is told: its item's type, the beginning of its id, the field of what was written."""

    item: str
    prefix: str
    field: str

    @property
    def event(self) -> str:
        return f"response.{self.item}_{self.field}"


FUNCTION = Kind("function_call", "fc", "arguments")
CUSTOM = Kind("custom_tool_call", "ctc", "input")


class Tools:
    """See the module; raises `FieldError`.

    Attributes:
        functions: for the chat route. left_out: types of tools that nobody here can run.
    """

    def __init__(self, declared: Any):
        self.functions: list[Json] = []
        self.left_out: list[str] = []
        self._known: dict[str, tuple[Kind, Json]] = {}  # by name on the chat route: kind, name and namespace
        self._add(declared, "tools", None)

    def item(self, name: str, arguments: str) -> tuple[Kind, Json, str]:
        """Of a call on the chat route: its kind, its own name and namespace, and what was written."""
        kind, names = self._known.get(name, (FUNCTION, {"name": name}))
        if kind is CUSTOM:
            said = json.loads(arguments).get("input")
            arguments = said if isinstance(said, str) else arguments
        return kind, names, arguments

    def _add(self, tools: Any, field: str, space: str | None) -> None:
        for place, tool in items(tools, field):
            kind = tool.get("type")
            if isinstance(kind, str) and kind.startswith(BUILT_IN):
                self.left_out.append(kind)
                continue
            if kind not in ("function", "custom") and (kind != "namespace" or space is not None):
                raise FieldError(f"{place}.type", f"{kind!r} is no function; switch that tool off in the client")
            if tool.get("strict"):
                raise not_strict(place)
            name = typed(tool.get("name"), str, f"{place}.name")
            if kind == "namespace":
                self._add(tool.get("tools"), f"{place}.tools", name)
                continue
            full = full_name(space, name)
            names = {"name": name, **({"namespace": space} if space else {})}
            custom = kind == "custom"
            self._known[full] = CUSTOM if custom else FUNCTION, names
            schema = typed(tool.get("parameters") or {}, dict, f"{place}.parameters")
            parameters = _one_text(tool.get("format"), place) if custom else schema
            self.functions.append(function_tool(full, tool.get("description"), parameters, place))


def full_name(space: str | None, name: str) -> str:
    """A tool's name on the chat route, which has no namespaces."""
    return f"{space}__{name}" if space else name


def _one_text(declared: Any, field: str) -> Json:
    """The schema of a custom tool's input; its grammar is told to the model, nothing enforces it."""
    form: Json = typed(declared or {}, dict, f"{field}.format")
    said = "the whole input of the tool, as plain text"
    if form.get("type") == "grammar":
        definition = typed(form.get("definition"), str, f"{field}.format.definition")
        said += f", by this {form.get('syntax')} grammar:\n{definition}"
    properties = {"input": {"type": "string", "description": said}}
    return {"type": "object", "properties": properties, "required": ["input"]}
