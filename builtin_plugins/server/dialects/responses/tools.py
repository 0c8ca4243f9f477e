"""Tools of `/v1/responses`: hosted tools and tools of a namespace."""

from __future__ import annotations

from typing import Any

from hardpoint.plugins import RequestError

__all__ = ["CALLABLE", "flat_name", "flat_tools", "without_hosted_tools"]

CALLABLE = ("function", "custom")
"""Types of tools that the client calls."""

_HOSTED = frozenset(
    {
        "code_interpreter",
        "computer",
        "computer_use_preview",
        "file_search",
        "image_generation",
        "local_shell",
        "mcp",
        "shell",
        "apply_patch",
        "tool_search",
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
    }
)


def without_hosted_tools(fields: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a body without its hosted tools, which no server but OpenAI's runs, and their paths.

    A tool choice that names a hosted tool stays, and is an error.
    """
    tools = fields.get("tools")
    hosted = {
        index: tool["type"]
        for index, tool in enumerate(tools if isinstance(tools, list) else ())
        if isinstance(tool, dict) and isinstance(tool.get("type"), str) and tool["type"] in _HOSTED
    }
    if not hosted:
        return fields, []
    assert isinstance(tools, list)
    functions = [tool for index, tool in enumerate(tools) if index not in hosted]
    rest = {name: value for name, value in fields.items() if name != "tools"}
    if functions:
        rest["tools"] = functions
    return rest, [f"tools[{index}].{type_}" for index, type_ in hosted.items()]


def flat_name(namespace: object, name: str) -> str:
    """Return the name that the model sees for a function of a namespace."""
    if not isinstance(namespace, str) or not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


def flat_tools(tools: list[Any]) -> list[Any]:
    """Return tools with the functions of each namespace instead of the namespace.

    Raises:
        RequestError: a namespace has no name, or no list of functions and custom tools.
    """
    flat: list[Any] = []
    for index, tool in enumerate(tools):
        if not isinstance(tool, dict) or tool.get("type") != "namespace":
            flat.append(tool)
            continue
        name, functions = tool.get("name"), tool.get("tools")
        if not isinstance(name, str) or not name:
            raise RequestError(f"tools[{index}].name: expected a text, the name of the namespace")
        if not isinstance(functions, list):
            raise RequestError(f"tools[{index}].tools: expected a list of functions")
        for number, function in enumerate(functions):
            if not isinstance(function, dict) or function.get("type") not in CALLABLE:
                path = f"tools[{index}].tools[{number}].type"
                raise RequestError(f'{path}: expected "function" or "custom" in a namespace')
            flat.append({**function, "namespace": name})
    return flat
