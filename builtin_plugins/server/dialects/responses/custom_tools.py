"""Custom tools of `/v1/responses`: functions with one text, which the client sees without JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from hardpoint.typed import Strict

from .tools import flat_name

__all__ = [
    "CustomFormat",
    "CustomTool",
    "OutputCustomCall",
    "as_arguments",
    "custom_input",
    "unenforced_formats",
]

_INPUT = "input"
_PARAMETERS = {
    "type": "object",
    "properties": {_INPUT: {"type": "string"}},
    "required": [_INPUT],
    "additionalProperties": False,
}


class CustomFormat(Strict):
    """The form of a custom tool's input.

    Attributes:
        type: "grammar" adds the definition to the description; the input is not constrained.
    """

    type: Literal["text", "grammar"] = "text"
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class CustomTool(Strict, tag_field="type", tag="custom"):
    """A tool with a text as input.

    Attributes:
        allowed_callers: must hold "direct": no programs are run that could call it.
        async: ignored: calls are the caller's to make.
        defer_loading: ignored: the model sees all tools.
        namespace: namespace of the tool; a part of the name that the model sees.
    """

    name: str
    description: str | None = None
    format: CustomFormat | None = None
    allowed_callers: list[str] | None = None
    async_: Any = msgspec.field(default=None, name="async")
    defer_loading: Any = None
    namespace: str | None = None

    @property
    def flat_name(self) -> str:
        """The name that the model sees."""
        return flat_name(self.namespace, self.name)

    def plain(self) -> dict[str, Any]:
        """Return the tool as conversations have it: a function with the input as its argument."""
        parts = [self.description or ""]
        if self.format is not None and self.format.definition:
            syntax = self.format.syntax or "lark"
            parts.append(f"The input has this form ({syntax}):\n{self.format.definition}")
        function: dict[str, Any] = {"name": self.flat_name, "parameters": _PARAMETERS}
        if description := "\n\n".join(filter(None, parts)):
            function["description"] = description
        return {"type": "function", "function": function}


class OutputCustomCall(msgspec.Struct, tag_field="type", tag="custom_tool_call", kw_only=True):
    """A call of a custom tool."""

    id: str
    call_id: str
    name: str
    input: str
    status: Literal["in_progress", "completed", "incomplete"]
    namespace: str | UnsetType = UNSET


def as_arguments(text: str) -> str:
    """Return the arguments, as JSON, of the function that stands for a custom tool."""
    return msgspec.json.encode({_INPUT: text}).decode()


def custom_input(arguments: str) -> str:
    """Return the input of a custom tool from the arguments of its function.

    Arguments of another form are the input as the model wrote them, so that the tool can report
    what is wrong.
    """
    try:
        decoded = msgspec.json.decode(arguments)
    except msgspec.DecodeError:
        return arguments
    text = decoded.get(_INPUT) if isinstance(decoded, dict) else None
    return text if isinstance(text, str) else arguments


def unenforced_formats(fields: dict[str, Any]) -> list[str]:
    """Return the paths of the grammars of custom tools, which constrain no input."""
    return list(_grammars(fields.get("tools"), "tools"))


def _grammars(tools: Any, path: str) -> Iterator[str]:
    for index, tool in enumerate(tools if isinstance(tools, list) else ()):
        if not isinstance(tool, dict):
            continue
        place, form = f"{path}[{index}]", tool.get("format")
        if tool.get("type") == "namespace":
            yield from _grammars(tool.get("tools"), f"{place}.tools")
        elif tool.get("type") == "custom" and _is_grammar(form):
            yield f"{place}.format"


def _is_grammar(form: Any) -> bool:
    return isinstance(form, dict) and form.get("type") == "grammar"
