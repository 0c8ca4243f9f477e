"""Harmony, the format of gpt-oss: messages with a channel and a recipient each."""

from __future__ import annotations

from collections.abc import Mapping

from hardpoint.plugins import OutputEvent, ToolCallBegin
from hardpoint.plugins.output_format import (
    Body,
    Content,
    FormatParser,
    Ignored,
    OpenOutput,
    Reasoning,
    State,
)
from hardpoint.plugins.output_json import JsonArguments

_TOOL = "to=functions."


class Harmony(FormatParser):
    """Messages of gpt-oss: `analysis` is reasoning, `functions.NAME` gets calls, the rest is content.

    A message is `<|start|>assistant<|channel|>CHANNEL to=RECIPIENT<|constrain|>json<|message|>TEXT`
    and ends with `<|end|>`, `<|call|>` or `<|return|>`
    (https://cookbook.openai.com/articles/openai-harmony).
    """

    contract = 1
    roles = ("reasoning", "tools")
    reasoning = "analysis"
    needs_special_tokens = True

    def states(self) -> Mapping[str, State]:
        """Return the parts of a message's header, and its text by channel."""
        header = {"<|channel|>": "header", "<|constrain|>": "header", "<|message|>": None}
        ends = {"<|end|>": "between", "<|call|>": "between", "<|return|>": "between"}
        ends["<|start|>"] = "header"
        return {
            "header": State(_Header, header),
            "analysis": State(Reasoning, ends),
            "content": State(Content, ends),
            "arguments": State(_Arguments, ends),
            "between": State(Ignored, {"<|start|>": "header", "<|channel|>": "header"}),
        }


class _Header(Body):
    """A part of the header; the last one decides what the message is."""

    def __init__(self, output: OpenOutput) -> None:
        super().__init__(output)
        self._text = ""

    def feed(self, text: str, events: list[OutputEvent]) -> int:  # noqa: ARG002
        self._text = (self._text + text)[:256]
        return len(text)

    def close(self, events: list[OutputEvent], *, cut: bool) -> None:
        notes = self.output.notes
        for word in self._text.split():
            if word.startswith(_TOOL):
                notes["tool"] = word.removeprefix(_TOOL)
            elif word in {"analysis", "commentary", "final"}:
                notes["channel"] = word
        if cut:
            return
        self.next = "analysis" if notes.get("channel") == "analysis" else "content"
        if "tool" in notes:
            self.next = "arguments"


class _Arguments(JsonArguments):
    """The arguments of a call to the header's recipient."""

    def open(self, events: list[OutputEvent]) -> None:
        self.output.tool = self.output.notes.pop("tool")
        events.append(ToolCallBegin(self.output.tool))
