"""An output parser for Hardpoint, for an invented format with a scratchpad and calls of tools."""

from collections.abc import Mapping

from hardpoint.toolkit.parsing.format_parser import (
    Content,
    FormatParser,
    Reasoning,
    State,
    ToolName,
)
from hardpoint.toolkit.parsing.json_text import JsonArguments

__all__ = ["Scratchpad"]


class _Name(ToolName):
    """The name of a tool, up to its arguments."""

    ends_at = "{"


class Scratchpad(FormatParser):
    """`<pad>REASONING</pad>`, then an answer; a call is a line `>> NAME{"argument": ...}`.

    One class finds both, so it is enabled under both kinds, and calls inside the scratchpad are
    reasoning. Where the configuration is "auto", the chat template has to have its marks.
    """

    contract = 2
    roles = ("reasoning", "tools")
    reasoning = "pad"
    template_marks = ("<pad>", ">> ")

    def states(self) -> Mapping[str, State]:
        """Return the states of an output, each with the markers that lead out of it."""
        return {
            "content": State(Content, {"<pad>": "pad", ">> ": "name"}),
            "pad": State(Reasoning, {"</pad>": "content"}),
            "name": State(_Name, {}, then="arguments"),
            "arguments": State(JsonArguments, {"\n": "content"}),
        }
